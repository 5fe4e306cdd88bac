// A Transport of an MPI communicator. This file is compiled by the program that includes it, with its MPI, so that one
// heed_distributed serves every MPI.
//
//   MPI_Init(&argc, &argv);
//   {
//     heed::distributed::MpiTransport mpi(MPI_COMM_WORLD);
//     const heed::distributed::Group group(mpi.transport());
//     heed::distributed::Forward(ctx, group, ...);
//   }
//   MPI_Finalize();
#ifndef HEED_DISTRIBUTED_MPI_H_
#define HEED_DISTRIBUTED_MPI_H_

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "heed/distributed/group.h"

namespace heed::distributed {

// An error that MPI reports.
class MpiError : public std::runtime_error {
 public:
  MpiError(const char* function, int code) : std::runtime_error(Text(function, code)), code_(code) {}
  int code() const { return code_; }

 private:
  static std::string Text(const char* function, int code) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return std::string(function) + ": " + std::string(text, static_cast<size_t>(length));
  }
  int code_;
};

// Owns a duplicate of a communicator, so that its messages meet no others, and reports errors as MpiError instead of
// ending the process. All ranks of the communicator construct one. It ends before MPI_Finalize. MPI must allow calls
// from the thread that uses it.
class MpiTransport {
 public:
  // MPI counts in int: what is longer than `max_bytes` is sent as several messages.
  explicit MpiTransport(MPI_Comm comm, int64_t max_bytes = int64_t{1} << 30) : max_bytes_(max_bytes) {
    Check("MPI_Comm_dup", MPI_Comm_dup(comm, &comm_));
    Check("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    Check("MPI_Comm_rank", MPI_Comm_rank(comm_, &rank_));
    Check("MPI_Comm_size", MPI_Comm_size(comm_, &size_));
  }
  // Takes a handle of Fortran, or of another language that stores it as a number.
  static MPI_Comm OfFortran(MPI_Fint handle) { return MPI_Comm_f2c(handle); }
  ~MpiTransport() {
    int finalized = 0;
    if (MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0) MPI_Comm_free(&comm_);
  }
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;

  // Valid as long as this object.
  Transport transport() {
    Transport transport;
    transport.self = this;
    transport.rank = rank_;
    transport.size = size_;
    transport.all_gather = [](void* self, const void* sent, int64_t num_bytes, void* received) {
      static_cast<MpiTransport*>(self)->AllGather(sent, num_bytes, received);
    };
    transport.send_receive = [](void* self, const void* sent, int64_t num_sent, int to, void* received,
                                int64_t num_received, int from) {
      static_cast<MpiTransport*>(self)->SendReceive(sent, num_sent, to, received, num_received, from);
    };
    transport.all_to_all = [](void* self, const void* sent, const int64_t* num_sent, void* received,
                              const int64_t* num_received) {
      static_cast<MpiTransport*>(self)->AllToAll(sent, num_sent, received, num_received);
    };
    transport.broadcast = [](void* self, void* data, int64_t num_bytes, int root) {
      static_cast<MpiTransport*>(self)->Broadcast(data, num_bytes, root);
    };
    transport.start = [](void* self, const void* sent, int64_t num_sent, int to, void* received, int64_t num_received,
                         int from) -> void* {
      return static_cast<MpiTransport*>(self)->Start(sent, num_sent, to, received, num_received, from);
    };
    transport.finish = [](void*, void* started) { Finish(static_cast<Requests*>(started)); };
    return transport;
  }

 private:
  static constexpr int kTag = 1;

  static void Check(const char* function, int code) {
    if (code != MPI_SUCCESS) throw MpiError(function, code);
  }
  static const char* At(const void* data, int64_t offset) { return static_cast<const char*>(data) + offset; }
  static char* At(void* data, int64_t offset) { return static_cast<char*>(data) + offset; }

  void AllGather(const void* sent, int64_t num_bytes, void* received) {
    if (num_bytes <= max_bytes_ / size_) {
      const int count = static_cast<int>(num_bytes);
      Check("MPI_Allgather", MPI_Allgather(sent, count, MPI_BYTE, received, count, MPI_BYTE, comm_));
      return;
    }
    std::copy_n(At(sent, 0), num_bytes, At(received, rank_ * num_bytes));
    for (int root = 0; root < size_; ++root) Broadcast(At(received, root * num_bytes), num_bytes, root);
  }

  void SendReceive(const void* sent, int64_t num_sent, int to, void* received, int64_t num_received, int from) {
    if (to < 0) num_sent = -1;
    if (from < 0) num_received = -1;
    // Sender and receiver know the number of bytes and divide it alike. An empty message is one message.
    for (int64_t done = 0; done == 0 || done < std::max(num_sent, num_received); done += max_bytes_) {
      const bool sends = num_sent >= 0 && (done == 0 || done < num_sent);
      const bool receives = num_received >= 0 && (done == 0 || done < num_received);
      const int64_t out = sends ? std::min(num_sent - done, max_bytes_) : 0;
      const int64_t in = receives ? std::min(num_received - done, max_bytes_) : 0;
      Check("MPI_Sendrecv",
            MPI_Sendrecv(sends ? At(sent, done) : nullptr, static_cast<int>(out), MPI_BYTE, sends ? to : MPI_PROC_NULL,
                         kTag, receives ? At(received, done) : nullptr, static_cast<int>(in), MPI_BYTE,
                         receives ? from : MPI_PROC_NULL, kTag, comm_, MPI_STATUS_IGNORE));
    }
  }

  using Requests = std::vector<MPI_Request>;

  Requests* Start(const void* sent, int64_t num_sent, int to, void* received, int64_t num_received, int from) {
    auto requests = std::make_unique<Requests>();
    const auto parts = [&](int64_t num_bytes) { return num_bytes == 0 ? 1 : (num_bytes - 1) / max_bytes_ + 1; };
    requests->reserve(static_cast<size_t>((to < 0 ? 0 : parts(num_sent)) + (from < 0 ? 0 : parts(num_received))));
    const auto post = [&](int peer, int64_t num_bytes, const char* function, const auto& begin) {
      for (int64_t done = 0; peer >= 0 && (done == 0 || done < num_bytes); done += max_bytes_) {
        requests->push_back(MPI_REQUEST_NULL);
        const int count = static_cast<int>(std::min(num_bytes - done, max_bytes_));
        const int code = begin(done, count, &requests->back());
        if (code == MPI_SUCCESS) continue;
        requests->pop_back();
        Finish(requests.release());  // those that have begun
        throw MpiError(function, code);
      }
    };
    post(from, num_received, "MPI_Irecv", [&](int64_t done, int count, MPI_Request* request) {
      return MPI_Irecv(At(received, done), count, MPI_BYTE, from, kTag, comm_, request);
    });
    post(to, num_sent, "MPI_Isend", [&](int64_t done, int count, MPI_Request* request) {
      return MPI_Isend(At(sent, done), count, MPI_BYTE, to, kTag, comm_, request);
    });
    return requests.release();
  }

  static void Finish(Requests* started) {
    const std::unique_ptr<Requests> requests(started);
    const int count = static_cast<int>(requests->size());
    Check("MPI_Waitall", MPI_Waitall(count, requests->data(), MPI_STATUSES_IGNORE));
  }

  // In step s each rank sends to the s-th rank after it: MPI_Alltoallv counts all messages together in one int.
  void AllToAll(const void* sent, const int64_t* num_sent, void* received, const int64_t* num_received) {
    const auto begin = [](const int64_t* counts, int rank) {
      int64_t sum = 0;
      for (int r = 0; r < rank; ++r) sum += counts[r];
      return sum;
    };
    std::copy_n(At(sent, begin(num_sent, rank_)), num_sent[rank_], At(received, begin(num_received, rank_)));
    for (int step = 1; step < size_; ++step) {
      const int to = (rank_ + step) % size_, from = (rank_ - step + size_) % size_;
      SendReceive(At(sent, begin(num_sent, to)), num_sent[to], to, At(received, begin(num_received, from)),
                  num_received[from], from);
    }
  }

  void Broadcast(void* data, int64_t num_bytes, int root) {
    for (int64_t done = 0; done < num_bytes; done += max_bytes_) {
      const auto count = static_cast<int>(std::min(num_bytes - done, max_bytes_));
      Check("MPI_Bcast", MPI_Bcast(At(data, done), count, MPI_BYTE, root, comm_));
    }
  }

  int64_t max_bytes_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
};

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_MPI_H_

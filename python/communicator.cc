// Messages of Python's communicators.
#include "python/communicator.h"

#include <cstdint>
#include <exception>
#include <numeric>
#include <string>

#include "python/gil.h"

namespace heed::python {
namespace {

namespace nb = nanobind;

constexpr const char* kMethods[] = {"Get_rank", "Get_size", "Allgather", "Send",
                                    "Recv",     "Sendrecv", "Alltoallv", "Bcast"};

// Python.h's PyBUF_READ and PyBUF_WRITE, which its limited API has from 3.11 on.
constexpr int kRead = 0x100, kWrite = 0x200;

nb::object Buffer(const void* data, int64_t num_bytes, bool writable) {
  static char empty = 0;
  char* const begin = num_bytes == 0 ? &empty : const_cast<char*>(static_cast<const char*>(data));
  return nb::steal(PyMemoryView_FromMemory(begin, num_bytes, writable ? kWrite : kRead));
}

nb::list Counts(const int64_t* counts, int size) {
  nb::list list;
  for (int r = 0; r < size; ++r) list.append(counts[r]);
  return list;
}

// Calls f() with the GIL, which the caller of the library has released.
template <class F>
void WithGil(const F& f) {
  RunPython([&] {
    const nb::gil_scoped_acquire gil;
    f();
  });
}

}  // namespace

Communicator::Communicator(const Argument& argument) : comm_(argument.value) {
  for (const char* const method : kMethods) {
    if (!nb::hasattr(comm_, method)) {
      Fail(argument,
           "a communicator of mpi4py, or an object with the methods Get_rank, Get_size, Allgather, Send, "
           "Recv, Sendrecv, Alltoallv and Bcast");
    }
  }
  distributed::Transport transport;
  transport.self = this;
  transport.rank = nb::cast<int>(comm_.attr("Get_rank")());
  transport.size = size_ = nb::cast<int>(comm_.attr("Get_size")());
  transport.all_gather = &AllGather;
  transport.send_receive = &SendReceive;
  transport.all_to_all = &AllToAll;
  transport.broadcast = &Broadcast;
  if (nb::hasattr(comm_, "Isend") && nb::hasattr(comm_, "Irecv")) {
    transport.start = &Start;
    transport.finish = &Finish;
  }
  group_ = distributed::Group(transport);
}

void Communicator::AllGather(void* self, const void* sent, int64_t num_bytes, void* received) {
  WithGil([&] {
    const auto& of = *static_cast<const Communicator*>(self);
    of.comm_.attr("Allgather")(Buffer(sent, num_bytes, false), Buffer(received, num_bytes * of.size_, true));
  });
}

void Communicator::SendReceive(void* self, const void* sent, int64_t num_sent, int to, void* received,
                               int64_t num_received, int from) {
  WithGil([&] {
    const auto& of = *static_cast<const Communicator*>(self);
    using namespace nanobind::literals;
    if (to >= 0 && from >= 0) {
      of.comm_.attr("Sendrecv")(Buffer(sent, num_sent, false), to, "recvbuf"_a = Buffer(received, num_received, true),
                                "source"_a = from);
    } else if (to >= 0) {
      of.comm_.attr("Send")(Buffer(sent, num_sent, false), to);
    } else if (from >= 0) {
      of.comm_.attr("Recv")(Buffer(received, num_received, true), from);
    }
  });
}

void Communicator::AllToAll(void* self, const void* sent, const int64_t* num_sent, void* received,
                            const int64_t* num_received) {
  WithGil([&] {
    const auto& of = *static_cast<const Communicator*>(self);
    const auto message = [&](const void* data, const int64_t* counts, bool writable) {
      nb::list list;
      list.append(Buffer(data, std::accumulate(counts, counts + of.size_, int64_t{0}), writable));
      list.append(Counts(counts, of.size_));
      return list;
    };
    of.comm_.attr("Alltoallv")(message(sent, num_sent, false), message(received, num_received, true));
  });
}

void Communicator::Broadcast(void* self, void* data, int64_t num_bytes, int root) {
  WithGil([&] {
    const auto& of = *static_cast<const Communicator*>(self);
    of.comm_.attr("Bcast")(Buffer(data, num_bytes, true), root);
  });
}

// Returns a list of requests, which Finish waits for. Both ranks know which messages are empty: these are not sent.
void* Communicator::Start(void* self, const void* sent, int64_t num_sent, int to, void* received, int64_t num_received,
                          int from) {
  PyObject* started = nullptr;
  WithGil([&] {
    const auto& of = *static_cast<const Communicator*>(self);
    nb::list requests;
    if (from >= 0 && num_received > 0) {
      requests.append(of.comm_.attr("Irecv")(Buffer(received, num_received, true), from));
    }
    if (to >= 0 && num_sent > 0) requests.append(of.comm_.attr("Isend")(Buffer(sent, num_sent, false), to));
    started = requests.release().ptr();
  });
  return started;
}

void Communicator::Finish(void* /*self*/, void* started) {
  WithGil([&] {
    const auto requests = nb::steal<nb::list>(static_cast<PyObject*>(started));
    std::exception_ptr error;
    for (const nb::handle request : requests) {  // all of them, since each uses memory
      try {
        request.attr("Wait")();
      } catch (const std::exception&) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  });
}

void TellRefusal(const distributed::Group& group, const char* message) {
  const GilReleased released;
  distributed::RefuseCall(group, message);
}

void TellRefusal(const char* operation, PyObject* kwargs, const char* message) {
  PyObject* const comm = kwargs == nullptr ? nullptr : PyDict_GetItemString(kwargs, "comm");
  if (comm == nullptr || comm == Py_None) return;
  try {
    const Communicator communicator({operation, "comm", comm});
    TellRefusal(communicator.group(), message);
  } catch (const std::exception&) {  // no communicator, or one that cannot send: the refusal itself is thrown
  }
}

}  // namespace heed::python

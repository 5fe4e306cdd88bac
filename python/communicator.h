// A communicator of mpi4py as the transport of heed_distributed.
#ifndef HEED_PYTHON_COMMUNICATOR_H_
#define HEED_PYTHON_COMMUNICATOR_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <exception>

#include "heed/distributed/group.h"
#include "python/arguments.h"

namespace heed::python {

// Calls Get_rank, Get_size, Allgather, Send, Recv, Sendrecv, Alltoallv and Bcast of an object with buffers of bytes,
// and Isend and Irecv if it has them. It is used while the caller has released the GIL, and outlived by the object.
class Communicator {
 public:
  // Throws InvalidArgument for an object without these methods.
  explicit Communicator(const Argument& argument);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  const distributed::Group& group() const { return group_; }

 private:
  static void AllGather(void* self, const void* sent, int64_t num_bytes, void* received);
  static void SendReceive(void* self, const void* sent, int64_t num_sent, int to, void* received, int64_t num_received,
                          int from);
  static void AllToAll(void* self, const void* sent, const int64_t* num_sent, void* received,
                       const int64_t* num_received);
  static void Broadcast(void* self, void* data, int64_t num_bytes, int root);
  static void* Start(void* self, const void* sent, int64_t num_sent, int to, void* received, int64_t num_received,
                     int from);
  static void Finish(void* self, void* started);

  nanobind::handle comm_;
  int size_ = 1;
  distributed::Group group_;
};

// Tells the other ranks of a group, or of the communicator that is the keyword `comm` of a call if there is one, that
// this rank refuses its arguments: each of them throws InvalidArgument instead of waiting for the call.
void TellRefusal(const distributed::Group& group, const char* message);
void TellRefusal(const char* operation, PyObject* kwargs, const char* message);

// Returns read(), which reads the arguments of a call of these processes. What it throws the other ranks are told.
template <class Read, class... Of>
auto ReadInGroup(const Read& read, const Of&... of) {
  try {
    return read();
  } catch (const std::exception& error) {
    TellRefusal(of..., error.what());
    throw;
  }
}

}  // namespace heed::python

#endif  // HEED_PYTHON_COMMUNICATOR_H_

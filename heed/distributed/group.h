// The processes among which a sequence is divided, and what carries their messages.
//
// heed_distributed links no MPI: a program gives it its functions. heed/distributed/mpi.h makes them of any MPI.
#ifndef HEED_DISTRIBUTED_GROUP_H_
#define HEED_DISTRIBUTED_GROUP_H_

#include <cstdint>
#include <string>

#include "heed/core/export.h"

namespace heed::distributed {

// The messages of one process. Each function blocks until its buffers may be used again, and throws if a message cannot
// be sent or received. All ranks call the same functions in the same order. Sizes are bytes, and may be 0.
struct Transport {
  void* self = nullptr;  // the first argument of each function
  int rank = 0, size = 1;

  // Receives size * num_bytes: what each rank sends, in the order of ranks.
  void (*all_gather)(void* self, const void* sent, int64_t num_bytes, void* received) = nullptr;
  // Sends to one rank and receives from another, at the same time. A rank of -1 leaves out that half.
  void (*send_receive)(void* self, const void* sent, int64_t num_sent, int to, void* received, int64_t num_received,
                       int from) = nullptr;
  // Sends num_sent[r] bytes to each rank r and receives num_received[r] from it; both buffers are in the order of
  // ranks, without gaps.
  void (*all_to_all)(void* self, const void* sent, const int64_t* num_sent, void* received,
                     const int64_t* num_received) = nullptr;
  // Sends from one rank to all others.
  void (*broadcast)(void* self, void* data, int64_t num_bytes, int root) = nullptr;

  // Optional, both or none: messages that move while the rank computes. `start` begins a send_receive and returns at
  // once; `finish` takes what it returned, once, and waits until the message has been received and the buffers may be
  // used again. Messages from one rank to another arrive in the order of their starts. A rank that has started a
  // message calls `start` and `finish` alone until all of its messages are finished.
  void* (*start)(void* self, const void* sent, int64_t num_sent, int to, void* received, int64_t num_received,
                 int from) = nullptr;
  void (*finish)(void* self, void* started) = nullptr;
};

// A group of processes, each of which holds the tokens of one part of a sequence, in the order of ranks.
class HEED_API Group {
 public:
  Group() = default;  // one process
  // Throws InvalidArgument for a rank that is not below the size, a function that is missing in a group of several, or
  // one of `start` and `finish` without the other.
  // `transport.self` outlives the group.
  explicit Group(const Transport& transport);

  int rank() const { return transport_.rank; }
  int size() const { return transport_.size; }
  const Transport& transport() const { return transport_; }

  // With checks, which are the default unless HEED_DISTRIBUTED_CHECKS is 0 in the environment, ranks compare their
  // calls before any tensor is sent.
  void set_checks(bool checks) { checks_ = checks; }
  bool checks() const { return checks_; }

 private:
  Transport transport_;
  bool checks_ = true;
};

// Takes the place of a call that this rank refuses before heed_distributed reads its arguments: each of the other
// ranks, which compare their calls, throws InvalidArgument with `message`. Returns on this rank.
HEED_API void RefuseCall(const Group& group, const std::string& message);

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_GROUP_H_

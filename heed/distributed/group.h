// The processes among which a sequence is divided, and what carries their messages.
//
// heed_distributed links no MPI: a program gives it four functions. heed/distributed/mpi.h makes them of any MPI.
#ifndef HEED_DISTRIBUTED_GROUP_H_
#define HEED_DISTRIBUTED_GROUP_H_

#include <cstdint>

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
};

// A group of processes, each of which holds the tokens of one part of a sequence, in the order of ranks.
class HEED_API Group {
 public:
  Group() = default;  // one process
  // Throws InvalidArgument for a rank that is not below the size, or a function that is missing in a group of several.
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

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_GROUP_H_

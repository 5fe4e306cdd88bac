// Threads that are hard to please: for tests of what must not depend on them.
#ifndef HEED_HARNESS_UNFAIR_EXECUTOR_H_
#define HEED_HARNESS_UNFAIR_EXECUTOR_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/harness/buffer.h"

namespace heed {

// Workers start late, in any order, some alone until nothing is left to do, and
// some never; each rounds in a direction of its own. Which tasks a worker gets is a
// matter of chance.
class UnfairExecutor {
 public:
  UnfairExecutor(int num_threads, uint64_t seed) : num_threads_(num_threads), random_(seed) {}

  // Valid as long as this object.
  Executor executor();

 private:
  void Run(int num_workers, void (*body)(void*, int), void* argument);

  int num_threads_;
  Random random_;
};

}  // namespace heed

#endif  // HEED_HARNESS_UNFAIR_EXECUTOR_H_

// An adversarial executor, for tests of results that must not depend on threads.
#ifndef HEED_HARNESS_UNFAIR_EXECUTOR_H_
#define HEED_HARNESS_UNFAIR_EXECUTOR_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/harness/buffer.h"

namespace heed {

// Workers start late, in any order; some run alone until no task is left, and some never run. Each has a different
// rounding mode. The tasks of a worker are random.
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

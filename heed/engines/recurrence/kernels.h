// The kernels of the recurrence engine, best first: one list that dispatch, Explain and
// Workspace read.
#ifndef HEED_ENGINES_RECURRENCE_KERNELS_H_
#define HEED_ENGINES_RECURRENCE_KERNELS_H_

#include <cstdint>
#include <string>

#include "heed/core/context.h"
#include "heed/engines/recurrence/passes.h"
#include "heed/engines/recurrence/problem.h"

namespace heed::recurrence {

struct Kernel {
  const char* name;
  bool (*takes)(const Context& ctx, const Problem& problem);
  const char* computes;  // what it takes, for errors
  const char* why;  // when it is chosen

  void (*forward)(Context& ctx, const Problem& problem);
  int64_t (*workspace)(const Context& ctx, const Problem& problem);  // per thread
  void (*step)(Context& ctx, const Problem& problem);
  void (*backward)(Context& ctx, const Problem& problem, const Gradients& gradients);
  BackwardBytes (*backward_workspace)(const Context& ctx, const Problem& problem);
};

// The first kernel that takes the problem. Throws Unsupported, with every kernel's
// reason, if none does.
const Kernel& Choose(const char* op, const Context& ctx, const Problem& problem);

}  // namespace heed::recurrence

#endif  // HEED_ENGINES_RECURRENCE_KERNELS_H_

// The kernels of the scan engine, best first: one list that dispatch, Explain and Workspace read.
#ifndef HEED_ENGINES_SCAN_KERNELS_H_
#define HEED_ENGINES_SCAN_KERNELS_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/engines/scan/passes.h"
#include "heed/engines/scan/problem.h"

namespace heed::scan {

struct Kernel {
  const char* name;
  bool (*takes)(const Problem& problem);
  const char* computes;  // what it takes, for errors
  const char* why;       // when it is chosen

  void (*forward)(Context& ctx, const Problem& problem);  // a step too
  int64_t (*workspace)(const Context& ctx, const Problem& problem);  // per thread
  void (*backward)(Context& ctx, const Problem& problem, const Gradients& gradients);
  BackwardBytes (*backward_workspace)(const Context& ctx, const Problem& problem);
};

// The first kernel that takes the problem. Throws Unsupported, with every kernel's
// reason, if none does.
const Kernel& Choose(const char* op, const Problem& problem);

}  // namespace heed::scan

#endif  // HEED_ENGINES_SCAN_KERNELS_H_

// The kernels of the softmax engine, best first: one list that dispatch,
// Explain and Workspace read.
#ifndef HEED_ENGINES_SOFTMAX_KERNELS_H_
#define HEED_ENGINES_SOFTMAX_KERNELS_H_

#include <cstdint>
#include <string>

#include "heed/core/context.h"
#include "heed/engines/softmax/backward.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/visit.h"

namespace heed::softmax {

struct Kernel {
  const char* name;
  // Empty if the kernel can run the problem, else why it cannot.
  std::string (*declines)(const Context& ctx, const Problem& problem);
  // Scratch bytes per thread, with its share of what threads share.
  int64_t (*workspace)(const Context& ctx, const Problem& problem);
  // Rows that one block computes together.
  int64_t (*lanes)(const Context& ctx, const Problem& problem);
  KeyGrid grid;  // which shows in the pairs visited
  // The SIMD target, or the matrix unit, that it would use.
  std::string (*target)(const Context& ctx);
  // Writes every row of every sequence. The problem has been checked.
  void (*run)(Context& ctx, const Problem& problem);
  bool invariant;   // the bits do not depend on how queries are split
  const char* why;  // when it is chosen

  // The backward pass, or null.
  void (*backward)(Context& ctx, const Problem& problem, const Gradients& gradients);
  BackwardBytes (*backward_workspace)(const Context& ctx, const Problem& problem,
                                      const Gradients& gradients);
};

enum class Pass { kForward, kBackward };

// The first kernel that takes the problem. Throws Unsupported, with every
// kernel's reason, if none does.
const Kernel& Choose(const char* op, const Context& ctx, const Problem& problem,
                     Pass pass = Pass::kForward);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_KERNELS_H_

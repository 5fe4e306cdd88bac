// What a kernel of an engine is, and how one is chosen from the engine's list: dispatch, Explain and Workspace read
// that.
#ifndef HEED_ENGINES_KERNEL_LIST_H_
#define HEED_ENGINES_KERNEL_LIST_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#include "heed/core/dtype.h"
#include "heed/core/error.h"
#include "heed/core/tensor.h"

namespace heed::engine {

// Scratch of a backward pass.
struct BackwardBytes {
  int64_t per_thread = 0, shared = 0;
};

// What one file compiles for one SIMD target. A pass is null where the file has none. Problems have been checked.
template <class Problem, class Gradients>
struct Passes {
  void (*forward)(Context& ctx, const Problem& problem) = nullptr;
  // Scratch bytes per thread, with its share of what threads share.
  int64_t (*workspace)(const Context& ctx, const Problem& problem) = nullptr;
  // Rows that one block of the softmax engine computes together.
  int64_t (*lanes)(const Problem& problem) = nullptr;
  // One token of a recurrence, whose final states are the initial ones too.
  void (*step)(Context& ctx, const Problem& problem) = nullptr;
  void (*backward)(Context& ctx, const Problem& problem, const Gradients& gradients) = nullptr;
  BackwardBytes (*backward_workspace)(const Context& ctx, const Problem& problem, const Gradients& gradients) = nullptr;
};

inline std::string SimdTarget(const Context& ctx) { return TargetName(ctx.allowed_targets()); }

// Why a kernel declines a problem, in static words: a step, for which several may, allocates nothing.
struct Reason {
  const char* words = "";          // none: it takes the problem
  const char* not_this = nullptr;  // what the problem has instead
  bool empty() const { return *words == 0; }
  operator std::string() const {
    return words + (not_this == nullptr ? std::string() : std::string(", not ") + not_this);
  }
};

// `Why` is a Reason, or a string where reasons have numbers.
template <class Problem, class Gradients, class Why = Reason>
struct Kernel {
  using PassesFor = Passes<Problem, Gradients> (*)(const Context& ctx);

  const char* name;
  const char* why;  // it is chosen
  // Why it cannot run the problem; empty if it can.
  Why (*declines)(const Context& ctx, const Problem& problem);
  PassesFor forward_passes;
  PassesFor backward_passes = nullptr;
  // The SIMD target, or the matrix unit, that it would use.
  std::string (*target)(const Context& ctx) = &SimdTarget;
  DeviceType device = DeviceType::kCpu;  // where it runs

  void forward(Context& ctx, const Problem& p) const { forward_passes(ctx).forward(ctx, p); }
  void step(Context& ctx, const Problem& p) const { forward_passes(ctx).step(ctx, p); }
  int64_t workspace(const Context& ctx, const Problem& p) const { return forward_passes(ctx).workspace(ctx, p); }
  int64_t lanes(const Context& ctx, const Problem& p) const { return forward_passes(ctx).lanes(p); }
  void backward(Context& ctx, const Problem& p, const Gradients& g) const { backward_passes(ctx).backward(ctx, p, g); }
  BackwardBytes backward_workspace(const Context& ctx, const Problem& p, const Gradients& g = {}) const {
    return backward_passes(ctx).backward_workspace(ctx, p, g);
  }
};

enum class Pass { kForward, kBackward };

// Where a problem's views are: those of engines without kernels for other devices do not say.
template <class Problem>
DeviceType DeviceOf(const Problem& problem) {
  if constexpr (requires { problem.device; }) return problem.device.type;
  return DeviceType::kCpu;
}

// The first of these kernels that takes the problem. Throws Unsupported, with every kernel's reason, if none does.
template <class Kernel, size_t kCount, class Problem>
const Kernel& Choose(const Kernel* const (&kernels)[kCount], const char* op, const Context& ctx, const Problem& problem,
                     Pass pass = Pass::kForward) {
  const auto has_pass = [&](const Kernel* kernel) {
    return pass == Pass::kForward || kernel->backward_passes != nullptr;
  };
  const auto runs_there = [&](const Kernel* kernel) { return kernel->device == DeviceOf(problem); };
  for (const Kernel* kernel : kernels) {
    if (has_pass(kernel) && runs_there(kernel) && kernel->declines(ctx, problem).empty()) return *kernel;
  }
  std::string reasons;
  for (const Kernel* kernel : kernels) {
    if (!runs_there(kernel)) continue;
    const std::string reason = has_pass(kernel) ? std::string(kernel->declines(ctx, problem)) : "has no backward pass";
    reasons += std::string(reasons.empty() ? "" : "; ") + kernel->name + " " + reason;
  }
  throw Unsupported(std::string(op) + ": no kernel for this problem: " + reasons);
}

// Why kernels for some dtypes decline this one; empty if they do not.
inline Reason DeclinesAllButF64(DType dtype) {
  return dtype == DType::kF64 ? Reason() : Reason{"computes f64", Name(dtype)};
}
inline Reason DeclinesAllButF32(DType dtype) {  // and what is widened to it
  return IsFloat(dtype) && dtype != DType::kF64 ? Reason() : Reason{"computes f32, bf16 and f16", Name(dtype)};
}
inline Reason DeclinesAllButBF16(DType dtype) {
  return dtype == DType::kBF16 ? Reason() : Reason{"computes bf16", Name(dtype)};
}
inline Reason DeclinesAllButFloats(DType dtype) {
  return IsFloat(dtype) ? Reason() : Reason{"computes f64, f32, bf16 and f16", Name(dtype)};
}

}  // namespace heed::engine

#endif  // HEED_ENGINES_KERNEL_LIST_H_

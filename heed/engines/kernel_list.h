// A kernel of an engine, and the choice of one from the engine's list. Dispatch, Explain and Workspace read the same
// list.
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

// Scratch bytes of a backward pass.
struct BackwardBytes {
  int64_t per_thread = 0, shared = 0;
};

// The passes that one file compiles for one SIMD target; null where the file has none. They expect checked problems.
template <class Problem, class Gradients>
struct Passes {
  void (*forward)(Context& ctx, const Problem& problem) = nullptr;
  // Scratch bytes per thread, including its share of what threads share.
  int64_t (*workspace)(const Context& ctx, const Problem& problem) = nullptr;
  // Rows per block, for the softmax engine.
  int64_t (*lanes)(const Problem& problem) = nullptr;
  // One token of a recurrence; the final states replace the initial ones.
  void (*step)(Context& ctx, const Problem& problem) = nullptr;
  void (*backward)(Context& ctx, const Problem& problem, const Gradients& gradients) = nullptr;
  BackwardBytes (*backward_workspace)(const Context& ctx, const Problem& problem, const Gradients& gradients) = nullptr;
};

inline std::string SimdTarget(const Context& ctx) { return TargetName(ctx.allowed_targets()); }

// The reason why a kernel declines a problem, as static strings, so that a step, which several kernels may decline,
// allocates nothing.
struct Reason {
  const char* words = "";          // empty: the kernel takes the problem
  const char* not_this = nullptr;  // the problem's property that it declines
  bool empty() const { return *words == 0; }
  operator std::string() const {
    return words + (not_this == nullptr ? std::string() : std::string(", not ") + not_this);
  }
};

// `Why` is Reason, or std::string for engines whose reasons contain numbers.
template <class Problem, class Gradients, class Why = Reason>
struct Kernel {
  using PassesFor = Passes<Problem, Gradients> (*)(const Context& ctx);

  const char* name;
  const char* why;  // why it is chosen
  // Returns why it cannot run the problem; empty if it can.
  Why (*declines)(const Context& ctx, const Problem& problem);
  PassesFor forward_passes;
  PassesFor backward_passes = nullptr;
  // The SIMD target or matrix unit that it would use.
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

// Returns the device of a problem's views. Problems of engines without device kernels have no such field.
template <class Problem>
DeviceType DeviceOf(const Problem& problem) {
  if constexpr (requires { problem.device; }) return problem.device.type;
  return DeviceType::kCpu;
}

// Returns the first of these kernels that takes the problem. Throws Unsupported, with every kernel's reason, if none
// does.
template <class Kernel, size_t kCount, class Problem>
const Kernel& Choose(const Kernel* const (&kernels)[kCount], const char* op, const Context& ctx, const Problem& problem,
                     Pass pass = Pass::kForward) {
  const auto has_pass = [&](const Kernel* kernel) {
    return pass == Pass::kForward || kernel->backward_passes != nullptr;
  };
  // A kernel whose instructions this CPU lacks has no forward pass. It declines every problem, in words that take
  // longer than the forward pass of a small one.
  const auto exists = [&](const Kernel* kernel) { return kernel->forward_passes(ctx).forward != nullptr; };
  const auto runs_there = [&](const Kernel* kernel) { return kernel->device == DeviceOf(problem); };
  for (const Kernel* kernel : kernels) {
    if (has_pass(kernel) && runs_there(kernel) && exists(kernel) && kernel->declines(ctx, problem).empty()) {
      return *kernel;
    }
  }
  std::string reasons;
  for (const Kernel* kernel : kernels) {
    if (!runs_there(kernel)) continue;
    const std::string reason = has_pass(kernel) ? std::string(kernel->declines(ctx, problem)) : "has no backward pass";
    reasons += std::string(reasons.empty() ? "" : "; ") + kernel->name + " " + reason;
  }
  throw Unsupported(std::string(op) + ": no kernel for this problem: " + reasons);
}

// Return why kernels for some dtypes decline this dtype; empty if they do not.
inline Reason DeclinesAllButF64(DType dtype) {
  return dtype == DType::kF64 ? Reason() : Reason{"computes f64", Name(dtype)};
}
inline Reason DeclinesAllButF32(DType dtype) {  // f32, and dtypes that are widened to it
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

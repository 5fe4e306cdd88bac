// The list of kernels and the choice from it.
#include "heed/engines/softmax/kernels.h"

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/engines/softmax/forward.h"

namespace heed::softmax {
namespace {

template <DType kType>
std::string NeedsDType(const Context&, const Problem& problem) {
  if (problem.dtype == kType) return "";
  return std::string("computes ") + Name(kType) + ", not " + Name(problem.dtype);
}

std::string SimdTarget(const Context& ctx) {
  return TargetName(ctx.allowed_targets());
}

constexpr char kWhy[] =
    "query rows in lanes, online softmax over tiles of 64 keys";

constexpr Kernel kKernels[] = {
    {"softmax_lanes_f32", &NeedsDType<DType::kF32>, &ForwardWorkspaceF32,
     &ForwardLanesF32, &SimdTarget, &ForwardF32, /*invariant=*/true, kWhy},
    {"softmax_lanes_f64", &NeedsDType<DType::kF64>, &ForwardWorkspaceF64,
     &ForwardLanesF64, &SimdTarget, &ForwardF64, /*invariant=*/true, kWhy},
};

}  // namespace

const Kernel& Choose(const char* op, const Context& ctx,
                     const Problem& problem) {
  std::string reasons;
  for (const Kernel& kernel : kKernels) {
    const std::string reason = kernel.declines(ctx, problem);
    if (reason.empty()) return kernel;
    reasons += std::string(reasons.empty() ? "" : "; ") + kernel.name + " " + reason;
  }
  throw Unsupported(std::string(op) + ": no kernel for this problem: " + reasons);
}

}  // namespace heed::softmax

// The list of kernels and the choice from it.
#include "heed/engines/scan/kernels.h"

#include <string>

#include "heed/core/error.h"

namespace heed::scan {
namespace {

bool IsF32(const Problem& p) { return IsFloat(p.dtype) && p.dtype != DType::kF64; }
bool IsSelective(const Problem& p) { return p.rule == Rule::kSelective; }

constexpr Kernel kKernels[] = {
    {"selective_f32", [](const Problem& p) { return IsSelective(p) && IsF32(p); },
     "f32, bf16 and f16",
     "channels in lanes, 16 states of each in registers, 16-bit tensors widened; tiles of 16 "
     "tokens are transposed where tokens are contiguous",
     &SelectiveForwardF32, &SelectiveForwardBytesF32, &SelectiveBackwardF32,
     &SelectiveBackwardBytesF32},
    {"selective_f64",
     [](const Problem& p) { return IsSelective(p) && p.dtype == DType::kF64; }, "f64",
     "channels in lanes, 16 states of each in registers; tiles of 16 tokens are transposed where "
     "tokens are contiguous",
     &SelectiveForwardF64, &SelectiveForwardBytesF64, &SelectiveBackwardF64,
     &SelectiveBackwardBytesF64},
    {"elementwise", [](const Problem& p) { return !IsSelective(p) && IsFloat(p.dtype); },
     "one state per channel in f64, f32, bf16 and f16",
     "channels in lanes, 16-bit tensors widened; tiles of 16 tokens are transposed where tokens "
     "are contiguous",
     &ElementwiseForward, &ElementwiseForwardBytes, &ElementwiseBackward,
     &ElementwiseBackwardBytes},
};

}  // namespace

const Kernel& Choose(const char* op, const Problem& problem) {
  for (const Kernel& kernel : kKernels) {
    if (kernel.takes(problem)) return kernel;
  }
  std::string reasons;
  for (const Kernel& kernel : kKernels) {
    reasons += std::string(reasons.empty() ? "" : "; ") + kernel.name + " computes " +
               kernel.computes + ", not " + Name(problem.dtype);
  }
  throw Unsupported(std::string(op) + ": no kernel for this problem: " + reasons);
}

}  // namespace heed::scan

// The list of kernels and the choice from it.
#include "heed/engines/recurrence/kernels.h"

#include <string>

#include "heed/core/error.h"

namespace heed::recurrence {
namespace {

bool TakesF32(const Problem& problem) {
  return IsFloat(problem.dtype) && problem.dtype != DType::kF64;
}

bool TakesF64(const Problem& problem) { return problem.dtype == DType::kF64; }

// Matrix tiles will stand first here, with chunks of 64 tokens.
constexpr Kernel kKernels[] = {
    {"recurrence_f32", &TakesF32, "f32, bf16 and f16",
     "the recurrence itself, four tokens on strips of the state in registers, 16-bit "
     "tensors widened",
     &ForwardF32, &ForwardBytesF32, &StepF32, &BackwardF32, &BackwardBytesF32},
    {"recurrence_f64", &TakesF64, "f64",
     "the recurrence itself, four tokens on strips of the state in registers",
     &ForwardF64, &ForwardBytesF64, &StepF64, &BackwardF64, &BackwardBytesF64},
};

}  // namespace

const Kernel& Choose(const char* op, const Context& /*ctx*/, const Problem& problem) {
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

}  // namespace heed::recurrence

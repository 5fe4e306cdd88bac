// The list of kernels and the choice from it.
#include "heed/engines/recurrence/kernels.h"

#include <string>

#include "heed/core/error.h"

namespace heed::recurrence {
namespace {

std::string Declines(const Problem& problem, bool takes, const char* computes) {
  if (takes) return "";
  return std::string("computes ") + computes + ", not " + Name(problem.dtype);
}

std::string DeclinesF32(const Problem& problem) {
  return Declines(problem, IsFloat(problem.dtype) && problem.dtype != DType::kF64,
                  "f32, bf16 and f16");
}

std::string DeclinesF64(const Problem& problem) {
  return Declines(problem, problem.dtype == DType::kF64, "f64");
}

// Matrix tiles will stand first here, with chunks of 64 tokens.
constexpr Kernel kKernels[] = {
    {"recurrence_f32", &DeclinesF32,
     "the recurrence itself, four tokens on strips of the state in registers, 16-bit "
     "tensors widened",
     &ForwardF32, &ForwardBytesF32, &StepF32, &BackwardF32, &BackwardBytesF32},
    {"recurrence_f64", &DeclinesF64,
     "the recurrence itself, four tokens on strips of the state in registers",
     &ForwardF64, &ForwardBytesF64, &StepF64, &BackwardF64, &BackwardBytesF64},
};

}  // namespace

const Kernel& Choose(const char* op, const Context& /*ctx*/, const Problem& problem) {
  std::string reasons;
  for (const Kernel& kernel : kKernels) {
    const std::string reason = kernel.declines(problem);
    if (reason.empty()) return kernel;
    reasons += std::string(reasons.empty() ? "" : "; ") + kernel.name + " " + reason;
  }
  throw Unsupported(std::string(op) + ": no kernel for this problem: " + reasons);
}

}  // namespace heed::recurrence

// The list of kernels and the choice from it.
#include "heed/engines/scan/kernels.h"

#include <algorithm>
#include <string>

#include "heed/core/error.h"
#include "heed/engines/scan/convolution.h"

namespace heed::scan {
namespace {

bool IsF32(const Problem& p) { return IsFloat(p.dtype) && p.dtype != DType::kF64; }
bool IsSelective(const Problem& p) { return p.rule == Rule::kSelective; }
bool HasTaps(const Problem& p) {
  return (p.rule == Rule::kTaps || (p.rule == Rule::kModes && p.has_taps)) && IsFloat(p.dtype);
}
bool IsTransformed(const Problem& p) {
  return std::ranges::any_of(p.sequences, [&](const Sequence& s) {
    return TransformLength(p.num_taps, s.count) > 0;
  });
}

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
    {"convolution_fourier", [](const Problem& p) { return HasTaps(p) && IsTransformed(p); },
     "long convolutions in f64, f32, bf16 and f16",
     "by Fourier transforms, of blocks of the least power of two that has all taps, as there are too "
     "many to add up; 16-bit tensors widened, rows transposed where channels are contiguous",
     &ConvolutionForward, &ConvolutionForwardBytes, &ConvolutionBackward,
     &ConvolutionBackwardBytes},
    {"convolution_direct", &HasTaps, "convolutions in f64, f32, bf16 and f16",
     "tap by tap, as transforms would cost more at this length; tokens in lanes, 16-bit tensors "
     "widened, rows transposed where channels are contiguous",
     &ConvolutionForward, &ConvolutionForwardBytes, &ConvolutionBackward,
     &ConvolutionBackwardBytes},
    {"modes", [](const Problem& p) { return p.rule == Rule::kModes && IsFloat(p.dtype); },
     "state spaces in f64, f32, bf16 and f16",
     "chunks of 16 tokens by tables of a channel's modes, tokens and modes in lanes; 16-bit tensors "
     "widened, rows transposed where channels are contiguous",
     &ModesForward, &ModesForwardBytes, &ModesBackward, &ModesBackwardBytes},
    {"heads_convolution",
     [](const Problem& p) { return p.rule == Rule::kHeads && p.has_taps && IsFloat(p.dtype); },
     "state spaces of products of heads in f64, f32, bf16 and f16",
     "products of a head's channels, one pair after another, convolved with what its modes answer to one "
     "input of 1; 16-bit tensors widened, rows transposed where channels are contiguous",
     &HeadsForward, &HeadsForwardBytes, &HeadsBackward, &HeadsBackwardBytes},
    {"heads",
     [](const Problem& p) { return p.rule == Rule::kHeads && IsFloat(p.dtype); },
     "state spaces of products of heads in f64, f32, bf16 and f16",
     "products of a head's channels, one pair after another, by chunks of 16 tokens and tables of its "
     "modes; 16-bit tensors widened, rows transposed where channels are contiguous",
     &HeadsForward, &HeadsForwardBytes, &HeadsBackward, &HeadsBackwardBytes},
    {"elementwise",
     [](const Problem& p) {
       return (p.rule == Rule::kDecay || p.rule == Rule::kGates) && IsFloat(p.dtype);
     },
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

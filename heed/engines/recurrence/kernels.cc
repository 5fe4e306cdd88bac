// The list of kernels and the choice from it.
#include "heed/engines/recurrence/kernels.h"

#include <string>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"

namespace heed::recurrence {
namespace {

// Smaller states stay in registers while tokens pass: packing would cost more than it saves.
// What is emulated for tests takes all.
constexpr int64_t kSmallestInTiles = 64 * 64;

bool TakesMatrixTiles(const Context& ctx, const Problem& problem) {
  const TileUnit unit = TilesOf(ctx.allowed_targets());
  if (!HasForwardTiles() || unit == TileUnit::kNone || !TakesTiles(problem)) return false;
  return unit == TileUnit::kEmulated ||
         problem.key_size * problem.value_size >= kSmallestInTiles;
}

bool IsF32(const Problem& p) { return IsFloat(p.dtype) && p.dtype != DType::kF64; }
bool IsF64(const Problem& p) { return p.dtype == DType::kF64; }

bool IsState(const Problem& p) { return p.delta == Delta::kNone && !p.channels; }

bool TakesF32(const Context&, const Problem& p) { return IsF32(p) && IsState(p); }
bool TakesF64(const Context&, const Problem& p) { return IsF64(p) && IsState(p); }
bool TakesDeltaF32(const Context&, const Problem& p) {
  return IsF32(p) && p.delta != Delta::kNone;
}
bool TakesDeltaF64(const Context&, const Problem& p) {
  return IsF64(p) && p.delta != Delta::kNone;
}
bool TakesChannels(const Context&, const Problem& p) { return IsFloat(p.dtype) && p.channels; }

constexpr Kernel kKernels[] = {
    {"recurrence_tiles", &TakesMatrixTiles, "bf16 states of 64 x 64 and larger where there are matrix tiles",
     "chunks of 64 tokens in matrix tiles, states and pairs as sums of three bf16; steps and "
     "gradients as recurrence_f32",
     &ForwardTiles, &ForwardBytesTiles, &StepF32, &BackwardTiles, &BackwardBytesTiles},
    {"recurrence_f32", &TakesF32, "f32, bf16 and f16",
     "the recurrence itself, four tokens on strips of the state in registers, 16-bit "
     "tensors widened",
     &ForwardF32, &ForwardBytesF32, &StepF32, &BackwardF32, &BackwardBytesF32},
    {"recurrence_f64", &TakesF64, "f64",
     "the recurrence itself, four tokens on strips of the state in registers",
     &ForwardF64, &ForwardBytesF64, &StepF64, &BackwardF64, &BackwardBytesF64},
    {"delta_f32", &TakesDeltaF32, "f32, bf16 and f16",
     "a delta rule token by token, each one pass over strips of the state, 16-bit tensors "
     "widened",
     &DeltaForwardF32, &DeltaForwardBytesF32, &DeltaStepF32, &DeltaBackwardF32,
     &DeltaBackwardBytesF32},
    {"delta_f64", &TakesDeltaF64, "f64",
     "a delta rule token by token, each one pass over strips of the state", &DeltaForwardF64,
     &DeltaForwardBytesF64, &DeltaStepF64, &DeltaBackwardF64, &DeltaBackwardBytesF64},
    {"recurrence_channels", &TakesChannels, "f64, f32, bf16 and f16",
     "a mean per channel, channels in lanes, 16-bit tensors widened", &ForwardChannels,
     &ForwardBytesChannels, &ForwardChannels, &BackwardChannels, &BackwardBytesChannels},
};

}  // namespace

const Kernel& Choose(const char* op, const Context& ctx, const Problem& problem) {
  for (const Kernel& kernel : kKernels) {
    if (kernel.takes(ctx, problem)) return kernel;
  }
  std::string reasons;
  for (const Kernel& kernel : kKernels) {
    reasons += std::string(reasons.empty() ? "" : "; ") + kernel.name + " computes " +
               kernel.computes + ", not " + Name(problem.dtype);
  }
  throw Unsupported(std::string(op) + ": no kernel for this problem: " + reasons);
}

}  // namespace heed::recurrence

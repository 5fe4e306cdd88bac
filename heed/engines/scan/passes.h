// Entry points of the passes, one set per rule and dtype of states.
#ifndef HEED_ENGINES_SCAN_PASSES_H_
#define HEED_ENGINES_SCAN_PASSES_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/engines/scan/problem.h"

namespace heed::scan {

struct BackwardBytes {
  int64_t per_thread = 0, shared = 0;
};

// F32 computes bf16 and f16 too, widened. One token of each sequence is a step: the final states
// may be the initial ones.
void SelectiveForwardF32(Context& ctx, const Problem& problem);
void SelectiveForwardF64(Context& ctx, const Problem& problem);
void SelectiveBackwardF32(Context& ctx, const Problem& problem, const Gradients& gradients);
void SelectiveBackwardF64(Context& ctx, const Problem& problem, const Gradients& gradients);
int64_t SelectiveForwardBytesF32(const Context& ctx, const Problem& problem);
int64_t SelectiveForwardBytesF64(const Context& ctx, const Problem& problem);
BackwardBytes SelectiveBackwardBytesF32(const Context& ctx, const Problem& problem);
BackwardBytes SelectiveBackwardBytesF64(const Context& ctx, const Problem& problem);

// One state per channel, of every dtype.
void ElementwiseForward(Context& ctx, const Problem& problem);
void ElementwiseBackward(Context& ctx, const Problem& problem, const Gradients& gradients);
int64_t ElementwiseForwardBytes(const Context& ctx, const Problem& problem);
BackwardBytes ElementwiseBackwardBytes(const Context& ctx, const Problem& problem);

// Taps, and modes as taps, of every dtype.
void ConvolutionForward(Context& ctx, const Problem& problem);
void ConvolutionBackward(Context& ctx, const Problem& problem, const Gradients& gradients);
int64_t ConvolutionForwardBytes(const Context& ctx, const Problem& problem);
BackwardBytes ConvolutionBackwardBytes(const Context& ctx, const Problem& problem);

// Modes, of every dtype.
void ModesForward(Context& ctx, const Problem& problem);
void ModesBackward(Context& ctx, const Problem& problem, const Gradients& gradients);
int64_t ModesForwardBytes(const Context& ctx, const Problem& problem);
BackwardBytes ModesBackwardBytes(const Context& ctx, const Problem& problem);

// Modes of products of heads, token by token or as taps, of every dtype.
void HeadsForward(Context& ctx, const Problem& problem);
void HeadsBackward(Context& ctx, const Problem& problem, const Gradients& gradients);
int64_t HeadsForwardBytes(const Context& ctx, const Problem& problem);
BackwardBytes HeadsBackwardBytes(const Context& ctx, const Problem& problem);

}  // namespace heed::scan

#endif  // HEED_ENGINES_SCAN_PASSES_H_

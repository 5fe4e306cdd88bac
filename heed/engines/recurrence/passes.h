// Entry points of the passes, one set per dtype of states.
#ifndef HEED_ENGINES_RECURRENCE_PASSES_H_
#define HEED_ENGINES_RECURRENCE_PASSES_H_

#include <cstdint>
#include <functional>

#include "heed/core/context.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/tasks.h"

namespace heed::recurrence {

struct BackwardBytes {
  int64_t per_thread = 0, shared = 0;
};

// F32 computes bf16 and f16 too, widened.
void ForwardF32(Context& ctx, const Problem& problem);
void ForwardF64(Context& ctx, const Problem& problem);
void BackwardF32(Context& ctx, const Problem& problem, const Gradients& gradients);
void BackwardF64(Context& ctx, const Problem& problem, const Gradients& gradients);

// In matrix tiles, which TilesOf() of dispatch.h must allow: chunks of 64 tokens.
bool HasForwardTiles();
bool TakesTiles(const Problem& problem);
void ForwardTiles(Context& ctx, const Problem& problem);
int64_t ForwardBytesTiles(const Context& ctx, const Problem& problem);

// The gradients in f32, from the states that ForwardTiles computes: a sequence that is split
// has the same.
void BackwardTiles(Context& ctx, const Problem& problem, const Gradients& gradients);
BackwardBytes BackwardBytesTiles(const Context& ctx, const Problem& problem);

// Called with a block of tokens and S before it, in strips of kPartColumns columns, each
// [K rounded up to that][column].
using PutState = std::function<void(int64_t block, const float* state)>;

// The states of a head of a sequence, each put in turn, by a kernel of chunks.
struct ChunkStates {
  int64_t bytes;  // of scratch
  void (*compute)(const Problem& problem, const Task& task, void* scratch, const PutState& put);
};
ChunkStates StatesInTiles(const Context& ctx, const Problem& problem);

// Delta rules.
void DeltaForwardF32(Context& ctx, const Problem& problem);
void DeltaForwardF64(Context& ctx, const Problem& problem);
void DeltaStepF32(Context& ctx, const Problem& problem);
void DeltaStepF64(Context& ctx, const Problem& problem);
void DeltaBackwardF32(Context& ctx, const Problem& problem, const Gradients& gradients);
void DeltaBackwardF64(Context& ctx, const Problem& problem, const Gradients& gradients);
int64_t DeltaForwardBytesF32(const Context& ctx, const Problem& problem);
int64_t DeltaForwardBytesF64(const Context& ctx, const Problem& problem);
BackwardBytes DeltaBackwardBytesF32(const Context& ctx, const Problem& problem);
BackwardBytes DeltaBackwardBytesF64(const Context& ctx, const Problem& problem);

// Means per channel, of every dtype; of one token too, whose final states are the initial ones.
void ForwardChannels(Context& ctx, const Problem& problem);
void BackwardChannels(Context& ctx, const Problem& problem, const Gradients& gradients);
int64_t ForwardBytesChannels(const Context& ctx, const Problem& problem);
BackwardBytes BackwardBytesChannels(const Context& ctx, const Problem& problem);

// One token; the final states are the initial ones too.
void StepF32(Context& ctx, const Problem& problem);
void StepF64(Context& ctx, const Problem& problem);

// Scratch bytes per thread.
int64_t ForwardBytesF32(const Context& ctx, const Problem& problem);
int64_t ForwardBytesF64(const Context& ctx, const Problem& problem);
BackwardBytes BackwardBytesF32(const Context& ctx, const Problem& problem);
BackwardBytes BackwardBytesF64(const Context& ctx, const Problem& problem);

}  // namespace heed::recurrence

#endif  // HEED_ENGINES_RECURRENCE_PASSES_H_

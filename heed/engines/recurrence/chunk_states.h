// The states of a head at the borders of blocks, which a kernel of chunks computes and the backward pass reads.
#ifndef HEED_ENGINES_RECURRENCE_CHUNK_STATES_H_
#define HEED_ENGINES_RECURRENCE_CHUNK_STATES_H_

#include <cstdint>
#include <functional>

#include "heed/core/context.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/tasks.h"

namespace heed::recurrence {

// Called with a block of tokens and S before it, in strips of kPartColumns columns, each
// [K rounded up to that][column].
using PutState = std::function<void(int64_t block, const float* state)>;

// Computes the states of a head of a sequence, in ascending order.
struct ChunkStates {
  int64_t (*bytes)(const Problem& problem) = nullptr;  // of scratch
  void (*compute)(const Problem& problem, const Task& task, void* scratch, const PutState& put) = nullptr;
};

// Kernels whose backward pass computes its states itself have none.
inline ChunkStates NoChunkStates(const Context&) { return {}; }

// The states are those of recurrence_tiles: a split sequence has the same.
ChunkStates AmxStates(const Context& ctx);

}  // namespace heed::recurrence

#endif  // HEED_ENGINES_RECURRENCE_CHUNK_STATES_H_

// States of a head at block boundaries, which a chunked kernel computes and the backward pass reads.
#ifndef HEED_ENGINES_RECURRENCE_CHUNK_STATES_H_
#define HEED_ENGINES_RECURRENCE_CHUNK_STATES_H_

#include <cstdint>
#include <functional>

#include "heed/core/context.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/tasks.h"

namespace heed::recurrence {

// Receives S before a block, in column blocks [K rounded up to kPartColumns][kPartColumns].
using PutState = std::function<void(int64_t block, const float* state)>;

// Computes the states of one head of one sequence, in ascending order of blocks.
struct ChunkStates {
  int64_t (*bytes)(const Problem& problem) = nullptr;  // bytes of scratch
  void (*compute)(const Problem& problem, const Task& task, void* scratch, const PutState& put) = nullptr;
};

// For kernels whose backward pass computes its states itself.
inline ChunkStates NoChunkStates(const Context&) { return {}; }

// The states of recurrence_tiles, so that a split sequence has the same bits.
ChunkStates AmxStates(const Context& ctx);

}  // namespace heed::recurrence

#endif  // HEED_ENGINES_RECURRENCE_CHUNK_STATES_H_

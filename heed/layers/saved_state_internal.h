// States in sections of files: what a layer remembers, written and read under its names. Files are taken for hostile.
#ifndef HEED_LAYERS_SAVED_STATE_INTERNAL_H_
#define HEED_LAYERS_SAVED_STATE_INTERNAL_H_

#include <cstdint>
#include <span>

#include "heed/io/sections_internal.h"
#include "heed/layers/state.h"

namespace heed::layers {

// Each tensor under its own name, and caches as KVCacheBase::Save() writes them, under "keys.", "memory." and
// "latents.". The state must live until the file is written.
void WriteState(const State& state, const SectionWriter& to);

// Throws FileError unless the file holds the tensors of a state that is as `one`, of one sequence, is, but of `batch`:
// then memory for them is no more than what the file has.
void CheckSavedTensors(const SectionReader& from, const State& one, int64_t batch);

// Fills an empty state whose layer has written this section, of sequences of `lengths`. Throws FileError for everything
// else, and for caches that would take more than max_bytes; the state may hold anything then.
void ReadState(const SectionReader& from, std::span<const int64_t> lengths, int64_t max_bytes, State& state);

}  // namespace heed::layers

#endif  // HEED_LAYERS_SAVED_STATE_INTERNAL_H_

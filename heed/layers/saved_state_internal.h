// States in sections of files: the tensors and caches of a layer, written and read under its names. Files may be
// hostile.
#ifndef HEED_LAYERS_SAVED_STATE_INTERNAL_H_
#define HEED_LAYERS_SAVED_STATE_INTERNAL_H_

#include <cstdint>
#include <span>

#include "heed/io/sections_internal.h"
#include "heed/layers/state.h"

namespace heed::layers {

// Writes each tensor under its own name, and caches as KVCacheBase::Save() writes them, under "keys.", "memory." and
// "latents.". The state must live until the file is written.
void WriteState(const State& state, const SectionWriter& to);

// Throws FileError unless the file holds the tensors of a state like `one`, which is of one sequence, but for `batch`
// sequences. Memory for them is then no more than the file's size.
void CheckSavedTensors(const SectionReader& from, const State& one, int64_t batch);

// Fills an empty state from a section that its layer has written, of sequences of `lengths`. Throws FileError for any
// other content, and for caches that would take more than max_bytes; the state is then undefined.
void ReadState(const SectionReader& from, std::span<const int64_t> lengths, int64_t max_bytes, State& state);

}  // namespace heed::layers

#endif  // HEED_LAYERS_SAVED_STATE_INTERNAL_H_

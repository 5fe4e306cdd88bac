// States in files: tensors by their names, caches in sections of their own.
#include "heed/layers/saved_state_internal.h"

#include <algorithm>
#include <string>
#include <vector>

#include "heed/state/saved_cache_internal.h"

namespace heed::layers {
namespace {

// Calls f for each cache of a state, with the prefix of its names.
template <class AnyState, class F>
void EachCache(AnyState& state, const F& f) {
  if (state.keys) f("keys.", *state.keys);
  if (state.latents) f("latents.", *state.latents);
  if (state.memory) f("memory.", *state.memory);
}

// Checks that the cache has one row per token that the layer has processed.
void CheckLengths(const SectionReader& from, const KVCacheBase& cache, std::span<const int64_t> lengths) {
  for (size_t b = 0; b < lengths.size(); ++b) {
    if (cache.lengths()[b] == lengths[b]) continue;
    from.Fail(from.Name("lengths") + " has an element " + std::to_string(cache.lengths()[b]) + ", expected " +
              std::to_string(lengths[b]) + ", the tokens of sequence " + std::to_string(b));
  }
}

}  // namespace

void WriteState(const State& state, const SectionWriter& to) {
  for (const StateTensor& tensor : state.tensors()) {
    to.Add(tensor.name, ConstTensorView(tensor.values.data(), DType::kF32, tensor.sizes));
  }
  EachCache(state, [&](const char* prefix, const KVCacheBase& cache) { SavedCache::Write(cache, to.At(prefix)); });
}

void CheckSavedTensors(const SectionReader& from, const State& one, int64_t batch) {
  for (const StateTensor& tensor : one.tensors()) {
    std::vector<int64_t> sizes = tensor.sizes;
    sizes[0] = batch;
    from.Tensor(tensor.name, DType::kF32, sizes);
  }
}

void ReadState(const SectionReader& from, std::span<const int64_t> lengths, int64_t max_bytes, State& state) {
  for (StateTensor& tensor : state.tensors()) {
    const ConstTensorView saved = from.Tensor(tensor.name, DType::kF32, tensor.sizes);
    std::copy_n(saved.as<float>(), saved.num_elements(), tensor.values.begin());
  }
  EachCache(state, [&](const std::string& prefix, KVCacheBase& cache) {
    const SectionReader section = from.At(prefix);
    SavedCache::Read(section, max_bytes, cache);
    max_bytes -= cache.nbytes();
    // Memory is as long as the sequence that cross attention reads.
    if (prefix != "memory.") CheckLengths(section, cache, lengths);
  });
  state.Advance(lengths);
}

}  // namespace heed::layers

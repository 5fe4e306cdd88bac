// State: what a layer stores about earlier tokens. All kinds of layers share this class.
#ifndef HEED_LAYERS_STATE_H_
#define HEED_LAYERS_STATE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/state/kv_cache.h"
#include "heed/state/latent_kv_cache.h"

namespace heed::layers {

// An f32 tensor, row-major, whose first axis is the sequence.
struct StateTensor {
  std::string name;  // "conv", "scan"
  std::vector<int64_t> sizes;
  std::vector<float> values;

  TensorView view() { return TensorView(values.data(), DType::kF32, sizes); }
};

// A layer makes its state with MakeState(), advances it in Forward() and Step(), and refuses a state of another layer.
// Recurrences have tensors of one size whatever the length; attention has a cache that grows.
class HEED_API State {
 public:
  // An empty state of the layer with this name.
  State(std::string layer, int64_t batch);

  int64_t batch() const { return batch_; }
  const std::string& layer() const { return layer_; }

  // The number of tokens of each sequence so far, [batch].
  std::span<const int64_t> lengths() const { return lengths_; }

  // Sequence b becomes a copy of the former sequence indices[b]. Throws InvalidArgument unless there is one index per
  // sequence, in [0, batch).
  void Reorder(std::span<const int64_t> indices);

  // A state with equal content. Pages of caches are shared until one of the two writes.
  State Fork() const;

  int64_t nbytes() const;

  // These functions are for layers, and for code that saves states.
  void Add(std::string name, std::vector<int64_t> sizes, float value = 0);
  StateTensor& tensor(int index) { return tensors_[static_cast<size_t>(index)]; }
  std::span<StateTensor> tensors() { return tensors_; }
  std::span<const StateTensor> tensors() const { return tensors_; }
  std::optional<KVCache> keys;    // attention
  std::optional<KVCache> memory;  // cross attention: keys and values of call.memory
  std::optional<LatentKVCache> latents;
  void Advance(std::span<const int64_t> tokens);

 private:
  std::string layer_;
  int64_t batch_;
  std::vector<int64_t> lengths_;
  std::vector<StateTensor> tensors_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_STATE_H_

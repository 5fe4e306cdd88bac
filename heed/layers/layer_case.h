// Cases of layers for tests: a configuration, random weights and the reference.
#ifndef HEED_LAYERS_LAYER_CASE_H_
#define HEED_LAYERS_LAYER_CASE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/layers/layer.h"
#include "heed/layers/weights.h"

namespace heed::layers {

// The largest difference, relative to the largest expected magnitude.
inline double Error(const ConstTensorView& got, const ConstTensorView& expected) {
  double worst = 0, largest = 1e-30;
  std::vector<int64_t> index(static_cast<size_t>(got.rank()), 0);
  do {
    const double a = GetElement(got, index), b = GetElement(expected, index);
    largest = std::max(largest, std::abs(b));
    worst = std::isnan(a) ? INFINITY : std::max(worst, std::abs(a - b));
  } while (NextIndex(got.sizes(), index));
  return worst / largest;
}

// Tensors of these names and shapes, scaled so that values inside a layer stay near 1.
class RandomWeights {
 public:
  RandomWeights(const std::vector<WeightName>& names, DType dtype, uint64_t seed) {
    for (const WeightName& of : names) {
      const Buffer buffer(dtype, of.sizes);
      const auto ends = [&](const char* suffix) { return of.name.ends_with(suffix); };
      const bool scale = of.sizes.size() == 1 && (ends("weight") || ends("D"));
      double deviation = .5, mean = 0;
      if (of.sizes.size() == 2) deviation = 1 / std::sqrt(static_cast<double>(of.sizes[1]));
      if (scale || ends("time_mix_key")) mean = 1, deviation = .2;
      if (ends("dt_proj.bias") || ends("dt_bias")) mean = -1;
      Random random(seed, static_cast<uint32_t>(tensors_.size()));
      for (int64_t i = 0; i < buffer.view().num_elements(); ++i) {
        StoreDouble(dtype, buffer.view().data(), i, mean + deviation * random.Normal());
      }
      tensors_.emplace(of.name, buffer);
    }
  }

  // All tensors, or all but one, or with one of them replaced.
  Weights weights() const {
    return Weights([this](const std::string& name) {
      const auto found = tensors_.find(name);
      return found == tensors_.end() ? ConstTensorView() : ConstTensorView(found->second.view());
    });
  }
  void Remove(const std::string& name) { tensors_.erase(name); }
  void Replace(const std::string& name, Buffer tensor) { tensors_.insert_or_assign(name, std::move(tensor)); }

 private:
  std::map<std::string, Buffer> tensors_;
};

struct LayerCase {
  std::string name;
  std::vector<WeightName> weights;
  std::function<std::unique_ptr<Layer>(const Weights&)> make;
  std::function<void(const Weights&, const ConstTensorView& x, const Call&, const TensorView& y)> reference;
  bool has_state = true;
  bool packs = true, pads = true;
  bool global_tokens = false;
  int64_t memory_width = 0;  // nonzero for cross attention
};

template <class L>
LayerCase CaseOf(std::string name, const typename L::Config& config) {
  LayerCase layer;
  layer.name = std::move(name);
  layer.weights = WeightsOf<L>(config);
  layer.make = [config](const Weights& weights) { return std::make_unique<L>(config, weights); };
  layer.reference = [config](const Weights& weights, const ConstTensorView& x, const Call& call, const TensorView& y) {
    L::Reference(config, weights, x, call, y);
  };
  return layer;
}

inline std::ostream& operator<<(std::ostream& out, const LayerCase& layer) { return out << layer.name; }

// One case of each kind of layer, with sizes that are multiples of nothing.
std::vector<LayerCase> LayerCases();

}  // namespace heed::layers

#endif  // HEED_LAYERS_LAYER_CASE_H_

// Weights: the tensors of a model by their names, and the interface through which a layer takes them.
//
// A layer's constructor requests each of its tensors by name and shape. WeightsOf<Layer>(config) lists these requests,
// without a file.
#ifndef HEED_LAYERS_WEIGHTS_H_
#define HEED_LAYERS_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/io/safetensors.h"
#include "heed/layers/linear.h"

namespace heed::layers {

// One row of a layer's table.
struct WeightName {
  std::string name;  // under the layer's prefix: "q_proj.weight"
  std::vector<int64_t> sizes;
};

// The name of a matrix y = x W^T + b, and its layout.
struct LinearName {
  std::string name;  // "q_proj", for "q_proj.weight" and "q_proj.bias"
  int64_t outputs = 0;
  bool bias = false;
};

class HEED_API Weights {
 public:
  // Returns an absent view if there is no such tensor.
  using Find = std::function<ConstTensorView(const std::string& name)>;

  explicit Weights(Find find) : find_(std::make_shared<const Find>(std::move(find))) {}

  // Tensors of files, which must live as long as these weights are read: shards of one model.
  explicit Weights(const SafetensorsFile& file);
  explicit Weights(std::vector<const SafetensorsFile*> files);

  // Collects the requested names in `names`, which must outlive it, and finds nothing.
  static Weights Listing(std::vector<WeightName>* names);

  // The tensors whose names begin with this prefix. Prefixes add up.
  Weights At(std::string_view prefix) const;
  const std::string& prefix() const { return prefix_; }

  bool Contains(std::string_view name) const;

  // A tensor of this shape in f64, f32, bf16 or f16. Throws InvalidArgument with the whole name, the actual and the
  // expected shape. Absent while weights are listed.
  ConstTensorView Tensor(std::string_view name, std::span<const int64_t> sizes) const;

  // The elements of a tensor, row-major, rounded to f32. Zeros while weights are listed.
  std::vector<float> Floats(std::string_view name, std::span<const int64_t> sizes) const;
  std::vector<float> Floats(std::string_view name, std::initializer_list<int64_t> sizes) const {
    return Floats(name, std::span(sizes.begin(), sizes.end()));
  }

  // One matrix that has the rows of several. Each is [outputs, inputs], or [inputs, outputs] if `transposed`, as in
  // GPT-2.
  Linear Matrix(std::span<const LinearName> names, int64_t inputs, bool transposed = false) const;
  Linear Matrix(const LinearName& name, int64_t inputs, bool transposed = false) const {
    return Matrix(std::span(&name, 1), inputs, transposed);
  }

 private:
  std::shared_ptr<const Find> find_;
  std::string prefix_;
  std::vector<WeightName>* listed_ = nullptr;
};

// The tensors that a layer of this configuration takes. Throws as its constructor does.
template <class Layer>
std::vector<WeightName> WeightsOf(const typename Layer::Config& config) {
  std::vector<WeightName> names;
  Layer(config, Weights::Listing(&names));
  return names;
}

}  // namespace heed::layers

#endif  // HEED_LAYERS_WEIGHTS_H_

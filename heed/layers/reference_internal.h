// Parts of the layers' references: arrays of double, and operations on them one element at a time.
#ifndef HEED_LAYERS_REFERENCE_INTERNAL_H_
#define HEED_LAYERS_REFERENCE_INTERNAL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "heed/layers/activation.h"
#include "heed/layers/layer.h"
#include "heed/layers/weights.h"

namespace heed::layers::reference {

// A row-major array.
struct Array {
  std::vector<int64_t> sizes;
  std::vector<double> values;

  Array() = default;
  explicit Array(std::vector<int64_t> sizes, double value = 0);
  explicit Array(const ConstTensorView& view);
  TensorView view() { return TensorView(values.data(), DType::kF64, sizes); }
  ConstTensorView view() const { return ConstTensorView(values.data(), DType::kF64, sizes); }
  double& operator[](int64_t i) { return values[static_cast<size_t>(i)]; }
  double operator[](int64_t i) const { return values[static_cast<size_t>(i)]; }
  int64_t last() const { return sizes.back(); }
  int64_t rows() const { return std::ssize(values) / last(); }

  // Channels [begin, end) of the last axis, which is reshaped to `split`.
  Array Channels(int64_t begin, int64_t end, std::vector<int64_t> split = {}) const;
  Array Reshaped(std::vector<int64_t> sizes) const;
  Array Swapped() const;  // [B, T, C] to [B, C, T] and back
  void Store(const TensorView& to) const;
};

Array Tensor(const Weights& weights, const std::string& name, const std::vector<int64_t>& sizes);

// y = x W^T + b along the last axis.
Array Product(const Array& x, const Weights& weights, const LinearName& name, bool transposed = false);

// Divides each run of weight.values.size() elements by its root mean square, and multiplies it by the weight.
Array RmsNorm(const Array& x, const Array& weight, double eps);

template <class F>
Array Map(Array x, const F& f) {
  for (double& value : x.values) value = f(value);
  return x;
}
Array Times(Array a, const Array& b);
Array Plus(Array a, const Array& b);

// silu(conv(x)) of x [B, T, C], with weights name.weight [C, 1, taps] and name.bias.
Array Convolved(const Array& x, const Weights& weights, const std::string& name, int64_t taps, bool bias,
                const Call& call);

// The previous token of each token of [B, T, C]; zeros before the first of a sequence.
Array Shifted(const Array& x, const Call& call);

// The position of each token of [B, T] in its sequence.
std::vector<int64_t> Positions(int64_t B, int64_t T, const Call& call);

}  // namespace heed::layers::reference

#endif  // HEED_LAYERS_REFERENCE_INTERNAL_H_

// References: arrays of double, and those of norms, Mlp and Residual.
#include <cmath>
#include <utility>

#include "heed/layers/mlp.h"
#include "heed/layers/norm.h"
#include "heed/layers/reference_internal.h"
#include "heed/layers/residual.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"

namespace heed::layers {
namespace reference {
namespace {

int64_t Count(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

}  // namespace

Array::Array(std::vector<int64_t> of, double value)
    : sizes(std::move(of)), values(static_cast<size_t>(Count(sizes)), value) {}

Array::Array(const ConstTensorView& view) : Array(std::vector<int64_t>(view.sizes().begin(), view.sizes().end())) {
  for (int64_t i = 0; i < std::ssize(values); ++i) {
    int64_t at = 0, rest = i;
    for (int axis = view.rank() - 1; axis >= 0; --axis) {
      at += rest % view.size(axis) * view.stride(axis);
      rest /= view.size(axis);
    }
    (*this)[i] = LoadAsDouble(view.dtype(), view.data(), at);
  }
}

Array Array::Channels(int64_t begin, int64_t end, std::vector<int64_t> split) const {
  Array part(std::vector<int64_t>(sizes.begin(), sizes.end() - 1));
  part.values.clear();
  for (int64_t row = 0; row < rows(); ++row) {
    for (int64_t i = begin; i < end; ++i) part.values.push_back((*this)[row * last() + i]);
  }
  if (split.empty()) split = {end - begin};
  part.sizes.insert(part.sizes.end(), split.begin(), split.end());
  return part;
}

Array Array::Reshaped(std::vector<int64_t> to) const {
  Array same = *this;
  same.sizes = std::move(to);
  return same;
}

Array Array::Swapped() const {
  const int64_t B = sizes[0], T = sizes[1], C = sizes[2];
  Array swapped({B, C, T});
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t c = 0; c < C; ++c) swapped[(b * C + c) * T + t] = (*this)[(b * T + t) * C + c];
    }
  }
  return swapped;
}

void Array::Store(const TensorView& to) const {
  for (int64_t i = 0; i < std::ssize(values); ++i) {
    int64_t at = 0, rest = i;
    for (int axis = to.rank() - 1; axis >= 0; --axis) {
      at += rest % to.size(axis) * to.stride(axis);
      rest /= to.size(axis);
    }
    StoreDouble(to.dtype(), to.data(), at, (*this)[i]);
  }
}

Array Tensor(const Weights& weights, const std::string& name, const std::vector<int64_t>& sizes) {
  return Array(weights.Tensor(name, sizes));
}

Array Product(const Array& x, const Weights& weights, const LinearName& name, bool transposed) {
  const int64_t inputs = x.last(), outputs = name.outputs;
  const Array w = Tensor(weights, name.name + ".weight",
                         transposed ? std::vector<int64_t>{inputs, outputs} : std::vector<int64_t>{outputs, inputs});
  Array b({outputs});
  if (name.bias) b = Tensor(weights, name.name + ".bias", {outputs});
  Array y(x.sizes);
  y.sizes.back() = outputs;
  y.values.assign(static_cast<size_t>(x.rows() * outputs), 0);
  for (int64_t row = 0; row < x.rows(); ++row) {
    for (int64_t i = 0; i < outputs; ++i) {
      double sum = b[i];
      for (int64_t e = 0; e < inputs; ++e)
        sum += x[row * inputs + e] * w[transposed ? e * outputs + i : i * inputs + e];
      y[row * outputs + i] = sum;
    }
  }
  return y;
}

Array RmsNorm(const Array& x, const Array& weight, double eps) {
  Array y = x;
  const int64_t size = std::ssize(weight.values);
  for (int64_t begin = 0; begin < std::ssize(x.values); begin += size) {
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += x[begin + i] * x[begin + i];
    for (int64_t i = 0; i < size; ++i)
      y[begin + i] = x[begin + i] / std::sqrt(squares / static_cast<double>(size) + eps) * weight[i];
  }
  return y;
}

Array Times(Array a, const Array& b) {
  for (int64_t i = 0; i < std::ssize(a.values); ++i) a[i] *= b[i];
  return a;
}

Array Plus(Array a, const Array& b) {
  for (int64_t i = 0; i < std::ssize(a.values); ++i) a[i] += b[i];
  return a;
}

std::vector<int64_t> Positions(int64_t B, int64_t T, const Call& call) {
  std::vector<int64_t> positions;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) positions.push_back(t);
  }
  if (!call.cu_seqlens) return positions;
  const ConstTensorView& bounds = call.cu_seqlens;
  for (int64_t i = 0; i + 1 < bounds.size(0); ++i) {
    const int64_t begin = LoadAsInt64(bounds.dtype(), bounds.data(), i * bounds.stride(0));
    const int64_t end = LoadAsInt64(bounds.dtype(), bounds.data(), (i + 1) * bounds.stride(0));
    for (int64_t t = begin; t < end; ++t) positions[static_cast<size_t>(t)] = t - begin;
  }
  return positions;
}

Array Convolved(const Array& x, const Weights& weights, const std::string& name, int64_t taps, bool bias,
                const Call& call) {
  const int64_t channels = x.last();
  const Array weight = Tensor(weights, name + ".weight", {channels, 1, taps}).Reshaped({channels, taps});
  Array bias_tensor({channels});
  if (bias) bias_tensor = Tensor(weights, name + ".bias", {channels});
  causal_conv1d::Options options;
  options.activation = causal_conv1d::Activation::kSilu;
  options.lengths = call.lengths;
  options.cu_seqlens = call.cu_seqlens;
  const Array in = x.Swapped();
  Array out(in.sizes);
  causal_conv1d::Reference({in.view(), weight.view(), bias_tensor.view(), {}}, options, {out.view(), {}});
  return out.Swapped();
}

Array Shifted(const Array& x, const Call& call) {
  const int64_t B = x.sizes[0], T = x.sizes[1], C = x.sizes[2];
  const std::vector<int64_t> positions = Positions(B, T, call);
  Array shifted(x.sizes);
  for (int64_t row = 0; row < B * T; ++row) {
    for (int64_t c = 0; c < C && positions[static_cast<size_t>(row)] > 0; ++c)
      shifted[row * C + c] = x[(row - 1) * C + c];
  }
  return shifted;
}

}  // namespace reference

using reference::Array;

void Norm::Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const TensorView& y) {
  const Array weight = reference::Tensor(weights, "weight", {config.width});
  Array rows(x);
  if (config.kind == NormKind::kRms) {
    rows = RmsNorm(rows, weight, config.eps);
  } else {
    const Array bias = reference::Tensor(weights, "bias", {config.width});
    const double n = static_cast<double>(config.width);
    for (int64_t row = 0; row < rows.rows(); ++row) {
      double* at = &rows[row * config.width];
      double mean = 0, variance = 0;
      for (int64_t i = 0; i < config.width; ++i) mean += at[i] / n;
      for (int64_t i = 0; i < config.width; ++i) variance += (at[i] - mean) * (at[i] - mean) / n;
      for (int64_t i = 0; i < config.width; ++i) {
        at[i] = (at[i] - mean) / std::sqrt(variance + config.eps) * weight[i] + bias[i];
      }
    }
  }
  rows.Store(y);
}

void Mlp::Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call&,
                    const TensorView& y) {
  const Names& names = config.names;
  const Array rows(x);
  const auto activate = [&](double value) { return ActivationReference(config.activation, value); };
  Array up = Product(rows, weights, {names.up, config.inner, config.bias}, names.transposed);
  if (names.gate.empty()) {
    up = Map(up, activate);
  } else {
    up = Times(up, Map(Product(rows, weights, {names.gate, config.inner, config.bias}, names.transposed), activate));
  }
  Product(up, weights, {names.down, config.width, config.bias}, names.transposed).Store(y);
}

void Residual::Reference(const Config& config, const Weights& weights, const ConstTensorView& x,
                         const LayerReference& layer, const TensorView& y) {
  const Array rows(x);
  Array normed(rows.sizes), out(rows.sizes);
  const std::vector<int64_t> flat = {rows.rows(), rows.last()};
  const Weights norm_weights = weights.At(config.norm_name + "."), layer_weights = OfLayer(config, weights);
  if (config.post) {
    layer(layer_weights, x, out.view());
    const Array sum = Plus(out, rows).Reshaped(flat);
    Array result(flat);
    Norm::Reference(config.norm, norm_weights, sum.view(), result.view());
    result.Reshaped(rows.sizes).Store(y);
  } else {
    normed.sizes = flat;
    Norm::Reference(config.norm, norm_weights, rows.Reshaped(flat).view(), normed.view());
    layer(layer_weights, normed.Reshaped(rows.sizes).view(), out.view());
    Plus(out, rows).Store(y);
  }
}

}  // namespace heed::layers

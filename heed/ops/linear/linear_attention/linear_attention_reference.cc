// Linear attention as it is defined, one token of one head: everything that it is.
//
//   S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t)      S: [K, V], z: [K]
//   o_t = scale S_t^T phi(q_t), or normalised, / (scale z_t . phi(q_t) + eps)
//
// Without causality every token reads the last S and z.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/linear/linear_attention/linear_attention_internal.h"

namespace heed::linear_attention {
namespace {

using mechanism::Array;

struct Token {
  double scale, eps;
  FeatureMap map;
  bool causal, normalize;

  template <class Number>
  Array<Number> Features(const Array<Number>& x) const {
    using std::exp;
    if (map == FeatureMap::kSoftmax) return mechanism::Softmax(x);
    Array<Number> phi = x;
    for (size_t i = 0; i < x.size(); ++i) {
      if (map == FeatureMap::kElu1) phi[i] = x[i] > 0 ? x[i] + 1 : exp(x[i]);
      if (map == FeatureMap::kRelu) phi[i] = mechanism::Relu(x[i]);
      if (map == FeatureMap::kReluSquared) phi[i] = mechanism::Relu(x[i]) * mechanism::Relu(x[i]);
      if (map == FeatureMap::kExp) phi[i] = x[i] > 80 ? Number(std::exp(80.0)) : exp(x[i]);
    }
    return phi;
  }

  template <class Number>
  void Write(const Array<Number>& /*q*/, const Array<Number>& k, const Array<Number>& v, Array<Number>& S,
             Array<Number>& z) const {
    const Array<Number> phi = Features(k);
    for (size_t i = 0; i < phi.size(); ++i) {
      for (size_t j = 0; j < v.size(); ++j) S(i, j) += phi[i] * v[j];
      z[i] += phi[i];
    }
  }

  template <class Number>
  void Read(const Array<Number>& q, const Array<Number>& /*k*/, const Array<Number>& /*v*/, const Array<Number>& S,
            const Array<Number>& z, Array<Number>& o) const {
    const Array<Number> phi = Features(q);
    Number sum = 0;
    for (size_t i = 0; i < phi.size(); ++i) sum += z[i] * phi[i];
    for (size_t j = 0; j < o.size(); ++j) {
      Number read = 0;
      for (size_t i = 0; i < phi.size(); ++i) read += S(i, j) * phi[i];
      o[j] = normalize ? scale * read / (scale * sum + eps) : scale * read;
    }
  }
};

Token TokenOf(const Inputs&, const Options& options) {
  return {options.scale.value_or(1), options.eps, options.feature_map, options.causal, options.normalize};
}

}  // namespace

HEED_DEFINE_REFERENCES

// Tolerances.
namespace {

using mechanism::Doubles;

// phi(x) and its derivative, for maps that act on each channel separately.
struct Pointwise {
  double value, slope;
};

Pointwise PhiOf(FeatureMap map, double x) {
  switch (map) {
    case FeatureMap::kElu1: return x > 0 ? Pointwise{x + 1, 1} : Pointwise{std::exp(x), std::exp(x)};
    case FeatureMap::kRelu: return {x < 0 ? 0 : x, x > 0 ? 1.0 : 0.0};
    case FeatureMap::kReluSquared: return {x < 0 ? 0 : x * x, x > 0 ? 2 * x : 0};
    case FeatureMap::kExp: return {std::exp(std::min(x, 80.0)), x > 80 ? 0 : std::exp(x)};
    default: return {x, 1};
  }
}

Doubles SoftmaxOf(const Doubles& x) {
  const double max = *std::max_element(x.begin(), x.end());
  Doubles y;
  double sum = 0;
  for (const double value : x) {
    y.push_back(std::exp(value - max));
    sum += y.back();
  }
  for (double& value : y) value /= sum;
  return y;
}

}  // namespace

recurrent::ReferenceMath Math(const Inputs& /*in*/, const Options& options) {
  const FeatureMap map = options.feature_map;
  recurrent::ReferenceMath math;
  math.scale = options.scale.value_or(1);
  math.causal = options.causal;
  math.normalize = options.normalize;
  math.eps = options.eps;
  if (map == FeatureMap::kSoftmax) {
    math.feature = &SoftmaxOf;
    math.feature_backward = [](const Doubles& x, const Doubles& dy) {
      const Doubles y = SoftmaxOf(x);
      double mean = 0;
      for (size_t i = 0; i < y.size(); ++i) mean += y[i] * dy[i];
      Doubles dx;
      for (size_t i = 0; i < y.size(); ++i) dx.push_back(y[i] * (dy[i] - mean));
      return dx;
    };
    return math;
  }
  math.feature = [map](const Doubles& x) {
    Doubles y;
    for (const double value : x) y.push_back(PhiOf(map, value).value);
    return y;
  };
  math.feature_backward = [map](const Doubles& x, const Doubles& dy) {
    Doubles dx;
    for (size_t i = 0; i < x.size(); ++i) dx.push_back(PhiOf(map, x[i]).slope * dy[i]);
    return dx;
  };
  return math;
}

}  // namespace heed::linear_attention

// The reference of Linear attention, in double.
#include <algorithm>
#include <cmath>

#include "heed/ops/linear/linear_attention/linear_attention_internal.h"

namespace heed::linear_attention {
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

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::linear_attention

// The reference of Based, in double: the features written out.
#include <cmath>

#include "heed/ops/linear/based/based_internal.h"

namespace heed::based {
namespace {

using mechanism::Doubles;

// scale > 0.
Doubles Features(const Doubles& x, double scale) {
  const double c = std::sqrt(scale);
  Doubles y = {1};
  for (const double value : x) y.push_back(c * value);
  for (const double value : x) y.push_back(scale * value * value / std::sqrt(2.0));
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = i + 1; j < x.size(); ++j) y.push_back(scale * x[i] * x[j]);
  }
  return y;
}

Doubles FeaturesBackward(const Doubles& x, const Doubles& dy, double scale) {
  const size_t K = x.size();
  Doubles dx;
  for (size_t i = 0; i < K; ++i) {
    dx.push_back(std::sqrt(scale) * dy[1 + i] + std::sqrt(2.0) * scale * x[i] * dy[1 + K + i]);
  }
  size_t at = 1 + 2 * K;
  for (size_t i = 0; i < K; ++i) {
    for (size_t j = i + 1; j < K; ++j, ++at) {
      dx[i] += scale * x[j] * dy[at];
      dx[j] += scale * x[i] * dy[at];
    }
  }
  return dx;
}

}  // namespace

recurrent::ReferenceMath Math(const Inputs& in, const Options& options) {
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(in.q.size(3))));
  recurrent::ReferenceMath math;
  math.normalize = options.normalize;
  math.eps = options.eps;
  math.feature = [scale](const Doubles& x) { return Features(x, scale); };
  math.feature_backward = [scale](const Doubles& x, const Doubles& dy) { return FeaturesBackward(x, dy, scale); };
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::based

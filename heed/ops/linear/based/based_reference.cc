// Based as it is defined, one token of one head: everything that it is.
//
//   S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t)      S: [F, V], z: [F]
//   o_t = S_t^T phi(q_t), or normalised, / (z_t . phi(q_t) + eps)
//   phi(x) = [1, y, y_i^2 / sqrt(2), y_i y_j (i < j)],  y = sqrt(scale) x
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/linear/based/based_internal.h"

namespace heed::based {
namespace {

using mechanism::Array;

struct Token {
  double scale, eps;
  bool normalize;
  int64_t num_features;

  template <class Number>
  Array<Number> Features(const Array<Number>& x) const {
    Array<Number> phi(static_cast<size_t>(num_features));
    size_t at = 0;
    phi[at++] = 1;
    for (size_t i = 0; i < x.size(); ++i) phi[at++] = std::sqrt(scale) * x[i];
    for (size_t i = 0; i < x.size(); ++i) phi[at++] = scale / std::sqrt(2.0) * x[i] * x[i];
    for (size_t i = 0; i < x.size(); ++i) {
      for (size_t j = i + 1; j < x.size(); ++j) phi[at++] = scale * x[i] * x[j];
    }
    return phi;
  }

  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& k, const Array<Number>& v, Array<Number>& S,
                  Array<Number>& z, Array<Number>& o) const {
    const Array<Number> written = Features(k), read = Features(q);
    Number sum = eps;
    for (size_t i = 0; i < z.size(); ++i) {
      z[i] += written[i];
      sum += z[i] * read[i];
    }
    for (size_t j = 0; j < v.size(); ++j) {
      o[j] = 0;
      for (size_t i = 0; i < z.size(); ++i) {
        S(i, j) += written[i] * v[j];
        o[j] += S(i, j) * read[i];
      }
      if (normalize) o[j] /= sum;
    }
  }
};

Token TokenOf(const Inputs& in, const Options& options) {
  const int64_t K = in.q.size(3);
  return {recurrent::RootScale(in, options), options.eps, options.normalize, 1 + K + K * (K + 1) / 2};
}

}  // namespace

HEED_DEFINE_REFERENCES

// Tolerances.
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

}  // namespace heed::based

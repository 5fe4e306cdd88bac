// Performer as it is defined, one token of one head: everything that it is.
//
//   y = sqrt(scale) x
//   phi(x)_j = M^-1/2 (exp(w_j . y - |y|^2 / 2 - st) + eps), or max(w_j . y, 0) + 1e-3
//   S = sum_s phi(k_s) v_s^T,  z = sum_s phi(k_s)                 S: [M, V], z: [M]
//   o_t = S^T phi(q_t) / (z . phi(q_t))
//
// where w_j is row j of W, the projection [M, K], and st the largest w_j . y: of a query over its own j, of a key over
// all keys of the head. In the causal form eps is 0 and keys are relative to the running maximum:
//
//   m_t = max(m_{t-1}, max_j w_j . y_t),  a_t = exp(m_{t-1} - m_t)
//   S_t = a_t S_{t-1} + phi(k_t) v_t^T,  z_t = a_t z_{t-1} + phi(k_t)     with st = m_t
//
// Maxima are constants, without gradients.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/ops/linear/performer/performer_internal.h"

namespace heed::performer {
namespace {

using mechanism::Array;
using mechanism::ValueOf;

struct Token {
  double scale, eps;
  bool relu, causal;
  int64_t num_features;

  template <class Number>
  Array<Number> Scaled(const Array<Number>& x, double factor) const {
    Array<Number> y = x;
    for (size_t i = 0; i < y.size(); ++i) y[i] *= factor;
    return y;
  }
  template <class Number>
  Array<Number> KeyOf(const Array<Number>& k) const {
    return Scaled(k, std::sqrt(std::abs(scale)));
  }
  template <class Number>
  Array<Number> QueryOf(const Array<Number>& q) const {
    return Scaled(q, std::copysign(std::sqrt(std::abs(scale)), scale));
  }

  template <class Number>
  Array<Number> Products(const Array<Number>& W, const Array<Number>& y) const {
    Array<Number> products(W.rows());
    for (size_t j = 0; j < W.rows(); ++j) {
      for (size_t i = 0; i < y.size(); ++i) products[j] += W(j, i) * y[i];
    }
    return products;
  }

  template <class Number>
  Array<Number> Features(const Array<Number>& products, const Array<Number>& y, double st) const {
    using std::exp;
    Number half_square = 0;
    for (size_t i = 0; i < y.size(); ++i) half_square += y[i] * y[i] / 2;
    Array<Number> phi = products;
    for (size_t j = 0; j < phi.size(); ++j) {
      phi[j] = relu ? mechanism::Relu(products[j]) + 1e-3
                    : (exp(products[j] - half_square - st) + eps) / std::sqrt(static_cast<double>(phi.size()));
    }
    return phi;
  }

  // Without causality m is the maximum over all keys before the first is written, so that a is 1.
  template <class Number>
  void Look(const Array<Number>& /*q*/, const Array<Number>& k, const Array<Number>& /*v*/, const Array<Number>& W,
            Array<Number>& /*S*/, Array<Number>& /*z*/, Array<Number>& m) const {
    m[0] = std::max(ValueOf(m[0]), Largest(Products(W, KeyOf(k))));
  }

  template <class Number>
  void Write(const Array<Number>& /*q*/, const Array<Number>& k, const Array<Number>& v, const Array<Number>& W,
             Array<Number>& S, Array<Number>& z, Array<Number>& m) const {
    const Array<Number> y = KeyOf(k), products = Products(W, y);
    const double before = ValueOf(m[0]), now = relu ? 0 : std::max(before, Largest(products));
    const double a = relu ? 1 : std::exp(before - now);
    const Array<Number> phi = Features(products, y, now);
    for (size_t i = 0; i < phi.size(); ++i) {
      for (size_t j = 0; j < v.size(); ++j) S(i, j) = a * S(i, j) + phi[i] * v[j];
      z[i] = a * z[i] + phi[i];
    }
    m[0] = now;
  }

  template <class Number>
  void Read(const Array<Number>& q, const Array<Number>& /*k*/, const Array<Number>& /*v*/, const Array<Number>& W,
            const Array<Number>& S, const Array<Number>& z, const Array<Number>& /*m*/, Array<Number>& o) const {
    const Array<Number> y = QueryOf(q), products = Products(W, y), phi = Features(products, y, Largest(products));
    Number sum = 0;
    for (size_t i = 0; i < phi.size(); ++i) sum += z[i] * phi[i];
    for (size_t j = 0; j < o.size(); ++j) {
      Number read = 0;
      for (size_t i = 0; i < phi.size(); ++i) read += S(i, j) * phi[i];
      o[j] = read / sum;
    }
  }
};

Token TokenOf(const Inputs& in, const Options& options) {
  return {recurrent::RootScale(in, options), options.causal ? 0 : options.eps, options.kernel == Kernel::kRelu,
          options.causal, in.projection.size(0)};
}

}  // namespace

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  using Of = mechanism::Lists<Structs>;
  mechanism::RunReadable(kTensors, kStates, TokenOf(in, options), Of::Of(in), options, Of::Of(out), false);
  if (options.kernel == Kernel::kRelu) mechanism::Clear(out.final.m);  // even without tokens
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  using Of = mechanism::Lists<Structs>;
  mechanism::RunReadable(kTensors, kStates, TokenOf(in, options), Of::Of(in), options, Of::Of(out), true);
}

// Tolerances: features without a shift where a maximum cancels; states are made relative to the maximum at the end.
namespace {

using mechanism::At;
using mechanism::Doubles;
using recurrent::Epsilon;
using recurrent::ReferenceMath;
using recurrent::ReferencePlace;

// The feature maps of one head, and the error of their rounding.
class Maps {
 public:
  Maps(const Inputs& in, const Options& options)
      : in_(in), relu_(options.kernel == Kernel::kRelu), floor_(options.causal ? 0 : options.eps),
        causal_(options.causal), K_(static_cast<size_t>(in.q.size(3))), e_(recurrent::EpsilonOf(in.q.dtype())) {
    const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(K_)));
    factor_ = std::sqrt(std::abs(scale));
    query_factor_ = scale < 0 ? -factor_ : factor_;
    for (int64_t j = 0; j < in.projection.size(0); ++j) {
      Doubles row;
      for (int64_t i = 0; i < in.projection.size(1); ++i) {
        row.push_back(At(in.projection, {j, i}));
      }
      W_.push_back(row);
    }
    root_ = std::sqrt(static_cast<double>(W_.size()));
  }

  // Finds the largest product of a head's keys with W, and its error.
  void LookAtKeys(const ReferencePlace& place) {
    tokens_ = static_cast<double>(place.tokens.size());
    if (relu_) return;
    if (causal_ && in_.initial.m.present()) {
      initial_ = max_ = At(in_.initial.m, {place.sequence, place.head});
    }
    for (const int64_t t : place.tokens) {
      Doubles k;
      for (int64_t i = 0; i < in_.k.size(3); ++i) {
        k.push_back(At(in_.k, {place.batch, t, place.key_head, i}));
      }
      const Token token = Look(k, true);
      const double largest = *std::max_element(token.products.begin(), token.products.end());
      if (largest > max_) changes_ += 1;
      max_ = std::max(max_, largest);
      max_error_ = std::max(max_error_, *std::max_element(token.errors.begin(), token.errors.end()));
    }
  }

  Doubles Map(const Doubles& x, bool of_key) const { return Look(x, of_key).phi; }

  // The error of each feature.
  Doubles Deviation(const Doubles& x, bool of_key) const { return DeviationOf(Look(x, of_key), of_key); }

  Doubles BackwardErrors(const Doubles& x, const Doubles& errors, const Doubles& magnitudes, bool of_key) const {
    const Token token = Look(x, of_key);
    const double terms = std::sqrt(static_cast<double>(W_.size()));
    return OfRow(Absolute(token.y), ProductGradientErrors(token, errors, magnitudes, of_key, terms));
  }
  Doubles ProjectionErrors(const Doubles& x, const Doubles& errors, const Doubles& magnitudes, bool of_key) const {
    const Token token = Look(x, of_key);
    return Outer(ProductGradientErrors(token, errors, magnitudes, of_key, std::sqrt(tokens_)), Absolute(token.y));
  }

  void SetStates(ReferenceMath& math) const {
    if (relu_ || !causal_) return;
    // The initial state is relative to exp(initial m); with m = -infinity it counts as 0.
    math.initial_factor = std::isfinite(max_) ? std::exp(initial_) : 1;
    if (std::isfinite(max_)) math.final_factor = std::exp(-max_);
    math.m_error = max_error_ + e_.base * std::abs(Finite(max_));
    // Each decay exp(m - m') has an exponent with an error of two roundings of m.
    math.value_error = max_error_ + changes_ * e_.base * (1 + std::abs(Finite(max_)));
  }

 private:
  // Intermediate values between x and its features.
  struct Token {
    Doubles y;         // x times the square root of the scale
    Doubles products;  // products with the rows of W, and their errors
    Doubles errors;
    Doubles phi;
  };

  Token Look(const Doubles& x, bool of_key) const {
    Token token;
    for (const double value : x) token.y.push_back(value * (of_key ? factor_ : query_factor_));
    const double chain = Chain();
    for (const Doubles& w : W_) {
      double sum = 0, magnitude = 0;
      for (size_t i = 0; i < w.size(); ++i) {
        sum += w[i] * token.y[i];
        magnitude += std::abs(w[i] * token.y[i]);
      }
      token.products.push_back(sum);
      token.errors.push_back(chain * magnitude);
    }
    const double shift = relu_ ? 0 : Shift(token, of_key);
    for (const double product : token.products) {
      token.phi.push_back(relu_ ? std::max(product, 0.0) + 1e-3 : (std::exp(product - shift) + floor_) / root_);
    }
    return token;
  }

  // Products with W are sums of K terms, and the error of an exponent is the relative error of the exponential.
  Doubles DeviationOf(const Token& token, bool of_key) const {
    const Doubles& p = token.products;
    const double half = HalfSquare(token.y);
    const auto largest = static_cast<size_t>(std::max_element(p.begin(), p.end()) - p.begin());
    const double of_max = of_key ? max_error_ + e_.base * std::abs(Finite(max_)) : token.errors[largest];
    Doubles deviation;
    for (size_t j = 0; j < p.size(); ++j) {
      if (relu_) {
        deviation.push_back(token.errors[j] + e_.base * token.phi[j]);
        continue;
      }
      const double exponent =
          token.errors[j] + Chain() * half + of_max + e_.base * (half + std::abs(p[largest]) + std::abs(p[j]));
      deviation.push_back((token.phi[j] - floor_ / root_) * exponent + e_.base * token.phi[j]);
    }
    return deviation;
  }

  static Doubles Absolute(Doubles x) {
    for (double& value : x) value = std::abs(value);
    return x;
  }
  static double Finite(double x) { return std::isfinite(x) ? x : 0; }

  double Chain() const { return e_.chain * std::sqrt(static_cast<double>(K_)) + e_.base; }

  static double HalfSquare(const Doubles& y) {
    double sum = 0;
    for (const double value : y) sum += value * value / 2;
    return sum;
  }

  // The value subtracted from exponents. In the causal form the maximum cancels, since nothing is added to
  // exponentials.
  double Shift(const Token& token, bool of_key) const {
    const double half = HalfSquare(token.y);
    if (causal_) return half;
    const Doubles& p = token.products;
    return half + (of_key ? max_ : *std::max_element(p.begin(), p.end()));
  }

  // The magnitudes of the terms of W^T t - (sum of t) y.
  Doubles OfRow(const Doubles& y, const Doubles& t) const {
    Doubles dx(K_, 0.0);
    for (size_t j = 0; j < t.size(); ++j) {
      for (size_t i = 0; i < K_; ++i) {
        dx[i] += std::abs(W_[j][i]) * t[j];
        if (!relu_) dx[i] += t[j] * y[i];
      }
    }
    for (double& value : dx) value *= factor_;
    return dx;
  }

  Doubles Outer(const Doubles& t, const Doubles& y) const {
    Doubles d_W;
    for (const double of_row : t) {
      for (const double value : y) d_W.push_back(of_row * value);
    }
    return d_W;
  }

  // Errors of the gradient of W y; `terms` is the square root of the number of terms summed after it.
  Doubles ProductGradientErrors(const Token& token, const Doubles& errors, const Doubles& magnitudes, bool of_key,
                                double terms) const {
    const Doubles deviation = DeviationOf(token, of_key);
    const double later = e_.chain * terms + e_.base;
    Doubles t;
    for (size_t j = 0; j < errors.size(); ++j) {
      const double of_row = errors[j] + later * magnitudes[j];
      if (!relu_) {
        t.push_back(token.phi[j] * of_row + deviation[j] * magnitudes[j]);
        continue;
      }
      // Rounding may change the sign of a product.
      const double p = token.products[j];
      const bool either = std::abs(p) <= token.errors[j] + e_.base * 1e-3;
      t.push_back(either ? magnitudes[j] : p > 0 ? of_row : 0);
    }
    return t;
  }

  const Inputs in_;
  const bool relu_;
  const double floor_;
  const bool causal_;
  const size_t K_;
  const Epsilon e_;
  double factor_, query_factor_, root_, tokens_ = 0;
  std::vector<Doubles> W_;
  double initial_ = -std::numeric_limits<double>::infinity(), max_ = initial_;
  double max_error_ = 0, changes_ = 0;
};

}  // namespace

ReferenceMath Math(const Inputs& in, const Options& options) {
  ReferenceMath math;
  math.of_head = [in, options](const ReferencePlace& place) {
    Maps maps(in, options);
    maps.LookAtKeys(place);
    ReferenceMath own;
    own.causal = options.causal;
    own.normalize = true;
    maps.SetStates(own);
    own.feature = [maps](const Doubles& x) { return maps.Map(x, false); };
    own.key_feature = [maps](const Doubles& x) { return maps.Map(x, true); };
    own.feature_deviation = [maps](const Doubles& x, bool of_key) { return maps.Deviation(x, of_key); };
    own.feature_errors = [maps](const Doubles& x, const Doubles& errors, const Doubles& magnitudes, bool of_key) {
      return maps.BackwardErrors(x, errors, magnitudes, of_key);
    };
    own.d_projection_errors = [maps](const Doubles& x, const Doubles& errors, const Doubles& magnitudes, bool of_key) {
      return maps.ProjectionErrors(x, errors, magnitudes, of_key);
    };
    return own;
  };
  return math;
}

}  // namespace heed::performer

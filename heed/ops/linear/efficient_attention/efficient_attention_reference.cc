// Efficient attention as it is defined, one token of one head: everything that it is.
//
//   k~_s = exp(k_s) / sum_s exp(k_s)            per channel, over all tokens that are not masked
//   S = sum_s k~_s v_s^T                        S: [K, V]
//   o_t = scale S^T softmax(q_t)
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/ops/linear/efficient_attention/efficient_attention_internal.h"

namespace heed::efficient_attention {
namespace {

using mechanism::Array;
using mechanism::ValueOf;

struct Token {
  static constexpr bool causal = false;
  double scale;
  bool has_mask;

  // Row i of S / z is that of S in the equations: both are sums relative to exp(m).
  template <class Number>
  void Write(const Array<Number>& /*q*/, const Array<Number>& k, const Array<Number>& v, const Array<Number>& kv_mask,
             Array<Number>& S, Array<Number>& z, Array<Number>& m) const {
    using std::exp;
    if (has_mask && ValueOf(kv_mask[0]) == 0) return;
    for (size_t i = 0; i < k.size(); ++i) {
      const double before = ValueOf(m[i]), now = std::max(before, ValueOf(k[i]));
      const double a = std::exp(before - now);
      const Number b = exp(k[i] - now);
      for (size_t j = 0; j < v.size(); ++j) S(i, j) = a * S(i, j) + b * v[j];
      z[i] = a * z[i] + b;
      m[i] = now;
    }
  }

  template <class Number>
  void Read(const Array<Number>& q, const Array<Number>& /*k*/, const Array<Number>& /*v*/,
            const Array<Number>& /*kv_mask*/, const Array<Number>& S, const Array<Number>& z,
            const Array<Number>& /*m*/, Array<Number>& o) const {
    const Array<Number> p = mechanism::Softmax(q);
    for (size_t j = 0; j < o.size(); ++j) {
      o[j] = 0;
      for (size_t i = 0; i < p.size() && ValueOf(z[i]) != 0; ++i) o[j] += scale * p[i] * (S(i, j) / z[i]);
    }
  }
};

Token TokenOf(const Inputs& in, const Options& options) {
  return {.scale = recurrent::RootScale(in, options), .has_mask = in.kv_mask.present()};
}

// Sums over the tokens of one call, of which the mechanism has no state.
template <class View>
struct Sums {
  View S, z, m;
};
constexpr Sums<mechanism::StateTensor> kSums = {
    .S = {"S", "BGKV"},
    .z = {"z", "BGK"},
    .m = {"m", "BGK", mechanism::StateTensor::kMaximum, -std::numeric_limits<double>::infinity()},
};

}  // namespace

HEED_DEFINE_REFERENCES_WITH(kSums)

// Tolerances are those of the sums plus the errors of the softmaxes: a few u, u times the range of their exponents, and
// a random walk for the sum over tokens.
namespace {

using mechanism::At;
using mechanism::Clear;
using mechanism::Put;
using Tensor = mechanism::ReferenceTensor;

std::vector<int64_t> Shape(const ConstTensorView& t) { return {t.sizes().begin(), t.sizes().end()}; }

// softmax(q), k~ and v, the terms of the sums.
struct Plain {
  const Inputs& in;
  Tensor q, k, v;
  Options options;
  recurrent::ReferenceMath math;
  std::vector<mechanism::ReferenceSequence> ranges;
  double softmax_error = 0;  // relative error of softmax(q) and k~

  Plain(const Inputs& given, const Options& call)
      : in(given), q(Shape(in.q)), k(Shape(in.k)), v(Shape(in.v)), options(call),
        ranges(mechanism::SequencesOf(call, in.q.size(0), in.q.size(1))) {
    const double u = in.q.dtype() == DType::kF64 ? 0x1p-53 : 0x1p-24;
    const auto counts = [&](int64_t b, int64_t t) {
      return !in.kv_mask.present() ||
             static_cast<const uint8_t*>(in.kv_mask.data())[mechanism::OffsetOf(in.kv_mask, {b, t})] != 0;
    };
    const int64_t H = in.q.size(2), K = in.q.size(3);
    double spread = 0;
    for (const auto& [b, begin, end] : ranges) {
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t t = begin; t < end; ++t) {
          double max = -std::numeric_limits<double>::infinity(), sum = 0;
          for (int64_t i = 0; i < K; ++i) max = std::max(max, At(in.q, {b, t, h, i}));
          for (int64_t i = 0; i < K; ++i) sum += std::exp(At(in.q, {b, t, h, i}) - max);
          for (int64_t i = 0; i < K; ++i) {
            const double x = At(in.q, {b, t, h, i}) - max;
            spread = std::max(spread, -x);
            Put(q.view(), {b, t, h, i}, std::exp(x) / sum);
          }
        }
        for (int64_t i = 0; i < K; ++i) {
          double max = -std::numeric_limits<double>::infinity(), sum = 0;
          for (int64_t t = begin; t < end; ++t) {
            if (counts(b, t)) max = std::max(max, At(in.k, {b, t, h, i}));
          }
          for (int64_t t = begin; t < end; ++t) {
            if (counts(b, t)) sum += std::exp(At(in.k, {b, t, h, i}) - max);
          }
          for (int64_t t = begin; t < end; ++t) {
            if (!counts(b, t)) continue;
            const double x = At(in.k, {b, t, h, i}) - max;
            spread = std::max(spread, -x);
            Put(k.view(), {b, t, h, i}, std::exp(x) / sum);
          }
        }
      }
      for (int64_t t = begin; t < end; ++t) {
        if (!counts(b, t)) continue;
        for (int64_t h = 0; h < in.v.size(2); ++h) {
          for (int64_t j = 0; j < in.v.size(3); ++j) {
            Put(v.view(), {b, t, h, j}, At(in.v, {b, t, h, j}));
          }
        }
      }
    }
    softmax_error = u * (8 + spread + 3.5 * std::sqrt(static_cast<double>(in.q.size(1) + K)));
    math.causal = false;
    math.scale = call.scale.value_or(1 / std::sqrt(static_cast<double>(K)));
    math.value_error = 2 * softmax_error;
  }

  recurrent::ReferenceBackwardInputs Sums() const {
    recurrent::ReferenceBackwardInputs sums;
    sums.q = q.view();
    sums.k = k.view();
    sums.v = v.view();
    return sums;
  }

  // dx = y .* (dy - sum y .* dy), or the magnitude of its terms; `over_tokens` for k.
  void ThroughSoftmax(bool over_tokens, bool magnitudes, const Tensor& dy, const TensorView& dx) const {
    if (!dx.present()) return;
    const Tensor& y = over_tokens ? k : q;
    const double sign = magnitudes ? 1 : -1;
    for (const auto& [b, begin, end] : ranges) {
      for (int64_t h = 0; h < in.q.size(2); ++h) {
        std::vector<double> mean(static_cast<size_t>(in.q.size(3)));
        const auto add = [&](int64_t t) {
          for (int64_t i = 0; i < in.q.size(3); ++i) {
            mean[over_tokens ? static_cast<size_t>(i) : 0] += At(y.view(), {b, t, h, i}) * At(dy.view(), {b, t, h, i});
          }
        };
        for (int64_t t = begin; over_tokens && t < end; ++t) add(t);
        for (int64_t t = begin; t < end; ++t) {
          if (!over_tokens) {
            mean[0] = 0;
            add(t);
          }
          for (int64_t i = 0; i < in.q.size(3); ++i) {
            const double of = At(dy.view(), {b, t, h, i}) + sign * mean[over_tokens ? static_cast<size_t>(i) : 0];
            Put(dx, {b, t, h, i}, At(y.view(), {b, t, h, i}) * of);
          }
        }
      }
    }
  }
};

Tensor Magnitudes(Tensor t) {
  for (double& x : t.values) x = std::abs(x);
  return t;
}

}  // namespace

void Tolerance(const Inputs& in, const Options& options, const Outputs& expected, const Outputs& tolerance) {
  const Plain plain(in, options);
  recurrent::ReferenceInputs sums = plain.Sums();
  const mechanism::RoundedTensor q(plain.q, in.q.dtype());
  sums.q = q.view;
  recurrent::Tolerance(sums, plain.options, plain.math, recurrent::OutputsAsReference(expected),
                       recurrent::OutputsAsReference(tolerance));
  const auto e = recurrent::EpsilonOf(in.q.dtype());
  for (int64_t i = 0; i < tolerance.o.num_elements(); ++i) {
    tolerance.o.as<double>()[i] += std::abs(expected.o.as<double>()[i]) * e.output + e.subnormal;
  }
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  for (const TensorView* t : {&tolerance.q, &tolerance.k, &tolerance.v}) Clear(*t);
  const Plain plain(in, options);
  recurrent::ReferenceBackwardInputs sums = plain.Sums();
  const mechanism::RoundedTensor q(plain.q, in.q.dtype());
  sums.q = q.view;
  sums.d_o = in.d_o;
  // Converts the gradients of both softmaxes and their errors to those of q and k.
  Tensor dq(plain.q.sizes), dk(plain.k.sizes), dq_error(dq), dk_error(dk);
  recurrent::ReferenceGradients gradients, errors;
  gradients.q = dq.view();
  gradients.k = dk.view();
  gradients.v = expected.v;
  errors.q = dq_error.view();
  errors.k = dk_error.view();
  errors.v = tolerance.v;
  recurrent::BackwardReference(sums, plain.options, plain.math, gradients);
  recurrent::BackwardTolerance(sums, plain.options, plain.math, gradients, errors);
  const auto allow = [&](bool over_tokens, Tensor& error, const Tensor& gradient) {
    const Tensor magnitude = Magnitudes(gradient);
    for (size_t i = 0; i < error.values.size(); ++i) {
      error.values[i] += 3 * plain.softmax_error * magnitude.values[i];
    }
    plain.ThroughSoftmax(over_tokens, true, error, over_tokens ? tolerance.k : tolerance.q);
  };
  allow(false, dq_error, dq);
  allow(true, dk_error, dk);
  const auto e = recurrent::EpsilonOf(in.q.dtype());
  const auto round = [&](const TensorView& to, const TensorView& value) {
    for (int64_t i = 0; to.present() && i < to.num_elements(); ++i) {
      to.as<double>()[i] += std::abs(value.as<double>()[i]) * e.output + e.subnormal + e.underflow;
    }
  };
  round(tolerance.q, expected.q);
  round(tolerance.k, expected.k);
  round(tolerance.v, expected.v);
}

}  // namespace heed::efficient_attention

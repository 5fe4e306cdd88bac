// Mamba-3 as it is defined, one token of one head: everything that it is.
//
//   lambda_t = sigmoid(trap_t),  angle_t = angle_{t-1} + dt_t theta_t
//   q_tr = rotated(q + q_bias, angle_t),  k_tr likewise
//   S_t = exp(log_decay_t) (S_{t-1} + (1 - lambda_t) dt_t sum_r k_{t-1,r} v_{t-1,r}^T)
//         + lambda_t dt_t sum_r k_tr v_tr^T
//   o_tr = scale S_t^T q_tr
#include <cmath>
#include <cstddef>
#include <numbers>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/ssm/mamba3/mamba3_internal.h"

namespace heed::mamba3 {
namespace {

using mechanism::Array;

struct Token {
  static constexpr mechanism::ReadableForm kForm = {.o = "BTNGV"};
  double scale;

  template <class Number>
  static Array<Number> Rotated(const Array<Number>& x, const Array<Number>& bias, const Array<Number>& angle) {
    using std::cos, std::sin;
    Array<Number> y(x.size(), x.columns());
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] + bias[i];
    for (size_t r = 0; r < y.rows(); ++r) {
      for (size_t i = 0; i < angle.size(); ++i) {
        const Number a = y(r, 2 * i), b = y(r, 2 * i + 1);
        y(r, 2 * i) = a * cos(angle[i]) - b * sin(angle[i]);
        y(r, 2 * i + 1) = a * sin(angle[i]) + b * cos(angle[i]);
      }
    }
    return y;
  }

  template <class Number>
  void operator()(const Array<Number>& q, const Array<Number>& k, const Array<Number>& v,
                  const Array<Number>& log_decay, const Array<Number>& dt, const Array<Number>& trap,
                  const Array<Number>& theta, const Array<Number>& q_bias, const Array<Number>& k_bias,
                  Array<Number>& S, Array<Number>& angle, Array<Number>& k_before, Array<Number>& v_before,
                  Array<Number>& o) const {
    using std::exp;
    const Number lambda = mechanism::Sigmoid(trap[0]), rest = mechanism::Sigmoid(-trap[0]);  // 1 - lambda
    const Number alpha = exp(log_decay[0]), before = rest * dt[0], now = lambda * dt[0];
    for (size_t i = 0; i < angle.size(); ++i) {
      angle[i] += dt[0] * theta[i];
      // The multiple of 2 pi that is subtracted is a constant.
      angle[i] -= 2 * std::numbers::pi * std::round(mechanism::ValueOf(angle[i]) / (2 * std::numbers::pi));
    }
    const Array<Number> q_t = Rotated(q, q_bias, angle), k_t = Rotated(k, k_bias, angle);
    const size_t R = q.rows();
    for (size_t i = 0; i < q.columns(); ++i) {
      for (size_t j = 0; j < v.columns(); ++j) {
        Number x = S(i, j);
        for (size_t r = 0; r < R; ++r) x += before * k_before(r, i) * v_before(r, j);
        x *= alpha;
        for (size_t r = 0; r < R; ++r) x += now * k_t(r, i) * v(r, j);
        S(i, j) = x;
      }
    }
    for (size_t r = 0; r < R; ++r) {
      for (size_t j = 0; j < v.columns(); ++j) {
        Number read = 0;
        for (size_t i = 0; i < q.columns(); ++i) read += S(i, j) * q_t(r, i);
        o(r, j) = scale * read;
      }
    }
    k_before = k_t;
    v_before = v;
  }
};

Token TokenOf(const Inputs& /*in*/, const Options& options) { return {options.scale.value_or(1)}; }

}  // namespace

HEED_DEFINE_REFERENCES

}  // namespace heed::mamba3

// SSD as it is defined, one token of one head: everything that it is.
//
//   delta_t = clamp(f(dt_t + dt_bias), dt_min, dt_max)      f: softplus or identity
//   S_t = exp(delta_t A) S_{t-1} + delta_t x_t B_t^T        S: [P, N]
//   y_t = scale S_t C_t + D .* x_t,  o_t = y_t .* silu(z_t)
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/ssm/ssd/ssd_internal.h"

namespace heed::ssd {
namespace {

using mechanism::Array;

struct Token {
  static constexpr mechanism::ReadableForm kForm = {.heads = 'H', .shared_heads = 'G', .o = "BTHP"};
  bool softplus, gated;
  double dt_min, dt_max, scale;

  // dt, A and dt_bias have one element, D has one or P.
  template <class Number>
  void operator()(const Array<Number>& x, const Array<Number>& dt, const Array<Number>& A, const Array<Number>& B,
                  const Array<Number>& C, const Array<Number>& D, const Array<Number>& z, const Array<Number>& dt_bias,
                  Array<Number>& S, Array<Number>& o) const {
    using std::exp;
    const Number step = dt[0] + dt_bias[0];
    Number delta = softplus ? mechanism::Softplus(step) : step;
    if (delta < dt_min) delta = dt_min;  // a constant, without a gradient
    if (delta > dt_max) delta = dt_max;
    const Number a = exp(delta * A[0]);
    for (size_t p = 0; p < x.size(); ++p) {
      Number read = 0;
      for (size_t n = 0; n < B.size(); ++n) {
        S(p, n) = a * S(p, n) + delta * x[p] * B[n];
        read += S(p, n) * C[n];
      }
      const Number y = scale * read + D[D.size() == 1 ? 0 : p] * x[p];
      o[p] = gated ? y * z[p] * mechanism::Sigmoid(z[p]) : y;
    }
  }
};

Token TokenOf(const Inputs& in, const Options& options) {
  return {options.dt_softplus, in.z.present(), options.dt_min, options.dt_max, options.scale.value_or(1)};
}

}  // namespace

HEED_DEFINE_REFERENCES

}  // namespace heed::ssd

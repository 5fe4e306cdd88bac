// The selective scan as it is defined, one token of one channel: everything that it is.
//
//   s_t = softplus(delta_t + delta_bias), or delta_t + delta_bias
//   h_t = exp(s_t A) .* h_{t-1} + s_t u_t B_t                             h: [N]
//   y_t = <C_t, h_t> + D u_t,  o_t = y_t silu(z_t)                        silu(z) = z / (1 + e^-z)
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"

namespace heed::selective_scan {
namespace {

using mechanism::Array;

struct Token {
  static constexpr mechanism::ReadableForm kForm = {.heads = 'D', .shared_heads = 'G', .o = "BDT"};
  bool softplus, gated;

  // u, delta, D, z, delta_bias and o have one element.
  template <class Number>
  void operator()(const Array<Number>& u, const Array<Number>& delta, const Array<Number>& A, const Array<Number>& B,
                  const Array<Number>& C, const Array<Number>& D, const Array<Number>& z,
                  const Array<Number>& delta_bias, Array<Number>& h, Array<Number>& o) const {
    using std::exp;
    const Number step = delta[0] + delta_bias[0], s = softplus ? mechanism::Softplus(step) : step;
    Number y = D[0] * u[0];
    for (size_t n = 0; n < A.size(); ++n) {
      h[n] = exp(s * A[n]) * h[n] + s * u[0] * B[n];
      y += C[n] * h[n];
    }
    o[0] = gated ? y * z[0] * mechanism::Sigmoid(z[0]) : y;
  }
};

Token TokenOf(const Inputs& in, const Options& options) { return {options.delta_softplus, in.z.present()}; }

}  // namespace

HEED_DEFINE_REFERENCES

}  // namespace heed::selective_scan

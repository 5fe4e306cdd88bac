// H3 as it is defined, one token of one head of d channels: everything that it is.
//
//   k'_t = sum_{s < W} shift_s .* k_{t-s} + shift_D .* k_t
//   S_t,n = a_n S_{t-1},n + b_n k'_t v_t^T                        S: [d, d, N], complex
//   o_t = (2 Re(sum_n C_n S_t,n) + D k'_t v_t^T)^T q_t
//
// with dt = exp(log_dt), z = dt (-exp(log_A_real) + i A_imag), a = e^z, b = dt (e^z - 1) / z.
#include <cmath>
#include <cstddef>
#include <vector>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/mechanism/reference/reference_complex_internal.h"
#include "heed/ops/ssm/h3/h3_internal.h"

namespace heed::h3 {
namespace {

using mechanism::Array;
using mechanism::Complex;
using mechanism::ComplexAt;

struct Token {
  static constexpr mechanism::ReadableForm kForm = {.heads = 'H', .shared_heads = 0, .o = "BTHd"};

  // The modes of a head.
  template <class Number>
  struct Derived {
    std::vector<Complex<Number>> a, b;  // [N]
  };

  template <class Number>
  Derived<Number> Derive(const Array<Number>&, const Array<Number>&, const Array<Number>&, const Array<Number>&,
                         const Array<Number>& log_dt, const Array<Number>& log_A_real, const Array<Number>& A_imag,
                         const Array<Number>&, const Array<Number>&, const Array<Number>&) const {
    using std::exp;
    Derived<Number> modes;
    const Number dt = exp(log_dt[0]);
    for (size_t n = 0; n < A_imag.size(); ++n) {
      const Complex<Number> z = dt * Complex<Number>{-exp(log_A_real[n]), A_imag[n]};
      modes.a.push_back(Exp(z));
      modes.b.push_back(dt * MeanExp(z));
    }
    return modes;
  }

  // D has one element; shift is [d, W], tail [W - 1, d], oldest key first.
  template <class Number>
  void operator()(const Derived<Number>& modes, const Array<Number>& q, const Array<Number>& k, const Array<Number>& v,
                  const Array<Number>& shift, const Array<Number>&, const Array<Number>&, const Array<Number>&,
                  const Array<Number>& C, const Array<Number>& D, const Array<Number>& shift_D, Array<Number>& tail,
                  Array<Number>& S, Array<Number>& o) const {
    const size_t d = q.size(), N = C.rows(), W = shift.columns();
    o = Array<Number>(d);
    for (size_t i = 0; i < d; ++i) {
      Number key = (shift(i, 0) + shift_D[i]) * k[i];
      for (size_t s = 1; s < W; ++s) key += shift(i, s) * tail(W - 1 - s, i);
      for (size_t j = 0; j < d; ++j) {
        const Number x = key * v[j], skip = D[0] * x;
        Number y = 0;
        for (size_t n = 0; n < N; ++n) {
          const size_t at = (i * d + j) * N + n;
          PutComplex(modes.a[n] * ComplexAt(S, at) + x * modes.b[n], S, at);
          y += 2 * (ComplexAt(C, n) * ComplexAt(S, at)).re;
        }
        o[j] += q[i] * (y + skip);
      }
    }
    mechanism::ShiftIn(k, tail);
  }
};

Token TokenOf(const Inputs&, const Options&) { return {}; }

}  // namespace

HEED_DEFINE_REFERENCES

}  // namespace heed::h3

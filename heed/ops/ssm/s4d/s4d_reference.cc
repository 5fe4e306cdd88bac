// S4D as it is defined, one token of one channel: everything that it is.
//
//   z = dt (-exp(log_A_real) + i A_imag)                   dt = exp(log_dt)
//   a = e^z,                    b = dt (e^z - 1) / z       zero-order hold
//   a = (1 + z/2) / (1 - z/2),  b = dt / (1 - z/2)         bilinear
//   h_t = a .* h_{t-1} + b u_t,  o_t = 2 Re(<C, h_t>) + D u_t        h: [N], complex
#include <cmath>
#include <cstddef>
#include <vector>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/mechanism/reference/reference_complex_internal.h"
#include "heed/ops/ssm/s4d/s4d_internal.h"

namespace heed::s4d {
namespace {

using mechanism::Array;
using mechanism::Complex;
using mechanism::ComplexAt;

struct Token {
  static constexpr mechanism::ReadableForm kForm = {.heads = 'D', .shared_heads = 0, .o = "BDT"};
  bool bilinear;

  // The modes of a channel.
  template <class Number>
  struct Derived {
    std::vector<Complex<Number>> a, b;  // [N]
  };

  template <class Number>
  Derived<Number> Derive(const Array<Number>&, const Array<Number>& log_dt, const Array<Number>& log_A_real,
                         const Array<Number>& A_imag, const Array<Number>&, const Array<Number>&) const {
    using std::exp;
    Derived<Number> modes;
    const Number dt = exp(log_dt[0]);
    for (size_t n = 0; n < A_imag.size(); ++n) {
      const Complex<Number> z = dt * Complex<Number>{-exp(log_A_real[n]), A_imag[n]}, one = {1, 0};
      const Complex<Number> below = one + Number(-0.5) * z;
      modes.a.push_back(bilinear ? (one + Number(0.5) * z) / below : Exp(z));
      modes.b.push_back(dt * (bilinear ? one / below : MeanExp(z)));
    }
    return modes;
  }

  // u, D and o have one element; C and h are [N, 2].
  template <class Number>
  void operator()(const Derived<Number>& modes, const Array<Number>& u, const Array<Number>&, const Array<Number>&,
                  const Array<Number>&, const Array<Number>& C, const Array<Number>& D, Array<Number>& h,
                  Array<Number>& o) const {
    const Number skip = D[0] * u[0];
    o[0] = 0;
    for (size_t n = 0; n < h.rows(); ++n) {
      PutComplex(modes.a[n] * ComplexAt(h, n) + u[0] * modes.b[n], h, n);
      o[0] += 2 * (ComplexAt(C, n) * ComplexAt(h, n)).re;
    }
    // D u is added last, and on the tape the gradient of u from it: a sum that begins with it would be rounded at its
    // magnitude once per mode, which exceeds the error bound of a convolution in f64.
    o[0] += skip;
  }
};

Token TokenOf(const Inputs&, const Options& options) { return {options.discretization == Discretization::kBilinear}; }

}  // namespace

HEED_DEFINE_REFERENCES

}  // namespace heed::s4d

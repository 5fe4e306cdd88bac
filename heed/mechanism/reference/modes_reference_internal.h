// One row through state space models of complex modes in double, with all intermediate values.
#ifndef HEED_MECHANISM_REFERENCE_MODES_REFERENCE_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_MODES_REFERENCE_INTERNAL_H_

#include <complex>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/mechanism/scanning.h"
#include "heed/mechanism/reference/scanning_reference_internal.h"

namespace heed::scanning {

using Complex = std::complex<double>;
using Complexes = std::vector<Complex>;

struct ReferenceMode {
  Complex z, a, b, C;
  Complex a_slope, b_slope;  // derivatives by z; that of b with constant dt
};

struct ReferenceRow {
  int64_t channel;  // channel of the modes
  double dt, D;
  std::vector<ReferenceMode> modes;
  Doubles u;                 // [T]
  std::vector<Complexes> h;  // [T + 1][N]: states before and after tokens

  size_t T() const { return u.size(); }
  size_t N() const { return modes.size(); }
  double OutputAt(size_t t) const;
  double InputGradientAt(size_t t, const Doubles& dy, const std::vector<Complexes>& l) const;
};

// The modes of a channel, or head, without tokens.
ReferenceRow ModesOf(const Inputs& in, bool bilinear, int64_t channel);
// Computes the states after inputs u, from h[0] on.
void Walk(ReferenceRow& row);
// Gradients l of states, [T + 1][N]: l[t] of the state after token t, l[T] of the final state.
std::vector<Complexes> GradientsOf(const ReferenceRow& row, const Doubles& dy, const Complexes& last);
// The gradients of the initial state.
Complexes InitialGradients(const ReferenceRow& row, const std::vector<Complexes>& l);
// Adds to dlog_dt, dlog_A_real, dA_imag, dC and dD.
void AddParameterGradients(const ReferenceRow& row, const Doubles& dy, const std::vector<Complexes>& l,
                           const Gradients& out);

}  // namespace heed::scanning

#endif  // HEED_MECHANISM_REFERENCE_MODES_REFERENCE_INTERNAL_H_

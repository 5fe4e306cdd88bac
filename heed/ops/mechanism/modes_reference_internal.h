// One row through state spaces of complex modes in double, every number of it kept.
#ifndef HEED_OPS_MECHANISM_MODES_REFERENCE_INTERNAL_H_
#define HEED_OPS_MECHANISM_MODES_REFERENCE_INTERNAL_H_

#include <complex>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/ops/mechanism/scanning.h"
#include "heed/ops/mechanism/scanning_reference_internal.h"

namespace heed::scanning {

using Complex = std::complex<double>;
using Complexes = std::vector<Complex>;

struct ReferenceMode {
  Complex z, a, b, C;
  Complex a_slope, b_slope;  // derivatives by z, of b with dt held
};

struct ReferenceRow {
  int64_t channel;  // whose modes they are
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
// States after inputs u, from h[0] on.
void Walk(ReferenceRow& row);
// l of the tokens, [T + 1][N]: l[t] is that of the state after token t, l[T] that of the last state.
std::vector<Complexes> GradientsOf(const ReferenceRow& row, const Doubles& dy, const Complexes& last);
// The gradients of the state before the first token.
Complexes InitialGradients(const ReferenceRow& row, const std::vector<Complexes>& l);
// Adds to dlog_dt, dlog_A_real, dA_imag, dC and dD.
void AddParameterGradients(const ReferenceRow& row, const Doubles& dy, const std::vector<Complexes>& l,
                           const Gradients& out);

}  // namespace heed::scanning

#endif  // HEED_OPS_MECHANISM_MODES_REFERENCE_INTERNAL_H_

// One row through state space models of complex modes in double, with all intermediate values.
#ifndef HEED_MECHANISM_REFERENCE_MODES_REFERENCE_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_MODES_REFERENCE_INTERNAL_H_

#include <complex>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/mechanism/reference/scanning_reference_internal.h"

namespace heed::scanning {

using Complex = std::complex<double>;
using Complexes = std::vector<Complex>;

// The tensors of modes, which are those of a mechanism with the same names.
template <class View>
struct ModeTensors {
  View log_dt, log_A_real, A_imag, C, D;
};
template <template <class> class Tensors, class View>
ModeTensors<View> ModesIn(const Tensors<View>& of) {
  return {of.log_dt, of.log_A_real, of.A_imag, of.C, of.D};
}

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
ReferenceRow ModesOf(const ModeTensors<ConstTensorView>& in, bool bilinear, int64_t channel);
// Computes the states after inputs u, from h[0] on.
void Walk(ReferenceRow& row);
// Gradients l of states, [T + 1][N]: l[t] of the state after token t, l[T] of the final state.
std::vector<Complexes> GradientsOf(const ReferenceRow& row, const Doubles& dy, const Complexes& last);
// The gradients of the initial state.
Complexes InitialGradients(const ReferenceRow& row, const std::vector<Complexes>& l);
// Adds to the gradients of log_dt, log_A_real, A_imag, C and D.
void AddParameterGradients(const ReferenceRow& row, const Doubles& dy, const std::vector<Complexes>& l,
                           const ModeTensors<TensorView>& out);

}  // namespace heed::scanning

#endif  // HEED_MECHANISM_REFERENCE_MODES_REFERENCE_INTERNAL_H_

// The rounding errors of rows through state space models of complex modes.
#ifndef HEED_HARNESS_MECHANISM_MODES_CASE_H_
#define HEED_HARNESS_MECHANISM_MODES_CASE_H_

#include <complex>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/harness/mechanism/scanning_case.h"

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

struct Mode {
  Complex z, a, b, C;
  Complex a_slope, b_slope;  // derivatives by z; that of b with constant dt
};

// One row, or channel, through the modes in double, with all intermediate values.
struct ModesRow {
  int64_t channel;  // channel of the modes
  double dt, D;
  std::vector<Mode> modes;
  Doubles u;                 // [T]
  std::vector<Complexes> h;  // [T + 1][N]: states before and after tokens

  size_t T() const { return u.size(); }
  size_t N() const { return modes.size(); }
  double OutputAt(size_t t) const;
  double InputGradientAt(size_t t, const Doubles& dy, const std::vector<Complexes>& l) const;
};

// The modes of a channel, or head, without tokens.
ModesRow ModesOf(const ModeTensors<ConstTensorView>& in, bool bilinear, int64_t channel);
// Computes the states after inputs u, from h[0] on.
void TakeStatesThrough(ModesRow& row);
// Gradients l of states, [T + 1][N]: l[t] of the state after token t, l[T] of the final state.
std::vector<Complexes> GradientsOf(const ModesRow& row, const Doubles& dy, const Complexes& last);

// Values of a row, and their errors.
struct Inexact {
  Doubles values, errors;

  Inexact() = default;
  explicit Inexact(const Doubles& exact) : values(exact), errors(exact.size(), 0.0) {}
  void Add(double value, double error) {
    values.push_back(value);
    errors.push_back(error);
  }
  Inexact Reversed() const;
};

// The recurrence of one mode in absolute values, from its first token: bounds of the magnitude of its sums, and their
// errors.
struct ModePass {
  Doubles size, error;  // after each token
};
using ModePasses = std::vector<ModePass>;

// The recurrences of states, and of their gradients from the last token on. u: the unit roundoff.
ModePasses StatePasses(const ModesRow& row, const Inexact& inputs, double u);
ModePasses GradientPasses(const ModesRow& row, const Inexact& dy_from_end, const Complexes& last, double u);

// The errors of the final state, and of the gradient of the initial one.
double StateError(const ModePass& pass);
double InitialGradientError(const Mode& mode, const ModePass& pass, double u);

// The errors of outputs, or of gradients of inputs (`back`), as a recurrence; x is in the order of the recurrences.
Doubles OutputErrors(const ModesRow& row, const Inexact& x, bool back, const ModePasses& passes, double u);
// The errors as a convolution of at most `most` taps, with the taps of the row's modes.
Doubles ConvolvedErrors(const ModesRow& row, const Inexact& taps, const Inexact& x, bool back, int64_t most, double u);
// The first `count` taps and their errors, the same for all rows of the same modes.
Inexact TapsOf(const ModesRow& row, size_t count, double u);

// Adds the errors of the gradients of log_dt, log_A_real, A_imag and C for a row with these inputs and output
// gradients. `last`: gradients of the final state. `rows`: the number of rows that are summed.
void AddParameterErrors(const ModesRow& row, const Inexact& inputs, const Inexact& dy, const Complexes& last,
                        bool is_f64, double u, const ModeTensors<TensorView>& tolerance, size_t rows = 1);

// Accumulates the gradients of the modes' taps, over all rows that they are convolved with, and their errors, and
// converts them to those of parameters.
class TapGradients {
 public:
  void Add(const Inexact& inputs, const Inexact& dy, int64_t most, bool is_f64, double u);
  void AddParameterErrors(const ModesRow& row, bool is_f64, double u, const ModeTensors<TensorView>& tolerance) const;

 private:
  Inexact taps_;
};

// True if a call is computed as a convolution, by the engine's rule.
bool IsConvolved(int64_t modes, bool may_choose, bool wants_convolution, bool states);

}  // namespace heed::scanning

#endif  // HEED_HARNESS_MECHANISM_MODES_CASE_H_

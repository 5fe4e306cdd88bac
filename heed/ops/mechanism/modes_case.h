// How far rounding may take rows through state spaces of complex modes.
#ifndef HEED_OPS_MECHANISM_MODES_CASE_H_
#define HEED_OPS_MECHANISM_MODES_CASE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/ops/mechanism/modes_reference_internal.h"
#include "heed/ops/mechanism/scanning.h"

namespace heed::scanning {

// Values of a row, and how far they are off already.
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

// A walk of one mode in absolute values, from its first token: sizes that no sum of its terms exceeds,
// and their errors.
struct ModeWalk {
  Doubles size, error;  // after each token
};
using ModeWalks = std::vector<ModeWalk>;

// The walks of states, and of their gradients from the last token on. u: the unit roundoff.
ModeWalks StateWalks(const ReferenceRow& row, const Inexact& inputs, double u);
ModeWalks GradientWalks(const ReferenceRow& row, const Inexact& dy_from_end, const Complexes& last, double u);

// How far the last state may be off, and the gradient of that before the first token.
double StateError(const ModeWalk& walk);
double InitialGradientError(const ReferenceMode& mode, const ModeWalk& walk, double u);

// How far outputs may be off, or gradients of inputs (`back`), from token to token; x in the order of the walks.
Doubles OutputErrors(const ReferenceRow& row, const Inexact& x, bool back, const ModeWalks& walks, double u);
// As a convolution of at most `most` taps, with those that the modes of the row make.
Doubles ConvolvedErrors(const ReferenceRow& row, const Inexact& taps, const Inexact& x, bool back, int64_t most,
                        double u);
// The first of them, and their errors: the same of all rows of the same modes.
Inexact TapsOf(const ReferenceRow& row, size_t count, double u);

// Adds the errors of dlog_dt, dlog_A_real, dA_imag and dC, whose row's inputs and gradients of outputs
// these are. `last`: gradients of the last state. `rows`: that are added up.
void AddParameterErrors(const ReferenceRow& row, const Inexact& inputs, const Inexact& dy, const Complexes& last,
                        bool is_f64, double u, const Gradients& tolerance, size_t rows = 1);

// The gradients of the taps that modes make, over all rows that they are convolved with, and their
// errors, until those of parameters are made from them.
class TapGradients {
 public:
  void Add(const Inexact& inputs, const Inexact& dy, int64_t most, bool is_f64, double u);
  void AddParameterErrors(const ReferenceRow& row, bool is_f64, double u, const Gradients& tolerance) const;

 private:
  Inexact taps_;
};

// Whether a call is computed as a convolution, as the engine decides.
bool IsConvolved(int64_t modes, bool may_choose, bool wants_convolution, bool states);

}  // namespace heed::scanning

#endif  // HEED_OPS_MECHANISM_MODES_CASE_H_

// Calls of recurrent mechanisms in double: how their references read arguments, and how
// far rounding may take a kernel from them.
#ifndef HEED_OPS_MECHANISM_RECURRENT_REFERENCE_INTERNAL_H_
#define HEED_OPS_MECHANISM_RECURRENT_REFERENCE_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "heed/ops/mechanism/recurrence_reference_internal.h"
#include "heed/ops/mechanism/recurrent.h"

namespace heed::recurrent {

using mechanism::Doubles;

struct ReferencePlace {  // one head of one sequence, and where its tokens are
  int64_t sequence, batch, head, key_head;
  std::vector<int64_t> tokens;  // in the order in which they are taken
};

// The logarithm of the decay of a token's channel.
using LogDecay = std::function<double(int64_t b, int64_t t, int64_t head, int64_t channel)>;
// Tensors [HV], [HV, K], [B, T, HV] and [B, T, HV, K] of them; a tensor of any other rank is refused.
LogDecay PerHead(const ConstTensorView& log_decay);
LogDecay PerHeadChannel(const ConstTensorView& log_decay);
LogDecay PerToken(const ConstTensorView& log_decay);
LogDecay PerTokenChannel(const ConstTensorView& log_decay);

// The scale of a call, K^-1/2 by default.
double RootScale(const Inputs& in, const Options& options);

// A mechanism's own mathematics, which its reference states apart from the definition that its kernels
// run with; no reference reads a definition.
struct ReferenceMath {
  double scale = 1;
  // phi(x), and its transposed derivative at x times dy; empty: the identity.
  std::function<Doubles(const Doubles& x)> feature;
  std::function<Doubles(const Doubles& x, const Doubles& dy)> feature_backward;
  // Keys have a feature of their own, or, where this is empty, that of queries.
  std::function<Doubles(const Doubles& x)> key_feature;
  std::function<Doubles(const Doubles& x, const Doubles& dy)> key_feature_backward;
  // Features with a projection have these: what a token adds to its gradient, how far features may
  // be off, and what that and errors of dy, beside its magnitudes, do to the gradients.
  std::function<Doubles(const Doubles& x, const Doubles& dy, bool of_key)> d_projection;
  std::function<Doubles(const Doubles& x, bool of_key)> feature_deviation;
  using Errors =
      std::function<Doubles(const Doubles& x, const Doubles& errors, const Doubles& magnitudes, bool of_key)>;
  Errors feature_errors, d_projection_errors;
  // Where features depend on all tokens of a head: the mathematics of that one.
  std::function<ReferenceMath(const ReferencePlace& place)> of_head;
  // States are `initial_factor` times what is given, and given out times `final_factor`, with
  // `final_m`.
  double initial_factor = 1, final_factor = 1, final_m = 0, m_error = 0;
  LogDecay log_decay;                         // empty: no decay
  ConstTensorView log_decay_v;                // [B, T, HV, V], of the state's columns; absent: no such decay
  ConstTensorView Inputs::* bonus = nullptr;  // u [HV, K] of the bonus form; null: not that form
  bool complement_keys = false;               // k = 1 - exp(log_decay)
  // Gates that are exponentials have, by token in the order in which they are taken, factors of
  // keys, floors of denominators and what is added to them, and the derivatives of log decays by
  // their gates. Empty: none.
  Doubles key_factors, floors, epsilons, forget_slopes;
  bool causal = true;  // without it, every token reads the last state
  bool normalize = false;
  double eps = 0;
  // How far inputs may be off that the mechanism computes itself: relatively, and log
  // decays; beside one rounding each.
  double value_error = 0, log_decay_error = 0;
};

// Rounding of a dtype; .cc says what of.
struct Epsilon {
  double chain, base, decay;
  double output, subnormal, underflow;
};
Epsilon EpsilonOf(DType dtype);
// The rounding of what is computed beside one dtype and stored in another, as gradients of constants are.
Epsilon StoredIn(DType dtype, DType computed);

// Checks nothing: arguments are a kernel's that has. Outputs may be f64.
void Reference(const Inputs& in, const Options& options, const ReferenceMath& math, const Outputs& out);
void BackwardReference(const BackwardInputs& in, const Options& options, const ReferenceMath& math,
                       const Gradients& out);

// The allowed error of each output; .cc says why.
void Tolerance(const Inputs& in, const Options& options, const ReferenceMath& math, const Outputs& expected,
               const Outputs& tolerance);
void BackwardTolerance(const BackwardInputs& in, const Options& options, const ReferenceMath& math,
                       const Gradients& expected, const Gradients& tolerance);

}  // namespace heed::recurrent

#endif  // HEED_OPS_MECHANISM_RECURRENT_REFERENCE_INTERNAL_H_

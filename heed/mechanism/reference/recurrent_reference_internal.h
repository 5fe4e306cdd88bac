// Calls of recurrent mechanisms in double: how references read arguments, and the error bounds of kernels against them.
#ifndef HEED_MECHANISM_REFERENCE_RECURRENT_REFERENCE_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_RECURRENT_REFERENCE_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "heed/mechanism/reference/recurrence_reference_internal.h"
#include "heed/mechanism/recurrent.h"

namespace heed::recurrent {

using mechanism::Doubles;

struct ReferencePlace {  // one head of one sequence, and the indices of its tokens
  int64_t sequence, batch, head, key_head;
  std::vector<int64_t> tokens;  // in the order of processing
};

// The log decay of a channel of a token.
using LogDecay = std::function<double(int64_t b, int64_t t, int64_t head, int64_t channel)>;
// Accepts log decays [HV], [HV, K], [B, T, HV] and [B, T, HV, K]; other ranks throw.
LogDecay PerHead(const ConstTensorView& log_decay);
LogDecay PerHeadChannel(const ConstTensorView& log_decay);
LogDecay PerToken(const ConstTensorView& log_decay);
LogDecay PerTokenChannel(const ConstTensorView& log_decay);

// The scale of a call, K^-1/2 by default.
double RootScale(const Inputs& in, const Options& options);

// The equations of a mechanism as its reference states them, independent of the engine definition of its kernels; no
// reference reads a definition.
struct ReferenceMath {
  double scale = 1;
  // phi(x), and its transposed derivative at x times dy; empty: the identity.
  std::function<Doubles(const Doubles& x)> feature;
  std::function<Doubles(const Doubles& x, const Doubles& dy)> feature_backward;
  // The feature map of keys; empty: that of queries.
  std::function<Doubles(const Doubles& x)> key_feature;
  std::function<Doubles(const Doubles& x, const Doubles& dy)> key_feature_backward;
  // For features with a projection: a token's contribution to the projection's gradient, the error of features, and the
  // errors of gradients from these and from errors of dy, given its magnitudes.
  std::function<Doubles(const Doubles& x, const Doubles& dy, bool of_key)> d_projection;
  std::function<Doubles(const Doubles& x, bool of_key)> feature_deviation;
  using Errors =
      std::function<Doubles(const Doubles& x, const Doubles& errors, const Doubles& magnitudes, bool of_key)>;
  Errors feature_errors, d_projection_errors;
  // For features that depend on all tokens of a head: the equations of that head.
  std::function<ReferenceMath(const ReferencePlace& place)> of_head;
  // Initial states are multiplied by `initial_factor`, final states by `final_factor`, with `final_m`.
  double initial_factor = 1, final_factor = 1, final_m = 0, m_error = 0;
  LogDecay log_decay;                         // empty: no decay
  ConstTensorView log_decay_v;                // [B, T, HV, V], for columns of the state; absent: no such decay
  ConstTensorView Inputs::* bonus = nullptr;  // u [HV, K] of RWKV's u term; null: none
  bool complement_keys = false;               // k = 1 - exp(log_decay)
  // For exponential gates: factors of keys, floors of denominators, terms added to denominators, and derivatives of log
  // decays by their gates, by token in the order of processing. Empty: none.
  Doubles key_factors, floors, epsilons, forget_slopes;
  bool causal = true;  // otherwise every token reads the final state
  bool normalize = false;
  double eps = 0;
  // Errors of inputs that the mechanism computes itself: relative, and of log decays; beside one rounding each.
  double value_error = 0, log_decay_error = 0;
};

// Rounding errors for a dtype, derived in the .cc file.
struct Epsilon {
  double chain, base, decay;
  double output, subnormal, underflow;
};
Epsilon EpsilonOf(DType dtype);
// The rounding of results computed for one dtype and stored in another, such as gradients of constants.
Epsilon StoredIn(DType dtype, DType computed);

// Does not check its arguments: a kernel has checked them. Outputs may be f64.
void Reference(const Inputs& in, const Options& options, const ReferenceMath& math, const Outputs& out);
void BackwardReference(const BackwardInputs& in, const Options& options, const ReferenceMath& math,
                       const Gradients& out);

// The tolerance of each output, derived in the .cc file.
void Tolerance(const Inputs& in, const Options& options, const ReferenceMath& math, const Outputs& expected,
               const Outputs& tolerance);
void BackwardTolerance(const BackwardInputs& in, const Options& options, const ReferenceMath& math,
                       const Gradients& expected, const Gradients& tolerance);

}  // namespace heed::recurrent

#endif  // HEED_MECHANISM_REFERENCE_RECURRENT_REFERENCE_INTERNAL_H_

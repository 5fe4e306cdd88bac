// The error bounds of kernels of recurrences against their references.
#ifndef HEED_MECHANISM_REFERENCE_RECURRENT_REFERENCE_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_RECURRENT_REFERENCE_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "heed/mechanism/reference/recurrence_reference_internal.h"
#include "heed/mechanism/recurrent.h"

namespace heed::recurrent {

using mechanism::Doubles;

// The tensors of recurrences by their parts in the equations of a reference. Of the tensors that a mechanism does not
// have, views are absent.
template <class View>
struct ReferenceTensors {
  View q, k, v, log_decay, log_decay_v, projection, u, beta, p, erase, write, a, b, i, f;
};
template <class View>
struct ReferenceStates {
  View S, z, m;
};
struct ReferenceInputs : ReferenceTensors<ConstTensorView> {
  ReferenceStates<ConstTensorView> initial;
};
struct ReferenceBackwardInputs : ReferenceInputs {
  ConstTensorView d_o;
  ReferenceStates<ConstTensorView> d_final;
};
struct ReferenceOutputs {
  TensorView o;
  ReferenceStates<TensorView> final;
};
struct ReferenceGradients : ReferenceTensors<TensorView> {
  ReferenceStates<TensorView> initial;
};

// The views of a mechanism's structs, by their names: r is q, and i without v is v.
template <class To, class From>
void TakeTensors(const From& from, To& to) {
  if constexpr (requires { from.q; }) to.q = from.q;
  if constexpr (requires { from.r; }) to.q = from.r;
  if constexpr (requires { from.k; }) to.k = from.k;
  if constexpr (requires { from.v; }) to.v = from.v;
  if constexpr (requires { from.i; }) (requires { from.v; } ? to.i : to.v) = from.i;
  if constexpr (requires { from.f; }) to.f = from.f;
  if constexpr (requires { from.log_decay; }) to.log_decay = from.log_decay;
  if constexpr (requires { from.log_decay_v; }) to.log_decay_v = from.log_decay_v;
  if constexpr (requires { from.projection; }) to.projection = from.projection;
  if constexpr (requires { from.u; }) to.u = from.u;
  if constexpr (requires { from.beta; }) to.beta = from.beta;
  if constexpr (requires { from.p; }) to.p = from.p;
  if constexpr (requires { from.erase; }) to.erase = from.erase;
  if constexpr (requires { from.write; }) to.write = from.write;
  if constexpr (requires { from.a; }) to.a = from.a;
  if constexpr (requires { from.b; }) to.b = from.b;
}
template <class To, class From>
void TakeStates(const From& from, To& to) {
  if constexpr (requires { from.S; }) to.S = from.S;
  if constexpr (requires { from.z; }) to.z = from.z;
  if constexpr (requires { from.m; }) to.m = from.m;
}
template <class In>
ReferenceBackwardInputs AsReference(const In& in) {
  ReferenceBackwardInputs of;
  TakeTensors(in, of);
  TakeStates(in.initial, of.initial);
  if constexpr (requires { in.d_o; }) {
    of.d_o = in.d_o;
    TakeStates(in.d_final, of.d_final);
  }
  return of;
}
template <class Out>
ReferenceOutputs OutputsAsReference(const Out& out) {
  ReferenceOutputs of;
  of.o = out.o;
  TakeStates(out.final, of.final);
  return of;
}
template <class Out>
ReferenceGradients GradientsAsReference(const Out& out) {
  ReferenceGradients of;
  TakeTensors(out, of);
  TakeStates(out.initial, of.initial);
  return of;
}

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
double RootScale(int64_t key_size, const Options& options);
template <class In>
double RootScale(const In& in, const Options& options) {
  return RootScale(AsReference(in).q.size(AsReference(in).q.rank() - 1), options);
}

// The equations of a mechanism, whose tolerances follow from passes over magnitudes of its terms. They are independent
// of the engine definition of its kernels.
struct ReferenceMath {
  double scale = 1;
  // phi(x), and its transposed derivative at x times dy; empty: the identity.
  std::function<Doubles(const Doubles& x)> feature;
  std::function<Doubles(const Doubles& x, const Doubles& dy)> feature_backward;
  // The feature map of keys; empty: that of queries.
  std::function<Doubles(const Doubles& x)> key_feature;
  // For features with a projection: the error of features, and the errors of gradients from these and from errors of
  // dy, given its magnitudes. They are used instead of feature_backward.
  std::function<Doubles(const Doubles& x, bool of_key)> feature_deviation;
  using Errors =
      std::function<Doubles(const Doubles& x, const Doubles& errors, const Doubles& magnitudes, bool of_key)>;
  Errors feature_errors, d_projection_errors;
  // For features that depend on all tokens of a head: the equations of that head.
  std::function<ReferenceMath(const ReferencePlace& place)> of_head;
  // Initial states are multiplied by `initial_factor`, final states by `final_factor`.
  double initial_factor = 1, final_factor = 1, m_error = 0;
  LogDecay log_decay;            // empty: no decay
  ConstTensorView log_decay_v;   // [B, T, HV, V], for columns of the state; absent: no such decay
  bool bonus = false;            // u [HV, K] of RWKV's u term exists
  bool complement_keys = false;  // k = 1 - exp(log_decay)
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

// A recurrence without features, gates or maxima, for tolerances that are relative to values that a mechanism computes
// on the way. Does not check its arguments: a kernel has checked them. Outputs may be f64.
void Reference(const ReferenceInputs& in, const Options& options, const ReferenceMath& math,
               const ReferenceOutputs& out);
void BackwardReference(const ReferenceBackwardInputs& in, const Options& options, const ReferenceMath& math,
                       const ReferenceGradients& out);

// The tolerance of each output, derived in the .cc file.
void Tolerance(const ReferenceInputs& in, const Options& options, const ReferenceMath& math,
               const ReferenceOutputs& expected, const ReferenceOutputs& tolerance);
void BackwardTolerance(const ReferenceBackwardInputs& in, const Options& options, const ReferenceMath& math,
                       const ReferenceGradients& expected, const ReferenceGradients& tolerance);

}  // namespace heed::recurrent

#endif  // HEED_MECHANISM_REFERENCE_RECURRENT_REFERENCE_INTERNAL_H_

// Performer (FAVOR+): softmax attention estimated by random features, so that the past is summed in a matrix of fixed
// size.
//
//   y = sqrt(scale) x,  w_j: row j of the projection [M, K]
//   phi(x)_j = M^-1/2 (exp(w_j . y - |y|^2 / 2 - st) + eps)       kernel kSoftmax
//   phi(x)_j = max(w_j . y, 0) + 1e-3                             kernel kRelu
//   S = sum_s phi(k_s) v_s^T,  z = sum_s phi(k_s)                 S: [M, V], z: [M]
//   o_t = S^T phi(q_t) / (z . phi(q_t))
//
// st is the largest w_j . y: for a query over its own j, for a key over all keys of its head and sequence. For rows w_j
// ~ N(0, I) and eps = 0, phi(q) . phi(k) has the mean exp(scale q . k) up to factors that cancel; OrthogonalFeatures()
// draws such rows.
//
// In the causal form, sums are over s <= t and eps = 0; keys are relative to the running maximum:
//
//   m_t = max(m_{t-1}, max_j w_j . y_t),  a_t = exp(m_{t-1} - m_t) <= 1
//   S_t = a_t S_{t-1} + phi(k_t) v_t^T,  z_t = a_t z_{t-1} + phi(k_t)     with st = m_t
//
// so that no output depends on a later key. Denominators are at least the smallest normal
// number.
//
// Source: Choromanski et al., "Rethinking attention with Performers", arXiv:2009.14794. Differences of other libraries,
// and the gradients: README.md.
#ifndef HEED_OPS_LINEAR_PERFORMER_PERFORMER_H_
#define HEED_OPS_LINEAR_PERFORMER_PERFORMER_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/recurrent.h"

namespace heed::performer {

template <class View>
struct Tensors {
  View q;           // [B, T, H, K]: queries
  View k;           // [B, T, H, K]: keys
  View v;           // [B, T, HV, V]: values
  View projection;  // [M, K], M >= 1: rows of random features, in q's dtype, contiguous; for all heads and sequences
};

// Only the causal form has states.
template <class View>
struct States {
  View S;       // [B, HV, M, V]: the sum of features of keys times values, relative to exp(m)
  View z = {};  // [B, HV, M]: the sum of features of keys, relative to exp(m)
  View m = {};  // [B, HV]: the running maximum of products w_j . y of keys; an initial S requires it
};

using Structs = mechanism::Structs<Tensors, States>;
using Inputs = Structs::Inputs;
using BackwardInputs = Structs::BackwardInputs;
using StepInputs = Structs::StepInputs;
using State = Structs::State;
using Summary = Structs::Summary;
using Outputs = Structs::Outputs;
using Gradients = Structs::Gradients;
using recurrent::Explanation;

enum class Kernel { kSoftmax, kRelu };

// The default scale is K^-1/2.
struct Options : recurrent::Options {
  bool causal = false;               // a token sees no later token
  Kernel kernel = Kernel::kSoftmax;  // which phi:
  double eps = 1e-4;                 // >= 0, added to exponentials in the form without causality
};

// Computes o and, in the causal form if requested, the state after the last token. An absent initial m is -infinity;
// kRelu has no maximum and returns 0.
//
// Edges. Any number of tokens may be 0: the final state is then the initial one. A NaN propagates to all later tokens;
// without causality, to its whole sequence. Features of keys with |y|^2 / 2 > 80 underflow, since the maximum is over
// products only.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are
// f64 or f32. An exponent has an error of u sum_i |w_ji y_i| sqrt(K), u = 2^-24, which is the relative error of the
// feature. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides, nor, in the
// causal form, on splits at multiples of 64 tokens; other splits agree up to rounding, and so do steps.
//
// Cost. 4 M V flops per token and value head, 4 M K per token and value head for features.
// Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if an output overlaps an input, or if lengths, starts, cu_seqlens or eps are
// out of range; Unsupported for a dtype without a kernel. On throw, nothing has been
// written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>; maxima, and so m, count as constants. As a free argument
// the initial m has the gradient <S, dS> + <z, dz>, which heed.torch returns. With dphi as for linear attention and t_j
// = dphi_j (phi_j - M^-1/2 eps), or for kRelu dphi_j where w_j . y > 0:
//
//   dx = sqrt(scale) (W^T t - (sum_j t_j) y)          x: q or k; kRelu without the second term
//   dprojection = sum over queries, keys, heads and sequences of t y^T
//
// dq and dk are summed over the value heads of a key head, dprojection over tokens in the accumulation dtype and over
// heads and sequences in double, in a fixed order. Precision and reproducibility as above. Cost: 12 M V flops per token
// and value head, 10 without causality, and 16 M K for features. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token and updates S, z and m in place, which are zeros and m = -infinity before the first. Only
// the options in the equations above have an effect. Memory-bound by S and the projection; allocates nothing after a
// thread's first step. Also throws InvalidArgument if not causal.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// The segment of these tokens as a map of states, see mechanism/structs.h.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64,
// K, V, M rounded up to whole vectors, and at least 8 threads per head if heads are fewer than threads, at most
//
//   forward   threads E (M V + M K + 64 (3 M + 2 V + K)) + a few KiB
//   backward  threads E (ceil(T / 64) (M + 385) + 3 M (V + 1) + 3 M K
//                        + 64 (8 M + 4 V + 2 K)) + a few KiB + 8 M K
//             + [HV > H] 2 E B T H M
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::performer

#endif  // HEED_OPS_LINEAR_PERFORMER_PERFORMER_H_

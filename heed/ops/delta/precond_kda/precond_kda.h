// Preconditioned Kimi delta attention (PKDA): kda whose keys that write are scaled
// per channel, less where more was written before.
//
//   A_t = exp(g'_t) A_{t-1} + b'_t k_t^2                      A: [K], elementwise
//   r_t = log(A_t + eps) - center
//   M_t = bound^(-r_t / (1 + |r_t|))                          between 1 / bound and bound
//   S~_t = diag(exp(g_t)) S_{t-1}                             S: [K, V]
//   e_t = v_t - S~_t^T k_t
//   S_t = S~_t + beta_t (M_t .* k_t) e_t^T
//   o_t = scale S_t^T q_t
//
// with g = log_decay <= 0, g' = log_decay_A <= 0 and b' = beta_A >= 0. A is one per key head, and 0 before the first
// token. Keys should have norm 1; the key that reads is k itself, and M is not normalised: with bound = 1 this is
// kda. scale = K^-1/2 by default.
//
// Source: Tumma, Loo, Rus, "Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences",
// arXiv:2604.21100. M and the defaults of bound, eps and center are those of fla/ops/atk in flash-linear-attention,
// where bound is x and center is log_atk_scale.
#ifndef HEED_OPS_DELTA_PRECOND_KDA_PRECOND_KDA_H_
#define HEED_OPS_DELTA_PRECOND_KDA_PRECOND_KDA_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/recurrent.h"

namespace heed::precond_kda {

template <class View>
struct Tensors {
  View q;            // [B, T, H, K]: queries
  View k;            // [B, T, H, K]: keys
  View v;            // [B, T, HV, V]: values
  View log_decay;    // [B, T, HV, K]: natural logarithms of decay factors of S, <= 0
  View beta;         // [B, T, HV]: step sizes
  View log_decay_A;  // [B, T, H]: natural logarithms of decay factors of A, <= 0
  View beta_A;       // [B, T, H]: weights of the squares of keys in A, >= 0
  View center;       // [H], optional: the logarithm of A + eps at which M is 1; -0.2 by default
};

template <class View>
struct States {
  View S;  // [B, HV, K, V]: unscaled, with all decays up to the last token
  View A;  // [B, H, K]: >= 0, with all decays up to the last token
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

// The default scale is K^-1/2. A call with `segment` is Unsupported: what a segment writes depends on A before it.
struct Options : recurrent::Options {
  double bound = 1.5;  // >= 1: M is between 1 / bound and bound
  double eps = 1e-6;   // added to A before its logarithm: at least 2^-126
};

// Computes o and, if requested, the states after the last token.
//
// Edges. Any number of tokens may be 0: the final states are then the initial ones. A log decay of -infinity clears the
// state that it multiplies; a positive one counts as 0, unless the Context checks; a NaN propagates to all later
// tokens, and an A + eps that is not positive or not finite gives NaN. With keys that are not of norm 1, S may grow
// without bound.
//
// Precision. f64 is computed in f64, other dtypes in f32, the keys that are written too, and o is rounded once; states
// are f64 or f32. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides.
// Splitting a call anywhere, or into steps, gives bitwise equal results.
//
// Cost. 6 K V flops per token and value head; a logarithm, an exponential and a division per token, key head and
// channel. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if an output overlaps an input, or if lengths, starts, cu_seqlens, bound or eps are out of
// range; Unsupported for a dtype without a kernel, and on a GPU. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With D_t = dS_t and w_t = M_t .* k_t:
//
//   D_t  = scale q_t d_o_t^T + diag(exp(g_{t+1})) (D_{t+1} - beta_{t+1} k_{t+1} de_{t+1}^T)
//   de_t = D_t^T w_t,  dq_t = scale S_t d_o_t,  dw_t = beta_t D_t e_t,  dv_t = beta_t de_t,  dbeta_t = <e_t, de_t>
//   dg_t = rowsum((D_t - beta_t k_t de_t^T) .* S~_t)
//   dr_t = -log(bound) w_t .* dw_t / (1 + |r_t|)^2,  dcenter = -sum dr_t
//   dA_t = dr_t / (A_t + eps) + exp(g'_{t+1}) dA_{t+1}
//   dk_t = M_t .* dw_t - beta_t S~_t de_t + 2 b'_t k_t .* dA_t
//   db'_t = <k_t^2, dA_t>,  dg'_t = exp(g'_t) <A_{t-1}, dA_t>
//
// Gradients of keys and queries are summed over the value heads of a key head. Precision and
// reproducibility as above; splits at multiples of 64 tokens give bitwise equal results, dcenter apart, which is a sum
// over all tokens. Cost: 18 K V flops per token and value head. States are stored at the boundaries of chunks of 64
// tokens, the rest is recomputed. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token and updates S and A in place. The options scale, bound and eps have an effect. Memory-bound
// by S; allocates nothing after a thread's first step.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// Throw Unsupported: a segment of tokens is no map of states, as what it writes depends on A before it.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64,
// K, V rounded up to whole vectors, and at least 16 threads per head if heads are fewer than threads, at most
//
//   forward   threads E (K V + 64 (7 K + 5 V)) + E B H (T + 1) K + a few KiB
//   backward  threads E (ceil(T / 64) (K V + 64 V) + 3 K V + 64 (11 K + 8 V)) + 4 E B H (T + 1) K + a few KiB
//             + [HV > H] 4 E B T H K
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::precond_kda

#endif  // HEED_OPS_DELTA_PRECOND_KDA_PRECOND_KDA_H_

// Comba: a gated delta rule that reads the state with a separate key.
//
//   S~_t = exp(g_t) S_{t-1}                       S: [K, V]
//   e_t = v_t - S~_t^T p_t
//   S_t = S~_t + beta_t k_t e_t^T
//   o_t = scale S_t^T q_t
//
// with g = log_decay <= 0 and beta one per token and value head, p the key that reads the state, like k, which writes
// to it; and scale = K^-1/2 by default.
//
// Source: Hu and others, "Comba: Improving Bilinear RNNs with Closed-loop Control",
// arXiv:2506.02475.
#ifndef HEED_OPS_DELTA_COMBA_COMBA_H_
#define HEED_OPS_DELTA_COMBA_COMBA_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/recurrent.h"

namespace heed::comba {

template <class View>
struct Tensors {
  View q;          // [B, T, H, K]: queries
  View k;          // [B, T, H, K]: keys that write to the state
  View v;          // [B, T, HV, V]: values
  View p;          // [B, T, H, K]: keys that read the state
  View log_decay;  // [B, T, HV]: natural logarithms of decay factors, <= 0
  View beta;       // [B, T, HV]: step sizes
};

template <class View>
struct States {
  View S;  // [B, HV, K, V]: unscaled, with all decays up to the last token
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
using recurrent::Options;

// Computes o and, if requested, the state after the last token.
//
// Edges. Any number of tokens may be 0: the final state is then the initial one. A log decay of -infinity clears the
// state that it multiplies; a positive one counts as 0, unless the Context checks; a NaN propagates to all later
// tokens. With keys that are not of norm 1, S may grow without bound.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are
// f64 or f32. No exponential has a positive argument. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides.
// Splitting a call anywhere, or into steps, gives bitwise equal results.
//
// Cost. 6 K V flops per token and value head. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if an output overlaps an input, or if lengths, starts or cu_seqlens are out of
// range; Unsupported for a dtype without a kernel. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With D_t = dS_t:
//
//   D_t  = scale q_t d_o_t^T + exp(g_{t+1}) (D_{t+1} - beta_{t+1} p_{t+1} de_{t+1}^T)
//   de_t = D_t^T k_t,  dq_t = scale S_t d_o_t,  dk_t = beta_t D_t e_t,  dp_t = -beta_t S~_t de_t
//   dv_t = beta_t de_t,  dbeta_t = <e_t, de_t>,  dg_t = <D_t - beta_t p_t de_t^T, S~_t>
//
// Gradients of keys and queries are summed over the value heads of a key head. Precision and
// reproducibility as above; splits at multiples of 64 tokens give bitwise equal results. Cost: 18 K V flops
// per token and value head. States are stored at the boundaries of chunks of 64 tokens, the rest is recomputed. Throws
// as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token and updates S in place. Only the option scale has an effect. Memory-bound by S;
// allocates nothing after a thread's first step.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// The segment of these tokens as a map of states, see mechanism/structs.h.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64,
// K, V rounded up to whole vectors, and at least 16 threads per head if heads are fewer than threads, at most
//
//   forward   threads E (K V + 64 (7 K + 5 V)) + a few KiB
//   backward  threads E (ceil(T / 64) (K V + 64 V) + 3 K V + 64 (11 K + 8 V)) + a few KiB
//             + [HV > H] 4 E B T H K
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::comba

#endif  // HEED_OPS_DELTA_COMBA_COMBA_H_

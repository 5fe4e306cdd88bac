// RWKV-7: a decaying state, which one key reads before the decay and another key writes to.
//
//   S_t = diag(exp(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T r_t
//
// with g = log_decay <= 0 one per token, value head and key channel, a and b like k; in RWKV-7 a
// is minus a key of norm 1, b that key times a factor in (0, 1) per channel; and scale = 1 by
// default. With other a and b it is the general diagonal plus rank-one recurrence (DPLR).
//
// Source: Peng and others, "RWKV-7 'Goose' with Expressive Dynamic State Evolution",
// arXiv:2503.14456.
#ifndef HEED_OPS_DELTA_RWKV7_RWKV7_H_
#define HEED_OPS_DELTA_RWKV7_RWKV7_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/recurrent.h"

namespace heed::rwkv7 {

template <class View>
struct Tensors {
  View r;          // [B, T, H, K]: queries
  View log_decay;  // [B, T, HV, K]: natural logarithms of decay factors, <= 0
  View k;          // [B, T, H, K]: keys
  View v;          // [B, T, HV, V]: values
  View a;          // [B, T, H, K]: keys that read the state, before its decay
  View b;          // [B, T, H, K]: keys that the read values are written to
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
// Cost. 8 K V flops per token and value head. Memory beyond the arguments: Workspace().
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
//   D_t  = scale r_t d_o_t^T + diag(exp(g_{t+1})) D_{t+1} + a_{t+1} dx_{t+1}^T
//   x_t  = S_{t-1}^T a_t,  dx_t = D_t^T b_t
//   dr_t = scale S_t d_o_t,  dk_t = D_t v_t,  dv_t = D_t^T k_t
//   da_t = S_{t-1} dx_t,  db_t = D_t x_t,  dg_t = exp(g_t) .* rowsum(D_t .* S_{t-1})
//
// dr, dk, da and db are summed over the value heads of a key head. Precision and
// reproducibility as above; splits at multiples of 64 tokens give bitwise equal results. Cost: 26 K V flops
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

}  // namespace heed::rwkv7

#endif  // HEED_OPS_DELTA_RWKV7_RWKV7_H_

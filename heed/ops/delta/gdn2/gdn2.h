// The gated delta rule with two gates: separate gates per channel for erasing and for writing.
//
//   S~_t = diag(exp(g_t)) S_{t-1}                 S: [K, V]
//   e_t = write_t .* v_t - S~_t^T (erase_t .* k_t)
//   S_t = S~_t + k_t e_t^T
//   o_t = scale S_t^T q_t
//
// with g = log_decay <= 0 and erase one per token, value head and key channel, write one per
// token, value head and value channel; keys of norm 1 and gates in (0, 1) keep S bounded; and
// scale = K^-1/2 by default.
//
// Source: the delta rule with a gate per channel for erasing and for writing that layers of flash-linear-attention
// call.
#ifndef HEED_OPS_DELTA_GDN2_GDN2_H_
#define HEED_OPS_DELTA_GDN2_GDN2_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/recurrent.h"

namespace heed::gdn2 {

template <class View>
struct Tensors {
  View q;          // [B, T, H, K]: queries
  View k;          // [B, T, H, K]: keys
  View v;          // [B, T, HV, V]: values
  View log_decay;  // [B, T, HV, K]: natural logarithms of decay factors, <= 0
  View erase;      // [B, T, HV, K]: factors of the key that erases
  View write;      // [B, T, HV, V]: factors of the values that are written
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
//   D_t  = scale q_t d_o_t^T + diag(exp(g_{t+1})) (D_{t+1} - r_{t+1} de_{t+1}^T),  r = erase .* k
//   de_t = D_t^T k_t,  dr_t = -S~_t de_t,  dq_t = scale S_t d_o_t
//   dk_t = D_t e_t + erase_t .* dr_t,  derase_t = k_t .* dr_t
//   dv_t = write_t .* de_t,  dwrite_t = v_t .* de_t,  dg_t = rowsum((D_t - r_t de_t^T) .* S~_t)
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

}  // namespace heed::gdn2

#endif  // HEED_OPS_DELTA_GDN2_GDN2_H_

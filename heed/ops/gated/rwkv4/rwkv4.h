// RWKV-4's time mixing: a weighted mean per channel, with weights that decay with distance.
//
//   o_t = (sum_{s < t} e^{(t - 1 - s) w + k_s} v_s + e^{u + k_t} v_t)
//         / (sum_{s < t} e^{(t - 1 - s) w + k_s} + e^{u + k_t})
//
// with w = log_decay <= 0 and the bonus u of the current token, one number each per channel. The sums are relative to a
// running maximum, so that keys may have any magnitude:
//
//   max_t = max(max_{t-1} + w, k_t)
//   num_t = e^{max_{t-1} + w - max_t} num_{t-1} + e^{k_t - max_t} v_t,  den_t likewise with v = 1
//
// Source: Peng, Alcaide, Anthony et al., "RWKV: Reinventing RNNs for the Transformer Era",
// arXiv:2305.13048; there w = -exp(time_decay).
#ifndef HEED_OPS_GATED_RWKV4_RWKV4_H_
#define HEED_OPS_GATED_RWKV4_RWKV4_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/recurrent.h"

namespace heed::rwkv4 {

// B sequences, T tokens, C channels, which are contiguous; any other strides.
template <class View>
struct Tensors {
  View k;          // [B, T, C]: logarithms of weights; f64, f32, bf16 or f16
  View v;          // [B, T, C]: values, in k's dtype
  View log_decay;  // [C]: w <= 0, any float dtype
  View u;          // [C]: the bonus of the current token, any float dtype
};

// The state between two calls: f64 for f64, else f32, any strides. All three tensors are present or all absent.
template <class View>
struct States {
  View num;  // [B, C]: the sum of weighted values, relative to exp(max)
  View den;  // [B, C]: the sum of weights, relative to exp(max)
  View max;  // [B, C]: the largest exponent so far; -1e38 before any
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
// Edges. Any number of tokens may be 0: the final state is then the initial one. A positive log decay counts
// as 0, unless the Context checks; with -infinity a token sees only the previous token and itself. A NaN stays in its
// channel and propagates to all later tokens.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are f64 or f32.
// No exponential has a positive argument. The rounding error of the sum max + w is compensated in num and den: max
// itself has an error of up to half a rounding per token. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides, nor on the
// split of a sequence into calls or steps.
//
// Cost. Two exponentials, a quotient and some 20 other operations per token and channel. Memory
// beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if a
// scale is given, if an output overlaps an input, or if lengths, starts or cu_seqlens are out of
// range; Unsupported for a dtype without a kernel. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>, where max counts as a constant, since it cancels in every
// function of num exp(max) and den exp(max). As one of three free arguments the initial max has the gradient num dnum +
// den dden, which heed.torch returns. A_t and B_t are the weights of the previous state and the token in o_t, relative
// to the larger one, E_t and F_t those in the update of the state, d_t = A_t den_{t-1} + B_t and e_t = d_o_t / d_t:
//
//   dv_t = B_t e_t + F_t dnum_t,  dk_t = B_t e_t (v_t - o_t) + F_t (v_t dnum_t + dden_t)
//   dnum_{t-1} = A_t e_t + E_t dnum_t,  dden_{t-1} = -A_t e_t o_t + E_t dden_t
//   du = sum_t B_t e_t (v_t - o_t),  dw = sum_t E_t (num_{t-1} dnum_t + den_{t-1} dden_t)
//
// Sums over tokens are over chunks of 64, then in f64. Precision and reproducibility as above; splits at multiples of
// 64 tokens give bitwise equal results. Cost: four exponentials per token and channel, one more after the first 64.
// States are stored at the boundaries of chunks of 64 tokens, the rest is recomputed. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o [B, C] of one token, bitwise equal to Forward, and updates the state in place. Allocates nothing after a
// thread's first step.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// The segment of these tokens as a map of states, see mechanism/structs.h.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all its threads: at most
//
//   forward   threads 4 KiB
//   backward  threads (64 + ceil(T / 64)) 768 + threads 4 KiB + 16 N C, N sequences
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::rwkv4

#endif  // HEED_OPS_GATED_RWKV4_RWKV4_H_

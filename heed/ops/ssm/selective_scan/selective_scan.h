// Selective scan, the recurrence of Mamba: states per channel with input-dependent decays.
//
//   s_t = softplus(delta_t + delta_bias), or delta_t + delta_bias         per channel
//   h_t = exp(s_t A) .* h_{t-1} + s_t u_t B_t                             h: [N] per channel
//   y_t = <C_t, h_t> + D u_t,  o_t = y_t silu(z_t)                        silu(z) = z / (1 + e^-z)
//
// Channel d reads B and C of group d / (D / G). Either of them may also be [D, N], constant per channel.
//
// Source: Gu, Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
// arXiv:2312.00752; names and shapes are those of selective_scan_fn of the package mamba_ssm, which has neither an
// initial state nor the gradient of the final one.
#ifndef HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_H_
#define HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/scanning.h"

namespace heed::selective_scan {

template <class View>
struct Tensors {
  View u;                // [B, D, T]: inputs
  View delta;            // [B, D, T]: time steps, before delta_bias and delta_softplus
  View A;                // [D, N]: decay rates of states, < 0
  View B;                // [B, G, N, T], [B, N, T] or [D, N]: input projection of the state
  View C;                // [B, G, N, T], [B, N, T] or [D, N]: output projection of the state
  View D = {};           // [D]: factors of the inputs, added to o; absent: 0
  View z = {};           // [B, D, T]: o is multiplied by silu(z); absent: by 1
  View delta_bias = {};  // [D]: added to delta; absent: 0
};

template <class View>
struct States {
  View S;  // [B, D, N]: h after the last token
};

using Structs = mechanism::Structs<Tensors, States>;
using Inputs = Structs::Inputs;
using BackwardInputs = Structs::BackwardInputs;
using StepInputs = Structs::StepInputs;
using State = Structs::State;
using Summary = Structs::Summary;
using Outputs = Structs::Outputs;
using Gradients = Structs::Gradients;
using scanning::Explanation;

struct Options : scanning::Options {
  bool delta_softplus = false;  // the step is softplus(delta + delta_bias)
};

// Computes o and, if requested, the state after the last token.
//
// Edges. Any of B, D and T may be 0; without tokens the final state is the initial one. An A of -infinity clears the
// state. A NaN stays in its channel, except that a NaN in B or C propagates to the channels of its group.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are
// f64 or f32. Decays are applied unrounded, so that a state with decays near 1 has only the errors of its own
// roundings. Subnormal results are flushed to zero.
//
// Reproducibility. Results depend neither on the number of threads, other batch entries, padding or strides, nor on the
// split of a sequence into calls.
//
// Cost. One exponential and six flops per token, channel and state, which are the bottleneck where tokens or channels
// are contiguous. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype or device disagrees with the above, if an
// output overlaps an input, or if lengths, starts or cu_seqlens are out of range. A positive A, with which states grow,
// and a NaN are not errors, unless the Context checks. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With dy = d_o .* silu(z) and p the gradient of h,
// including that of the final state:
//
//   p_t  = dy_t C_t + exp(s_{t+1} A) .* p_{t+1}
//   dB_t = sum_d p_t s_t u_t,  dC_t = sum_d dy_t h_t,  du_t = s_t <p_t, B_t> + D dy_t
//   ds_t = u_t <p_t, B_t> + <r_t, A>,  dA = sum_t s_t r_t     r_t = p_t .* exp(s_t A) .* h_{t-1}
//   dD = sum_t dy_t u_t,  dz = d_o .* y .* silu'(z),  ddelta_bias = sum_t ddelta_t
//
// with ddelta = ds, times the derivative of softplus. Sums over tokens are over groups of 128, counted from a
// sequence's first token, in f32 (f64 for f64), then in f64, or on GPUs in pairs of f32, in a fixed order. Precision
// and reproducibility as above, except for split calls: gradients of constants, dB and dC agree with the whole up to
// rounding, all others bitwise.
//
// Cost: three passes like the forward one. States are stored every 16 tokens, the rest is recomputed. Throws as
// Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token, bitwise equal to Forward, then updates the state in place. Only the option delta_softplus
// has an effect. Memory-bound by the state.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// The segment of these tokens as a map of states, see mechanism/structs.h.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64, W = 64
// channels of f32 or 32 of f64, N rounded up to 16, L the tokens of the longest sequence and S those of all, at most
//
//   forward   threads (E W (35 N + 80) + a few KiB)
//   backward  threads (E W (ceil(L / 16) + 20) N + 8 W (4 N + 2) + 16 KiB + E N (288 + 1056))
//             + E 2 S G N + 8 D (4 N + 2) + S G / 32 + a few KiB
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::selective_scan

#endif  // HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_H_

// Selective scan, the recurrence of Mamba: states of a channel that decay by what the token says.
//
//   s_t = softplus(delta_t + delta_bias), or delta_t + delta_bias         per channel
//   h_t = exp(s_t A) .* h_{t-1} + s_t u_t B_t                             h: [N] per channel
//   y_t = <C_t, h_t> + D u_t,  o_t = y_t silu(z_t)                        silu(z) = z / (1 + e^-z)
//
// Channel d reads B and C of group d / (D / G). Where they are [D, N] they are constants of a
// channel, each on its own.
//
// Source: Gu, Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
// arXiv:2312.00752; names and shapes are those of selective_scan_fn of the package mamba_ssm, which
// has neither an initial state nor the gradient of the last one.
#ifndef HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_H_
#define HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/ops/mechanism/scanning.h"

namespace heed::selective_scan {

// It takes u, delta, A, B and C, and D, z and delta_bias where they are wanted.
using scanning::BackwardInputs;
using scanning::Explanation;
using scanning::Gradients;
using scanning::Inputs;
using scanning::Outputs;
using scanning::StepInputs;
using scanning::StepState;

struct Options : scanning::Options {
  bool delta_softplus = false;  // the step is softplus(delta + delta_bias)
};

// Computes o, and the state after the last token where it is asked for.
//
// Edges. Any of B, D and T may be 0; without tokens the state passes through. An A of -infinity
// forgets everything. A NaN stays in its channel, but for one of B or C, which spreads to the
// channels of its group.
//
// Precision. f64 is computed in f64, all else in f32, and o is rounded once; states are
// f64 or f32. Decays are applied without being rounded, so that a state whose decays are near
// 1 drifts no further than its own roundings take it. Subnormal results are flushed.
//
// Reproducibility. The bits depend neither on threads, batch neighbours, padding or strides,
// nor on where a sequence is split into calls.
//
// Cost. One exponential and six flops per token, channel and state, which bound it where tokens
// or channels are contiguous. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype or device disagrees with the above, if an
// output overlaps an input, or if lengths, starts or cu_seqlens are out of range. A positive A makes
// states grow and a NaN is computed with, unless the Context checks: then it throws. On throw,
// nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does, written for reading: scalar, one thread, all in double. Outputs may
// be f64 whatever the inputs are.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes gradients of a sum over <d_o, o> and <d_final, final>. With dy = d_o .* silu(z) and p
// the gradient of h, that of the final state included:
//
//   p_t  = dy_t C_t + exp(s_{t+1} A) .* p_{t+1}
//   dB_t = sum_d p_t s_t u_t,  dC_t = sum_d dy_t h_t,  du_t = s_t <p_t, B_t> + D dy_t
//   ds_t = u_t <p_t, B_t> + <r_t, A>,  dA = sum_t s_t r_t     r_t = p_t .* exp(s_t A) .* h_{t-1}
//   dD = sum_t dy_t u_t,  dz = d_o .* y .* silu'(z),  ddelta_bias = sum_t ddelta_t
//
// with ddelta = ds, times the derivative of softplus. Sums over tokens are taken in groups of 128,
// counted from a sequence's own first token, in f32 (f64 beside f64), then in f64,
// or on GPUs in two numbers of f32, in a fixed order.
// Precision and reproducibility as above, splits aside: the gradients of constants, dB and dC agree
// with those of the whole to rounding, all others to the bit.
//
// Cost: three passes like the forward one. States are kept every 16 tokens, the rest is computed
// again. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token, with the bits of Forward; the state is read, then updated in place. Of
// the options, delta_softplus alone. Bound by the memory of the state.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const StepState& state,
                   const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all its threads. With E = 4, or 8 for f64, W = 64
// channels of f32 or 32 of f64, N rounded up to 16, L the tokens of the longest and S those of all
// sequences, at most
//
//   forward   threads (E W (35 N + 80) + a few KiB)
//   backward  threads (E W (ceil(L / 16) + 20) N + 8 W (4 N + 2) + 16 KiB + E N (288 + 1056))
//             + E 2 S G N + 8 D (4 N + 2) + S G / 32 + a few KiB
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// What Forward would do. Pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::selective_scan

#endif  // HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_H_

// State space duality, the core of Mamba-2: a matrix-valued state per head with one decay per token, with B and C
// shared by groups of heads.
//
//   delta_t = clamp(f(dt_t + dt_bias), dt_min, dt_max)    f: softplus or identity
//   S_t = exp(delta_t A) S_{t-1} + delta_t x_t B_t^T      S: [P, N]
//   y_t = scale S_t C_t + D .* x_t,  o_t = y_t .* silu(z_t)
//
// per head h, with B and C of group h / (H / G). scale is 1 by default. Names and shapes are those of the package
// mamba_ssm; the normalisation that follows is part of the layer.
//
// Sizes: B sequences, T tokens, H heads, G groups that divide H, P channels of a head, N
// of the state, P, N >= 1. x, B, C and z have one float dtype, the last axis contiguous, any other strides; dt has the
// same dtype, or f32 (f64 for f64); A, D and dt_bias have any float dtype and are read in f64. An absent initial state
// is zeros, and an absent final state is not computed. Tokens outside lengths, starts or cu_seqlens have o = 0.
//
// Source: Dao, Gu, "Transformers are SSMs", arXiv:2405.21060. Derivation of the
// gradients: README.md.
#ifndef HEED_OPS_SSM_SSD_SSD_H_
#define HEED_OPS_SSM_SSD_SSD_H_

#include <cstdint>
#include <limits>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/recurrent.h"

namespace heed::ssd {

template <class View>
struct Tensors {
  View x;             // [B, T, H, P]: values
  View dt;            // [B, T, H]: steps, before dt_bias and f
  View A;             // [H], < 0: rates of decay
  View B;             // [B, T, G, N]: keys
  View C;             // [B, T, G, N]: queries
  View D = {};        // [H] or [H, P]: factors of x, added to the output; absent: 0
  View z = {};        // [B, T, H, P]: gate of the output; absent: o = y
  View dt_bias = {};  // [H]: added to dt; absent: 0
};

template <class View>
struct States {
  View S;  // [B, H, P, N]: f32, or f64 for f64
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

struct Options : recurrent::Options {
  bool dt_softplus = false;  // f is softplus, else the identity
  double dt_min = 0, dt_max = std::numeric_limits<double>::infinity();
};

// Computes o and, if requested, the state after the last token.
//
// Edges. Any number of tokens may be 0: the final state is then the initial one. A positive delta A
// counts as 0 in the decay, unless the Context checks; a NaN propagates to all later tokens.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are
// f64 or f32. No exponential has a positive argument. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides. Splitting a
// call at a multiple of 64 tokens of a sequence gives bitwise equal results; other splits agree up to rounding.
//
// Cost. 4 N P flops per token and head. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if an output overlaps an input, or if lengths, starts, cu_seqlens or the limits
// of dt are out of range; Unsupported for a dtype without a kernel. On throw, nothing
// has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With dy = d_o .* silu(z),
// v = delta x, and dv, dB, dC and dg (for g = delta A) the gradients of the recurrence of simple_gla:
//
//   dx = delta dv + D .* dy,  ddelta = <dv, x> + A dg,  dA = sum_t delta dg
//   dD = sum_t dy .* x,  dz = d_o .* y .* silu'(z)
//   ddt = f'(dt + dt_bias) ddelta, 0 where delta is clamped,  ddt_bias = sum_t ddt
//
// dB and dC are summed over the heads of a group, dA, dD and ddt_bias over sequences too.
// Precision and reproducibility as above. Cost: 12 N P flops per token and head, and with z the forward pass again, to
// recompute y. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token and updates the state in place: x and z are [B, H, P], dt [B, H], B and C [B, G, N].
// Only the options in the equations above have an effect. The state has contiguous rows. Memory-bound by the state;
// allocates nothing after a thread's first step.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// The segment of these tokens as a map of states, see mechanism/structs.h.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64,
// N, P rounded up to whole vectors, and at least 8 threads per head if heads are fewer than threads, at most
//
//   forward   threads E (N P + 64 (3 N + 3 P)) + 2 E B T H + a few KiB
//   backward  threads E (ceil(T / 64) (N P + 256) + 2 N P + 64 (9 N + 3 P)) + a few KiB
//             + E B T H (P [and P more with z] + 3 + N / 32) + [H > G] 2 E B T G N
//
// For bf16 on AMX (recurrence_tiles), with N and P rounded up to 32, forward takes
// threads (4 N P + 576 N + 640 P + 62 KiB), and backward that in addition.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::ssd

#endif  // HEED_OPS_SSM_SSD_SSD_H_

// State space duality, the core of Mamba-2: a matrix of memory per head that forgets by a
// factor per token, read and written through vectors that groups of heads share.
//
//   delta_t = clamp(f(dt_t + dt_bias), dt_min, dt_max)    f: softplus, or nothing
//   S_t = exp(delta_t A) S_{t-1} + delta_t x_t B_t^T      S: [P, N]
//   y_t = scale S_t C_t + D .* x_t,  o_t = y_t .* silu(z_t)
//
// per head h, with B and C of group h / (H / G). scale is 1 by default. Names and shapes
// are those of the package mamba_ssm; the normalisation that follows is the layer's.
//
// Source: Dao, Gu, "Transformers are SSMs", arXiv:2405.21060. Derivation of the
// gradients: README.md.
#ifndef HEED_OPS_SSM_SSD_SSD_H_
#define HEED_OPS_SSM_SSD_SSD_H_

#include <cstdint>
#include <limits>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/ops/mechanism/recurrent.h"

namespace heed::ssd {

using recurrent::Explanation;

// Sizes: B sequences, T tokens, H heads, G groups that divide H, P channels of a head, N
// of the state, P, N >= 1. x, B, C and z have one float dtype, the last axis contiguous,
// other strides as they are; dt has the same, or f32 (f64 for f64); A, D and dt_bias have
// any float dtype and are read in f64.
struct Inputs {
  ConstTensorView x;        // [B, T, H, P]: what is written
  ConstTensorView dt;       // [B, T, H]: steps, before dt_bias and f
  ConstTensorView A;        // [H], < 0: rates of decay
  ConstTensorView B;        // [B, T, G, N]: where it is written
  ConstTensorView C;        // [B, T, G, N]: what is read
  ConstTensorView D;        // [H] or [H, P]: factors of x beside the memory; absent: 0
  ConstTensorView z;        // [B, T, H, P]: the output's gate; absent: o = y
  ConstTensorView dt_bias;  // [H]: added to dt; absent: 0
  ConstTensorView initial;  // [B, H, P, N] f32, or f64 for f64; absent: 0
};

struct Options : recurrent::Options {
  bool dt_softplus = false;  // f is softplus, else nothing
  double dt_min = 0, dt_max = std::numeric_limits<double>::infinity();
};

struct Outputs {
  TensorView o;      // [B, T, H, P] in x's dtype
  TensorView final;  // as `initial`; absent: not asked for
};

struct BackwardInputs : Inputs {
  ConstTensorView d_o;      // the shape and dtype of o
  ConstTensorView d_final;  // absent: zero
};

// Those that are present are computed, in the shapes and dtypes of what they are the
// gradients of; zero for tokens that do not count.
struct Gradients {
  TensorView dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial;
};

// Computes o, and the state after the last token where it is asked for.
//
// Edges. Any number of tokens may be 0: the state then passes through. A positive delta A
// counts as 0 in the decay, unless the Context checks; a NaN spreads to what follows it.
//
// Precision. f64 is computed in f64, all else in f32, and o is rounded once; states are
// f64 or f32. No exponential has a positive argument. Subnormal results are flushed.
//
// Reproducibility. The bits do not depend on threads, batch neighbours, padding or
// strides. A call split at a multiple of 64 tokens of a sequence has the bits of the
// whole; split elsewhere, it agrees to rounding.
//
// Cost. 4 N P flops per token and head. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the
// above, if an output overlaps an input, or if lengths, starts, cu_seqlens or the limits
// of dt are out of range; Unsupported for a dtype that has no kernel. On throw, nothing
// has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does, written for reading: scalar, one thread, all in double. Outputs may
// be f64 whatever the inputs are.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes gradients of a sum over <d_o, o> and <d_final, final>. With dy = d_o .* silu(z),
// v = delta x, dv, dB, dC and dg (of g = delta A) those of the recurrence of simple_gla:
//
//   dx = delta dv + D .* dy,  ddelta = <dv, x> + A dg,  dA = sum_t delta dg
//   dD = sum_t dy .* x,  dz = d_o .* y .* silu'(z)
//   ddt = f'(dt + dt_bias) ddelta, 0 where delta is clamped,  ddt_bias = sum_t ddt
//
// dB and dC are summed over the heads of a group, dA, dD and ddt_bias over sequences too.
// Precision and reproducibility as above. Cost: 12 N P flops per token and head, and with z
// the forward pass again, which y takes. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token, the state read and updated in place: x and z are [B, H, P], dt
// [B, H], B and C [B, G, N]; `initial` is absent. Of the options, what the mathematics
// needs. The state has contiguous rows. Bound by its memory; allocates nothing from a
// thread's second step on.
HEED_API void Step(Context& ctx, const Inputs& in, const Options& options, const TensorView& state,
                   const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all its threads. With E = 4, or 8 for f64,
// and N, P rounded up to whole vectors, at most
//
//   forward   threads E (N P + 64 (3 N + 3 P)) + 2 E B T H + a few KiB
//   backward  threads E (ceil(T / 64) (N P + 256) + 2 N P + 64 (9 N + 3 P)) + a few KiB
//             + E B T H (P [and P more with z] + 3 + N / 32) + [H > G] 2 E B T G N
//
// For bf16 in matrix tiles (recurrence_tiles), with N and P rounded up to 32, forward takes
// threads (4 N P + 576 N + 640 P + 62 KiB), and backward that besides.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// What Forward would do. Pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::ssd

#endif  // HEED_OPS_SSM_SSD_SSD_H_

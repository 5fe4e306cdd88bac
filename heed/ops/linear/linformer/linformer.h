// Linformer: softmax attention over tokens projected to a fixed number R.
//
//   K~ = E K,  V~ = F V                      E, F: [R, C], R rows for any number of tokens
//   s_tr = scale <q_t, K~_r>
//   o_t  = sum_r exp(s_tr - lse_t) V~_r,  lse_t = log sum_r exp(s_tr)
//
// Every token sees all of K~ and V~, including contributions of later tokens: a causal form, a state and a step are not
// defined. The default scale is K^-1/2.
//
// Sizes: B sequences, T tokens, H heads of q and k, HV of v (a multiple of H; head h reads
// key head h / (HV / H)), K and V channels, R projected tokens; K, V and R >= 1. One float dtype for q, k and v, the
// last axis contiguous, any other strides. e and f are in q's dtype, f32 or f64 (f64 only if q is f64), with any
// strides, and are shared by all heads and sequences.
//
// Source: Wang, Li, Khabsa, Fang, Ma, "Linformer: self-attention with linear complexity",
// arXiv:2006.04768. How other libraries differ: README.md.
#ifndef HEED_OPS_LINEAR_LINFORMER_LINFORMER_H_
#define HEED_OPS_LINEAR_LINFORMER_LINFORMER_H_

#include <cstdint>
#include <optional>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::linformer {

template <class View>
struct Tensors {
  View q;  // [B, T, H, K]: queries
  View k;  // [B, T, H, K]: keys
  View v;  // [B, T, HV, V]: values
  View e;  // [R, C], C >= T: projects keys; column t belongs to token t, later columns are unused
  View f;  // [R, C]: projects values in the same way
};

using Structs = mechanism::Structs<Tensors, mechanism::NoStates>;
using Inputs = Structs::Inputs;
using BackwardInputs = Structs::BackwardInputs;
using Outputs = Structs::Outputs;  // o: [B, T, HV, V] in q's dtype
using Gradients = Structs::Gradients;
using mechanism::Explanation;

struct Options {
  std::optional<double> scale;      // factor of the logits, any finite value; default K^-1/2
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]

  // [N + 1]: N packed sequences, B = 1. Each begins at column 0, so C >= the longest of them is enough.
  ConstTensorView cu_seqlens;
};

// Computes o.
//
// Edges. B and T may be 0. A token outside lengths, starts or cu_seqlens contributes neither to K~ nor to V~, even if
// it is NaN, and has o = 0. `starts` does not shift columns: an excluded token counts as zero, not as absent. A NaN in
// k or v propagates to every token of its sequence and head, a NaN in q to its own token.
//
// Precision. K~, V~ and everything after them are f64 for f64, else f32, and o is rounded once. Sums over tokens are
// chains of 128 terms, then a chain of these sums. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, strides, packing or excluded
// tokens after a sequence.
//
// Cost. 4 R (H K + HV V) flops and R H exponentials per token; R = 256 of 65,536 tokens is
// 1/128 of exact attention. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above,
// if an output overlaps an input, or if scale, lengths, starts or cu_seqlens are out of
// range. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. o may be f64 whatever the
// dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o>. With P_tr = exp(s_tr - lse_t):
//
//   dS_tr = P_tr <d_o_t, V~_r - o_t>
//   dq_t  = scale sum_r dS_tr K~_r
//   dK~_r = scale sum_t dS_tr q_t,         dV~_r = sum_t P_tr d_o_t
//   dk    = E^T dK~,  dE = sum dK~ k^T     over sequences and heads, and so for v and F
//
// Gradients are zero for excluded tokens and unused columns. de and df may have any strides, the others have contiguous
// rows. Only q, k, v, e, f and d_o are needed: o and lse are recomputed. Precision and reproducibility as above, except
// that de and df are sums over the batch. Cost: 4 R (2 H K + 2 HV V) + 2 R (3 H K + 2 HV V) flops per token, less where
// gradients are not requested. Only heed.torch has the second derivative. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading. Outputs may be f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that the passes reserve for all threads, partly in `ctx`. Tokens are processed in rounds, short sequences
// together. With E = 4, or 8 for f64, and M = max(4 MiB, E (H K + HV V) max(R, 64)), at most
//
//   forward   2 M + the forward pass of attention of one round
//   backward  6 M + 2 E R (C + 63) + the backward pass of attention of one round
//             + threads E (16384 + 384 (max(K, V) + 15)) + a few KiB
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Its visited pairs are those of a token and a projected token. Data pointers may be
// null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::linformer

#endif  // HEED_OPS_LINEAR_LINFORMER_LINFORMER_H_

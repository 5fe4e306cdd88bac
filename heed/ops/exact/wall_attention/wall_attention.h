// Wall attention: causal softmax attention whose channels decay between key and query, inside the softmax.
//
//   s_ij = scale sum_n q_in k_jn exp(sum_{t=j+1..i} log_decay_tn) + sum_{t=j+1..i} log_forget_t     for j <= i
//   o_i  = sum_{j <= i} P_ij v_j,  P_ij = exp(s_ij - lse_i),  lse_i = log sum_{j <= i} exp(s_ij)
//
// A decayed channel leaves the logit, not the softmax: a key whose channels have all decayed keeps the logit 0. With
// log_decay = 0 it is causal attention, and forgetting attention with log_forget too. The token of the key itself does
// not decay it.
//
// Sizes: B sequences, T tokens, H query heads, Hkv key heads (H a multiple of it; head h reads key head h / (H / Hkv)),
// Hg heads of decays (a multiple of Hkv that divides H, read likewise; Hg = H: decays of each query head), D and Dv
// channels, all but B and T at least 1. q, k and v have one float dtype, log_decay and log_forget that dtype or f32
// (f64 for f64). All have any strides, but the last axis of q, k, v and log_decay is contiguous. lse is f64 for f64,
// else f32. Tokens outside lengths, starts or cu_seqlens have o = 0 and lse = -infinity.
//
// Source: Wall attention by Averbuch and Pai (Tilde Research) in flash-linear-attention, fla/ops/wall_attn, whose sinks
// and windows are not options here; forget gates: Lin, Nikishin, He, Courville, arXiv:2503.02130. Algorithm: README.md.
#ifndef HEED_OPS_EXACT_WALL_ATTENTION_WALL_ATTENTION_H_
#define HEED_OPS_EXACT_WALL_ATTENTION_WALL_ATTENTION_H_

#include <cstdint>
#include <optional>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::wall_attention {

struct Inputs {
  ConstTensorView q;           // [B, T, H, D]: queries
  ConstTensorView k;           // [B, T, Hkv, D]: keys
  ConstTensorView v;           // [B, T, Hkv, Dv]: values
  ConstTensorView log_decay;   // [B, T, Hg, D]: natural logarithms of the channels' decays, <= 0
  ConstTensorView log_forget;  // [B, T, H]: natural logarithms of forget gates, <= 0; absent: 0
};

struct Options {
  std::optional<double> scale;      // factor of the logits, any finite value; default 1 / sqrt(D)
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1
};

struct Outputs {
  TensorView o;    // [B, T, H, Dv]: in the dtype of q
  TensorView lse;  // [B, H, T]: natural logarithms of the softmax's denominators; absent: not computed
};

// Computes o, and lse where it is present.
//
// Edges. B and T may be 0. A log decay of -infinity removes a channel of all earlier keys from later logits; a log
// forget gate of -infinity hides all earlier keys. Positive ones count as they are, unless the Context checks, which
// throws for a positive or NaN one. A NaN in q stays in its row; one in k, v, log_decay or log_forget reaches only its
// own row and later ones of its sequence.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once. No decay is a quotient: decays over up
// to 64 tokens are products or exponentials of sums, and multiply once per 64 tokens. They underflow to 0 as they
// should, and their relative error grows by at most 5 roundings per 64 tokens. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides.
//
// Cost. 2 (D + Dv) flops and one exponential per pair, as causal attention, D more for pairs within a block of 64,
// which are computed key by key, and 2 exponentials per element of log_decay. Memory: 3 D + Dv numbers of the dtype of
// computation for each token and head of decays, for as many heads as 64 MiB hold, at least those of one key head.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if an option is out of
// range, if an output overlaps an input, or if lengths, starts or cu_seqlens are out of range. On throw, nothing has
// been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: pair by pair, each query decaying token by token. Outputs
// may be f64 whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

struct BackwardInputs : Inputs {
  ConstTensorView o, lse;  // outputs of Forward
  ConstTensorView d_o;     // gradient of o, in its shape and dtype
  ConstTensorView d_lse;   // gradient of lse, in its shape and dtype; absent: zeros
};

// Only present tensors are computed, in the shape and dtype of their inputs; they are zero for excluded tokens.
struct Gradients {
  TensorView dq, dk, dv, dlog_decay, dlog_forget;
};

// Computes the gradients of sum <d_o, o> + <d_lse, lse>. With W_ijn = exp(sum_{t=j+1..i} log_decay_tn):
//
//   dS_ij  = P_ij (<d_o_i, v_j> - <d_o_i, o_i> + d_lse_i)
//   dq_in  = scale sum_{j <= i} dS_ij k_jn W_ijn,  dk_jn = scale sum_{i >= j} dS_ij q_in W_ijn
//   dv_j   = sum_{i >= j} P_ij d_o_i
//   dlog_decay_tn = scale sum_{i >= t > j} dS_ij q_in k_jn W_ijn,  dlog_forget_t = sum_{i >= t > j} dS_ij
//
// with dk, dv and dlog_decay summed over the query heads that share them. The first token's gates are between no pair
// and have gradients of 0, as have gates of -infinity. dlog_decay is a sum over the pairs that a token is between,
// never a difference of <q, dq> and <k, dk>, which would cancel. P is recomputed from lse. Only heed.torch has the
// second derivative. Precision and reproducibility as above. Cost: 6 D + 4 Dv flops per pair. Memory: 8 D + 3 Dv
// numbers for each token and head of decays, for as many heads as 64 MiB hold, and 2 per element of a head of q for
// each thread. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading, from all inputs but o and lse. Outputs may be f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that the passes reserve in `ctx`, for all threads together. BackwardWorkspace is that of all gradients.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

using mechanism::Explanation;  // visited_pairs are those of whole blocks of 64 tokens

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

// Decoding. Keys that have decayed by all tokens so far are keys of plain attention for the newest token's query.
struct KeyInputs {
  ConstTensorView log_decay;  // [B, N, Hg, D]: of the newest N tokens
};

// Updates keys [B, Tk, Hg, D], of which the last N are those of the tokens in `in`, N <= Tk, in place:
//
//   k_jn *= exp(sum_{t = m .. Tk-1} log_decay_tn),  m = max(j + 1, Tk - N)
//
// With N = Tk these are the keys of a whole sequence for the tokens after it; with N = 1, those of one more token. Then
// o of the newest token is attention::Forward on its query, these keys, the values so far and, with forget gates, their
// logarithms as log_decay under a causal mask. Keys have the heads of the decays: where these are more than key heads,
// keys, and values for attention, are repeated. keys has the dtype of log_decay, or f32 (f64 for f64) so that rounding
// does not add up from token to token. Any strides, but the last axes are contiguous. Reproducibility and errors as
// above; sums are f64. Cost: one exponential for each element of log_decay and one product for each element of keys.
HEED_API void TransformKeys(Context& ctx, const KeyInputs& in, const TensorView& keys);

// Computes what TransformKeys does in double, written for reading.
HEED_API void TransformKeysReference(const KeyInputs& in, const TensorView& keys);

}  // namespace heed::wall_attention

#endif  // HEED_OPS_EXACT_WALL_ATTENTION_WALL_ATTENTION_H_

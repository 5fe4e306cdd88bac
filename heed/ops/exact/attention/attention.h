// Exact softmax attention: MHA, MQA, GQA, cross, masked, biased, packed.
//
//   s_ij = f(scale * <q_i, k_j>) + alibi_ij + r_ij + F_ij + bias_ij   if keep_ij, else -inf
//   P_ij = exp(s_ij - lse_i),  lse_i = log sum_j exp(s_ij)
//   o_i  = w_i * sum_j P_ij Z_ij / (1 - dropout) v_j
//
// with f(s) = softcap * tanh(s / softcap) or the identity, alibi_ij =
// -slope_h |p_i - j|, r_ij = relative_bias[h, p_i - j] where 0 <= p_i - j < span and else 0, F_ij the sum of
// log_decay_s over the valid keys j < s <= p_i, Z the dropout keep bits and w_i = 1, or with a learned sink
// sigmoid(lse_i - sink_h): one more logit in the denominator, without a value. The scale may be applied to q before the
// product: where scale * q overflows f32 (f64 for f64), logits are infinite or NaN.
//
// Query i of a sequence has position p_i = start + i, where start is Tk - Tq
// (bottom right), 0 (top left) or given. With s = key_starts, n = key_lengths:
//
//   keep = s <= j < n
//      and segments_q[i] = segments_k[j] >= 0
//      and mask[i, j]
//      and (p_i, j) in pattern
//      and (not causal or j <= p_i or j - s < prefix)
//      and (no window or p_i - left <= j <= p_i + right or j - s < sink_tokens)
//      and (no chunk or floor((j - s) / chunk) = floor((p_i - s) / chunk))
//
// Source: Dao, Fu, Ermon, Rudra, Re, "FlashAttention", arXiv:2205.14135;
// Milakov, Gimelshein, "Online normalizer calculation for softmax",
// arXiv:1805.02867; Lin, Nikishin, He, Courville, "Forgetting Transformer",
// arXiv:2503.02130. Derivation, order of summation and error: README.md.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/patterns/pattern.h"

namespace heed::attention {

// Sizes: B sequences, Tq queries, Tk keys, Hq query heads, Hkv key and value
// heads (Hq a multiple of it; head h reads key head h / (Hq / Hkv)), D, Dv >= 1.
// One dtype for all three: f64, f32, bf16 or f16. The last axis is contiguous; the others have any strides, including
// zero. Packed sequences drop B: [Tq_total, Hq, D], or have B = 1.
struct Inputs {
  ConstTensorView q;  // [B, Tq, Hq, D]: queries
  ConstTensorView k;  // [B, Tk, Hkv, D]: keys
  ConstTensorView v;  // [B, Tk, Hkv, Dv]: values
};

enum class Align { kBottomRight, kTopLeft };

// Keys besides a query's own position; -1 is unlimited.
struct Window {
  int64_t left = -1;
  int64_t right = -1;
};

enum class Precision { kHighest, kHigh };

// Tensors are absent by default. Integer tensors are i32 or i64, float tensors any float dtype.
struct Options {
  std::optional<double> scale;  // factor of the logits, any finite value; default 1 / sqrt(D)

  bool causal = false;                // a query sees no key after its position
  Align align = Align::kBottomRight;  // position of query 0: Tk - Tq, or 0
  ConstTensorView query_starts;       // [B] i64: position of query 0, before `align`
  Window window;                      // keys that a query sees before and after its position
  int64_t sink_tokens = 0;            // first keys, which stay visible outside `window`
  ConstTensorView prefix;             // [B]: first keys, which stay visible under `causal`
  int64_t chunk = 0;                  // tokens per chunk; a query sees its own chunk only; 0 is no chunks

  // [B, Tq], [B, Tk]: both or neither; ids below 2^31; a negative id sees no key and is seen by no query
  ConstTensorView segments_q, segments_k;
  ConstTensorView key_lengths;    // [B]: keys at or beyond it are not seen
  ConstTensorView key_starts;     // [B]: keys before it are not seen
  ConstTensorView query_lengths;  // [B]: rows at or beyond it see no key
  ConstTensorView mask;           // bool, broadcastable to [B, Hq, Tq, Tk], true = keep

  Pattern pattern;  // pairs that are computed; keys outside it are never read

  ConstTensorView bias;           // float, broadcastable to [B, Hq, Tq, Tk]: added to the logits
  ConstTensorView alibi;          // [Hq] or [B, Hq]: slopes of a penalty on the distance; on the CPU, or on q's device
  ConstTensorView relative_bias;  // float [Hq, span], span >= 1: added to the logits by distance p_i - j; on the CPU
  // [B, Tk, Hq], packed [Tk_total, Hq]: <= 0, log decay at a token of all keys before it; needs causal
  ConstTensorView log_decay;
  double softcap = 0;     // soft cap of the logits, > 0, or 0 for none
  ConstTensorView sinks;  // [Hq]: extra logits of the softmax without a value; on the CPU, or on q's device

  double dropout = 0;           // probability of dropping a pair, in [0, 1)
  uint64_t seed = 0;            // seed of the dropout mask
  uint32_t dropout_offset = 0;  // offset of the dropout counter, for further masks of one seed

  // [B + 1]: offsets of packed sequences, from 0 to all tokens; cu_seqlens_k defaults to cu_seqlens_q
  ConstTensorView cu_seqlens_q, cu_seqlens_k;

  // for f32 on AMX: kHigh takes three products of a bf16 split (3xBF16) instead of six, with a relative error of 1e-5.
  // Elsewhere both are the same, and Explain says so.
  Precision precision = Precision::kHighest;
  bool invariant = false;  // bitwise equal results for every split of the queries into calls, by the kernels that
                           // caches use
};

// lse is optional: the log-sum-exp over the keys alone (sinks not included),
// natural logarithm, -inf where a row sees no key.
struct Outputs {
  TensorView o;    // [B, Tq, Hq, Dv] in q's dtype; packed as q is
  TensorView lse;  // [B, Hq, Tq], packed [Hq, Tq_total]; f64 for f64, else f32
};

// Computes o, and lse where it is present.
//
// Edges. Any size may be 0. A row that sees no key has o = 0 and lse = -inf, and so has a row at or beyond
// query_lengths, or beyond the last packed sequence. A key that a row does not see cannot influence it, even if it is
// NaN or infinite. A row that sees a NaN is NaN. A bias of -inf masks; finfo.min does not.
//
// Precision. f64 accumulates in f64, other dtypes in f32, and o is rounded once. For bf16, P is rounded to bf16 too
// where the CPU's bf16 dot product is faster than its FMA (Explain says so). Subnormal results are flushed to zero.
// Error bounds: README.md.
//
// Reproducibility. The bits of a row depend on its own logits and values alone: not on threads, other batch entries
// (except with dropout), padding, packing, strides, or the split of queries into calls.
//
// Cost. 2 (D + Dv) flops and one exponential per computed pair; tiles without a kept pair are skipped. Memory beyond
// the arguments: Workspace(), and for relative_bias a copy of its part that pairs can reach. Pairs outside of its span
// cost nothing. log_decay adds one addition per pair and 8.5 bytes per key and query head.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if an output overlaps
// an input or itself, or if an option is out of range; Unsupported for a dtype or device without a kernel and, by a
// strict Context, where a mask or bias is read one element at a time: its key axis is not contiguous, or exactly one of
// the bias and q is f64. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. `out` may have dtype f64
// whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Bytes of scratch that Forward reserves in `ctx`, for all threads together.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);

// The inputs and outputs of Forward, and the gradients of the outputs.
struct BackwardInputs {
  ConstTensorView q, k, v;  // as for Forward
  ConstTensorView o, lse;   // outputs of Forward
  ConstTensorView d_o;      // gradient of o, in its shape and dtype
  ConstTensorView d_lse;    // gradient of lse; zero if absent
};

// Only present tensors are computed. Each has the shape and dtype of its input, with a contiguous last axis.
struct Gradients {
  TensorView dq, dk, dv;
  TensorView dbias;   // summed over the broadcast axes of the bias
  TensorView dsinks;  // on the device of sinks
  TensorView dalibi;  // on the device of alibi
  TensorView drelative_bias;
  TensorView dlog_decay;
};

// Computes the gradients of sum <d_o, o> + <d_lse, lse>. With w_i as above, g_i = w_i / (1 - dropout) and f' the
// derivative of the soft cap at the logit:
//
//   delta_i = w_i <d_o_i, o_i> - d_lse_i
//   dS_ij   = P_ij (g_i Z_ij <d_o_i, v_j> - delta_i)
//   dv_j    = sum_i g_i Z_ij P_ij d_o_i
//   dq_i    = scale sum_j dS_ij f'_ij k_j,  dk_j = scale sum_i dS_ij f'_ij q_i
//   dbias   = sum dS_ij,  dalibi_h = -sum_ij dS_ij |p_i - j|
//   drelative_bias_hd = sum dS_ij over p_i - j = d
//   dlog_decay_s = sum dS_ij over j < s <= p_i
//   dsinks_h = -sum_i (1 - w_i) <d_o_i, o_i>
//
// with dk and dv summed over the query heads of a key head. P is recomputed from q,
// k and lse, dropout from its seed.
//
// Edges. Rows that see no key and keys that no row sees have gradients of exactly 0, and so have those outside lengths
// and packed sequences. A NaN or an infinity in q, k, v or d_o reaches only gradients of rows and keys that see it.
// Only heed.torch has second derivatives.
//
// Precision. Sums are in f64 for f64, else in f32, and rounded once.
//
// Reproducibility. Results do not depend on the number of threads; dq, dk and dv also do not depend on other batch
// entries (except with dropout), padding, packing and strides; but where rows are padded on the left by other numbers
// of rows than multiples of 64, dk and dv are summed in another order.
//
// Cost. 2 (3 D + 2 Dv) flops and one exponential per computed pair; products that no requested gradient needs are
// skipped. Memory beyond the arguments: BackwardWorkspace().
//
// Throws as Forward does. On throw, nothing has been written.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading, from q, k, v, d_o and d_lse only. Outputs may have dtype f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that Backward reserves in `ctx`. With E = 4, or 8 for f64, rows = B Hq Tq, D and Dv rounded up to whole
// vectors, and [x] 1 if x holds and else 0, at most
//
//   threads E (512 (D + Dv) + 64 (3 D + 2 Dv + 64 (3 + [softcap])))
//   + E rows (3 + [dq of 16 bits] D + [dbias by rows] + [dalibi]) + rows (4 + 8 [dsinks])
//   + [dbias not in the accumulation dtype] E size of dbias
//   + [relative_bias] threads E (Hq / Hkv) (span + 48) + [drelative_bias] 128 Hq span
//   + [log_decay] (8.5 K + [dlog_decay] ((E + .5) K + 32 rows)) + a few KiB
//
// with K = Hq times the keys of all sequences, rounded up to 64 per sequence. On AMX (softmax_tiles), with D and Dv
// rounded up to 32, the first line is
//
//   threads (5312 D + 3520 Dv + 8192 (56 + [softcap]))
HEED_API int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in, const Options& options,
                                   const Gradients& out);

struct Explanation {
  std::string kernel;  // name of the kernel that would run
  std::string target;  // SIMD target
  std::string why;     // reason for the choice of kernel
  double flops;        // 2 (D + Dv) per kept pair
  double bytes;        // inputs read once, outputs written once
  int64_t workspace_bytes;
  double visited_pairs;  // (query, key) pairs that the kernel computes
  bool invariant;        // results do not depend on the split of queries into calls
};

// Describes what Forward would do. Data pointers may be null where only shapes are known; a mask or segments without
// data then count as all kept.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

// One partial result, computed without sinks: o [B, Tq, Hq, Dv], lse
// [B, Hq, Tq].
struct Part {
  ConstTensorView o;
  ConstTensorView lse;
};

// Merges attention over disjoint key sets into attention over their union:
//
//   M = max_s lse_s,  w_s = exp(lse_s - M),  o = sum w_s o_s / sum w_s,
//   lse = M + log sum w_s
//
// Parts without a key (lse = -inf) change nothing; an empty list of parts is an error.
// `sinks` [Hq], optional, are applied here once. `out` may have the dtype of any
// float; sums are in f64 and rounded once. Throws InvalidArgument as Forward.
HEED_API void Merge(Context& ctx, std::span<const Part> parts, const ConstTensorView& sinks, const Outputs& out);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_H_

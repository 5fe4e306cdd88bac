// Exact softmax attention: MHA, MQA, GQA, cross, masked, biased, packed.
//
//   s_ij = f(scale * <q_i, k_j>) + alibi_ij + F_ij + bias_ij   if keep_ij, else -inf
//   P_ij = exp(s_ij - lse_i),  lse_i = log sum_j exp(s_ij)
//   o_i  = w_i * sum_j P_ij Z_ij / (1 - dropout) v_j
//
// with f(s) = softcap * tanh(s / softcap) or the identity, alibi_ij =
// -slope_h |p_i - j|, F_ij the sum of log_decay_s over the valid keys j < s <= p_i,
// Z the dropout keep bits and w_i = 1, or with a learned sink
// sigmoid(lse_i - sink_h): one more logit in the denominator, no value. The
// scale may meet q before k does: where their product is beyond the largest f32
// (f64 of f64), logits are infinite or NaN.
//
// Query i of a sequence stands at p_i = start + i, where start is Tk - Tq
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
#include "heed/ops/sparse/common/pattern.h"

namespace heed::attention {

// Sizes: B sequences, Tq queries, Tk keys, Hq query heads, Hkv key and value
// heads (Hq a multiple of it; head h reads key head h / (Hq / Hkv)), D, Dv >= 1.
// One dtype for all three: f64, f32, bf16 or f16. The last axis is contiguous; the others
// have any strides, zero included. Packed sequences drop B: [Tq_total, Hq, D],
// or have B = 1.
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

// Everything that can be left out is absent by default. Integer tensors are i32
// or i64, float tensors any float dtype.
struct Options {
  std::optional<double> scale;  // factor of the logits, any finite value; default 1 / sqrt(D)

  bool causal = false;                // a query sees no key after its position
  Align align = Align::kBottomRight;  // where query 0 stands: at Tk - Tq, or at 0
  ConstTensorView query_starts;       // [B] i64: position of query 0, before `align`
  Window window;                      // keys that a query sees before and after its position
  int64_t sink_tokens = 0;            // first keys that stay visible under `window`
  ConstTensorView prefix;             // [B]: first keys that stay visible under `causal`
  int64_t chunk = 0;                  // tokens of a chunk, of which a query sees its own; 0 is none

  // [B, Tq], [B, Tk]: both or neither; ids below 2^31, negative ones see nothing
  ConstTensorView segments_q, segments_k;
  ConstTensorView key_lengths;    // [B]: keys at or beyond it are not seen
  ConstTensorView key_starts;     // [B]: keys before it are not seen
  ConstTensorView query_lengths;  // [B]: rows at or beyond it see nothing
  ConstTensorView mask;           // bool, broadcastable to [B, Hq, Tq, Tk], true = keep

  Pattern pattern;  // which keys a row looks at besides; what nobody looks at is never read

  ConstTensorView bias;   // float, broadcastable to [B, Hq, Tq, Tk]: added to the logits
  ConstTensorView alibi;  // [Hq] or [B, Hq]: slopes of a penalty on the distance; on the CPU, or on q's device
  // [B, Tk, Hq], packed [Tk_total, Hq]: <= 0, what a step forgets of all keys before it;
  // needs causal
  ConstTensorView log_decay;
  double softcap = 0;     // bound of the logits, > 0, or 0 for none
  ConstTensorView sinks;  // [Hq]: logits that take weight and have no value; on the CPU, or on q's device

  double dropout = 0;           // probability of dropping a pair, in [0, 1)
  uint64_t seed = 0;            // of the pairs that are dropped
  uint32_t dropout_offset = 0;  // of the counter that draws them, for other draws of one seed

  // [B + 1]: where packed sequences begin, from 0 to all tokens; those of keys are by default
  // those of queries
  ConstTensorView cu_seqlens_q, cu_seqlens_k;

  // of f32 where matrix tiles are: kHigh takes three products of bf16 pieces instead of six,
  // with a relative error of 1e-5. Elsewhere both are one, and Explain says so.
  Precision precision = Precision::kHighest;
  bool invariant = false;  // the path of caches, one for every way to split the queries
};

// lse is optional: the log-sum-exp over the keys alone (sinks not included),
// natural logarithm, -inf where a row sees no key.
struct Outputs {
  TensorView o;    // [B, Tq, Hq, Dv] in q's dtype; packed as q is
  TensorView lse;  // [B, Hq, Tq], packed [Hq, Tq_total]; f64 for f64, else f32
};

// Computes o, and lse where it is present.
//
// Edges. Any size may be 0. A row that sees no key has o = 0 and lse = -inf, and
// so has a row at or beyond query_lengths, or beyond the last packed sequence. A
// key that a row does not see cannot influence it, NaN and infinities included.
// A NaN that a row sees makes it NaN. A bias of -inf masks; finfo.min does not.
//
// Precision. f64 accumulates in f64, all else in f32, and o is rounded once. Of
// bf16, the weights are rounded too where the CPU's bf16 dot product outruns its
// FMA (Explain says so). Subnormal results are flushed to zero. Error bounds:
// README.md.
//
// Reproducibility. The bits of a row depend on its own logits and values alone:
// not on threads, batch neighbours (dropout aside), padding, packing, strides,
// or on how queries are split into calls.
//
// Cost. 2 (D + Dv) flops and one exponential per visited pair; tiles in which no
// pair is kept are not visited. Memory beyond the arguments: Workspace(). With log_decay
// one addition per pair, and 8.5 bytes per key and query head.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if an output overlaps
// an input or itself, or if an option is out of range; Unsupported for a dtype or device that has no kernel and, by a
// strict Context, where pairs are read one by one: the keys of a mask or bias are not contiguous, or the bias is f64
// and q is not, or q alone is. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does, written for reading: scalar, one thread, all in double.
// `out` may have dtype f64 whatever the inputs have.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Bytes of scratch that Forward reserves in `ctx`, for all its threads.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);

// What Forward was given, what it returned, and the gradients that arrive at that.
struct BackwardInputs {
  ConstTensorView q, k, v;  // as Forward's
  ConstTensorView o, lse;   // what Forward returned for them
  ConstTensorView d_o;      // the shape and dtype of o
  ConstTensorView d_lse;    // of lse; may be absent, which is zero
};

// Those that are present are computed, in the shape and dtype of what they are the
// gradients of, their last axis contiguous.
struct Gradients {
  TensorView dq, dk, dv;
  TensorView dbias;   // summed over the axes that the bias repeats
  TensorView dsinks;  // on a device where sinks are
  TensorView dalibi;  // likewise
  TensorView dlog_decay;
};

// Computes gradients of a sum over <d_o, o> and <d_lse, lse>. With w_i as above,
// g_i = w_i / (1 - dropout) and f' the slope of the soft cap at the logit:
//
//   delta_i = w_i <d_o_i, o_i> - d_lse_i
//   dS_ij   = P_ij (g_i Z_ij <d_o_i, v_j> - delta_i)
//   dv_j    = sum_i g_i Z_ij P_ij d_o_i
//   dq_i    = scale sum_j dS_ij f'_ij k_j,  dk_j = scale sum_i dS_ij f'_ij q_i
//   dbias   = sum dS_ij,  dalibi_h = -sum_ij dS_ij |p_i - j|
//   dlog_decay_s = sum dS_ij over j < s <= p_i
//   dsinks_h = -sum_i (1 - w_i) <d_o_i, o_i>
//
// with dk and dv summed over the query heads of a key head. P is recomputed from q,
// k and lse, dropout from its seed.
//
// Edges. Rows and keys that see nothing have gradients of exactly 0, and so have
// those outside of lengths and packed sequences. A NaN or an infinity in q, k, v or
// d_o reaches the gradients of rows and keys that it is seen by, and no others. There
// is no second derivative.
//
// Precision. Sums are in f64 for f64, else in f32, and rounded once.
//
// Reproducibility. The same bits whatever the threads; for dq, dk and dv whatever
// the batch neighbours (dropout aside), padding, packing and strides too.
//
// Cost. 2 (3 D + 2 Dv) flops and one exponential per visited pair; products that no
// gradient asked for needs are left out. Memory beyond the arguments:
// BackwardWorkspace().
//
// Throws as Forward does; on throw, nothing has been written.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading, from q, k, v, d_o and d_lse alone. Outputs
// may have dtype f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that Backward reserves in `ctx`. With E = 4, or 8 for f64, rows = B Hq Tq and
// depths rounded up to whole vectors, at most
//
//   threads E (512 (D + Dv) + 64 (3 D + 2 Dv + 64 (3 + [softcap])))
//   + E rows (3 + [dq of 16 bits] D + [dbias by rows] + [dalibi]) + rows (4 + 8 [dsinks])
//   + [dbias of another type than sums are in] E size of dbias
//   + [log_decay] (8.5 K + [dlog_decay] ((E + .5) K + 32 rows)) + a few KiB
//
// with K = Hq times the keys of all sequences, of each rounded up to 64.
// In matrix tiles (softmax_tiles), with depths rounded up to 32, the first line is
//
//   threads (5312 D + 3520 Dv + 8192 (56 + [softcap]))
HEED_API int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in, const Options& options,
                                   const Gradients& out);

struct Explanation {
  std::string kernel;  // name of the kernel that would run
  std::string target;  // SIMD target
  std::string why;     // why this kernel
  double flops;        // 2 (D + Dv) per kept pair
  double bytes;        // inputs read once, outputs written once
  int64_t workspace_bytes;
  double visited_pairs;  // (query, key) pairs that the kernel computes
  bool invariant;        // the bits do not depend on how queries are split
};

// What Forward would do. The inputs' pointers may be null where only shapes are
// known; then a mask or segments without data count as all kept.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

// One partial result, computed without sinks: o [B, Tq, Hq, Dv], lse
// [B, Hq, Tq].
struct Part {
  ConstTensorView o;
  ConstTensorView lse;
};

// The attention over the union of disjoint key sets, from that over each:
//
//   M = max_s lse_s,  w_s = exp(lse_s - M),  o = sum w_s o_s / sum w_s,
//   lse = M + log sum w_s
//
// Parts without a key (lse = -inf) change nothing; no part at all is an error.
// `sinks` [Hq], optional, are applied here once. `out` may have the dtype of any
// float; sums are in f64 and rounded once. Throws InvalidArgument as Forward.
HEED_API void Merge(Context& ctx, std::span<const Part> parts, const ConstTensorView& sinks, const Outputs& out);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_H_

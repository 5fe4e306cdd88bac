// Exact softmax attention: MHA, MQA, GQA, cross, masked, biased, packed.
//
//   s_ij = f(scale * <q_i, k_j>) + alibi_ij + bias_ij   if keep_ij, else -inf
//   P_ij = exp(s_ij - lse_i),  lse_i = log sum_j exp(s_ij)
//   o_i  = w_i * sum_j P_ij Z_ij / (1 - dropout) v_j
//
// with f(s) = softcap * tanh(s / softcap) or the identity, alibi_ij =
// -slope_h |p_i - j|, Z the dropout keep bits and w_i = 1, or with a learned
// sink sigmoid(lse_i - sink_h): one more logit in the denominator, no value.
//
// Query i of a sequence stands at p_i = start + i, where start is Tk - Tq
// (bottom right), 0 (top left) or given. With s = key_starts, n = key_lengths:
//
//   keep = s <= j < n
//      and segments_q[i] = segments_k[j] >= 0
//      and mask[i, j]
//      and (not causal or j <= p_i or j - s < prefix)
//      and (no window or p_i - left <= j <= p_i + right or j - s < sink_tokens)
//      and (no chunk or floor((j - s) / chunk) = floor((p_i - s) / chunk))
//
// Source: Dao, Fu, Ermon, Rudra, Re, "FlashAttention", arXiv:2205.14135;
// Milakov, Gimelshein, "Online normalizer calculation for softmax",
// arXiv:1805.02867. Derivation, order of summation and error: README.md.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"

namespace heed::attention {

// Sizes: B sequences, Tq queries, Tk keys, Hq query heads, Hkv key and value
// heads (Hq a multiple of it; head h reads key head h / (Hq / Hkv)), D, Dv >= 1.
// One dtype for all three: f64, f32, bf16 or f16. The last axis is contiguous; the others
// have any strides, zero included. Packed sequences drop B: [Tq_total, Hq, D],
// or have B = 1.
struct Inputs {
  ConstTensorView q;  // [B, Tq, Hq, D]
  ConstTensorView k;  // [B, Tk, Hkv, D]
  ConstTensorView v;  // [B, Tk, Hkv, Dv]
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
  std::optional<double> scale;  // any finite value; default 1 / sqrt(D)

  bool causal = false;
  Align align = Align::kBottomRight;
  ConstTensorView query_starts;  // [B] i64: position of query 0, before `align`
  Window window;
  int64_t sink_tokens = 0;  // first keys that stay visible under `window`
  ConstTensorView prefix;   // [B]: first keys that stay visible under `causal`
  int64_t chunk = 0;        // tokens; 0 is none
  // [B, Tq], [B, Tk]: both or neither; ids below 2^31, negative ones see nothing
  ConstTensorView segments_q, segments_k;
  ConstTensorView key_lengths, key_starts, query_lengths;  // [B]
  ConstTensorView mask;  // bool, broadcastable to [B, Hq, Tq, Tk], true = keep

  ConstTensorView bias;   // float, broadcastable to [B, Hq, Tq, Tk]
  ConstTensorView alibi;  // slopes, [Hq] or [B, Hq]
  double softcap = 0;     // > 0, or 0 for none
  ConstTensorView sinks;  // [Hq]

  double dropout = 0;  // probability of dropping a pair, in [0, 1)
  uint64_t seed = 0;
  uint32_t dropout_offset = 0;

  ConstTensorView cu_seqlens_q, cu_seqlens_k;  // [B + 1] packed; k defaults to q

  Precision precision = Precision::kHighest;  // kHigh may use matrix tiles
  bool invariant = false;  // one path for every way to split the queries
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
// pair is kept are not visited. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees
// with the above, if an output overlaps an input or itself, or if an option is
// out of range; Unsupported for a dtype or device that has no kernel. On throw,
// nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options,
                      const Outputs& out);

// The same function, written for reading: scalar, one thread, all in double.
// `out` may have dtype f64 whatever the inputs have.
HEED_API void Reference(const Inputs& in, const Options& options,
                        const Outputs& out);

// Bytes of scratch that Forward reserves in `ctx`, for all its threads.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in,
                           const Options& options);

struct Explanation {
  std::string kernel;   // name of the kernel that would run
  std::string target;   // SIMD target
  std::string why;      // why this kernel
  double flops;         // 2 (D + Dv) per kept pair
  double bytes;         // inputs read once, outputs written once
  int64_t workspace_bytes;
  double visited_pairs;  // (query, key) pairs that the kernel computes
  bool invariant;        // the bits do not depend on how queries are split
};

// What Forward would do. The inputs' pointers may be null where only shapes are
// known; then a mask or segments without data count as all kept.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in,
                             const Options& options);

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
HEED_API void Merge(Context& ctx, std::span<const Part> parts,
                    const ConstTensorView& sinks, const Outputs& out);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_H_

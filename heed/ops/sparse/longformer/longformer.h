// Longformer: a window for all tokens, and some that see and are seen by all, with projections of their own.
//
//   o_i = attention of q_i over {k_j, v_j : |i - j| <= window / 2, or j in tokens}    i not in tokens
//   o_i = attention of qg_i over {kg_j, vg_j : all j}                                 i in tokens
//
// Attention is softmax attention, each row one softmax. A token's keys have two faces: other rows see it as k and v,
// the rows of tokens see everything as kg and vg. Without qg, kg and vg all rows have q, k and v: attention with the
// pattern longformer(window, tokens), bit for bit.
//
// Source: Beltagy, Peters, Cohan, "Longformer: the long-document transformer", arXiv:2004.05150. How other libraries
// differ: README.md.
#ifndef HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_H_
#define HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_H_

#include <cstdint>
#include <optional>
#include <string>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::longformer {

// Sizes: B sequences, T tokens, Hq query heads, Hkv key and value heads (Hq a multiple of it; head h reads key head
// h / (Hq / Hkv)), D, Dv >= 1. One dtype for all: f64, f32, bf16 or f16. The last axis is contiguous; the others have
// any strides, zero included. Packed sequences drop B: [T_total, Hq, D], or have B = 1. Of qg, kg and vg there are all
// or none.
struct Inputs {
  ConstTensorView q;   // [B, T, Hq, D]: queries of rows that are no tokens, or of all
  ConstTensorView k;   // [B, T, Hkv, D]: keys that these see
  ConstTensorView v;   // [B, T, Hkv, Dv]: values that these see
  ConstTensorView qg;  // [B, T, Hq, D]: queries of tokens; other rows are not read
  ConstTensorView kg;  // [B, T, Hkv, D]: keys that tokens see
  ConstTensorView vg;  // [B, T, Hkv, Dv]: values that tokens see
};

// Everything but window and tokens can be left out. Integer tensors are i32 or i64.
struct Options {
  int64_t window = 0;      // a row sees floor(window / 2) keys before and as many behind itself
  ConstTensorView tokens;  // [n], or [B, n] or [1, n] by sequence: global tokens in any order, from 0 in each
                           // sequence; -1 and those beyond it are absent

  std::optional<double> scale;  // factor of the logits, any finite value; default 1 / sqrt(D)

  ConstTensorView key_lengths;    // [B]: keys at or beyond it are not seen
  ConstTensorView key_starts;     // [B]: keys before it are not seen
  ConstTensorView query_lengths;  // [B]: rows at or beyond it see nothing
  double softcap = 0;             // bound of the logits, > 0, or 0 for none

  double dropout = 0;           // probability of dropping a pair, in [0, 1)
  uint64_t seed = 0;            // of the pairs that are dropped
  uint32_t dropout_offset = 0;  // of the counter that draws them, for other draws of one seed

  // [B + 1]: where packed sequences begin, from 0 to all tokens
  ConstTensorView cu_seqlens_q;

  // of f32 where matrix tiles are: the high one takes three products of bf16 pieces, the highest six. Three have a
  // relative error of 1e-5. Elsewhere both are one.
  attention::Precision precision = attention::Precision::kHighest;
  bool invariant = false;  // the path of caches, one for every way to split the queries
};

// lse is optional: the log-sum-exp of each row, natural logarithm, -inf where it sees no key.
struct Outputs {
  TensorView o;    // [B, T, Hq, Dv] in q's dtype; packed as q is
  TensorView lse;  // [B, Hq, T], packed [Hq, T_total]; f64 for f64, else f32
};

// Computes o, and lse where it is present.
//
// Edges. Any size may be 0, and there may be no tokens. A row that sees no key has o = 0 and lse = -inf, and so has a
// row at or beyond query_lengths. What nobody reads cannot influence anything, NaN included: with qg that is q of
// tokens and qg of all others. A token among padded keys is a row that sees all valid ones, and a key that nobody sees.
//
// Dropout draws as attention does, but with qg the i-th token that a sequence has, ascending, stands at 2^31 + i.
//
// Precision and reproducibility are those of attention, pass by pass: tokens are gathered, so that their bits
// do not depend on where they stand.
//
// Cost. 2 (D + Dv) flops and one exponential per visited pair, of which there are about T (window + 1) + 2 n T per head
// for n tokens. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if only some of qg, kg and
// vg are there, if an output overlaps an input or itself, or if an option is out of range; Unsupported for a dtype or
// device that has no kernel. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does, written for reading: scalar, one thread, all in double. `out` may have dtype f64
// whatever the inputs have.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Bytes that Forward takes for all threads, part of them in `ctx`: those of attention, and of the gathered rows
// of tokens their q, o and lse.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);

// What Forward was given, what it returned, and the gradients that arrive at that.
struct BackwardInputs : Inputs {
  ConstTensorView o, lse;  // what Forward returned for them
  ConstTensorView d_o;     // the shape and dtype of o
  ConstTensorView d_lse;   // of lse; may be absent, which is zero
};

// Those that are present are computed, in the shape and dtype of what they are the gradients of, their last axis
// contiguous.
struct Gradients {
  TensorView dq, dk, dv, dqg, dkg, dvg;
};

// Computes gradients of a sum over <d_o, o> and <d_lse, lse>: those of two calls of attention, rows of tokens and
// others, that have no tensor in common where qg is given. So dq is then exactly 0 for tokens and dqg for all others,
// and dk and dv say nothing of what tokens saw. Without qg they are the gradients of attention with the pattern.
//
// Edges, precision, reproducibility and cost are those of attention. Memory beyond the arguments: BackwardWorkspace().
// There is no second derivative. Throws as Forward does; on throw, nothing has been written.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading, from the inputs, d_o and d_lse alone. Outputs may have dtype f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that Backward takes: those of attention, and the gathered rows of tokens of q, o, lse and their gradients.
HEED_API int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in, const Options& options,
                                   const Gradients& out);

using attention::Explanation;  // its visited_pairs count both problems

// What Forward would do. The inputs' pointers may be null where only shapes are known, but not that of tokens.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::longformer

#endif  // HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_H_

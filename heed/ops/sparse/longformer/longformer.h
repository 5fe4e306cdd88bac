// Longformer: a window for all tokens, and global tokens, which see and are seen by all, with separate projections.
//
//   o_i = attention of q_i over {k_j, v_j : |i - j| <= window / 2, or j in tokens}    i not in tokens
//   o_i = attention of qg_i over {kg_j, vg_j : all j}                                 i in tokens
//
// Each row is one softmax. Rows of global tokens see kg and vg of all tokens; other rows see k and v. Without qg, kg
// and vg all rows use q, k and v, bitwise equal to attention with the pattern longformer(window, tokens).
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
// any strides, including zero. Packed sequences drop B: [T_total, Hq, D], or have B = 1. qg, kg and vg are all present
// or all absent.
struct Inputs {
  ConstTensorView q;   // [B, T, Hq, D]: queries of rows that are not global tokens, or of all rows without qg
  ConstTensorView k;   // [B, T, Hkv, D]: keys that these rows see
  ConstTensorView v;   // [B, T, Hkv, Dv]: values that these rows see
  ConstTensorView qg;  // [B, T, Hq, D]: queries of global tokens; other rows are not read
  ConstTensorView kg;  // [B, T, Hkv, D]: keys that global tokens see
  ConstTensorView vg;  // [B, T, Hkv, Dv]: values that global tokens see
};

// All options except window and tokens are optional. Integer tensors are i32 or i64.
struct Options {
  int64_t window = 0;      // a row sees floor(window / 2) keys on either side of itself
  ConstTensorView tokens;  // [n], or [B, n] or [1, n] by sequence: global tokens in any order, counted from 0 in each
                           // sequence; -1 and tokens beyond the sequence are ignored

  std::optional<double> scale;  // factor of the logits, any finite value; default 1 / sqrt(D)

  ConstTensorView key_lengths;    // [B]: keys at or beyond it are not seen
  ConstTensorView key_starts;     // [B]: keys before it are not seen
  ConstTensorView query_lengths;  // [B]: rows at or beyond it see no key
  double softcap = 0;             // soft cap of the logits, > 0, or 0 for none

  double dropout = 0;           // probability of dropping a pair, in [0, 1)
  uint64_t seed = 0;            // seed of the dropout mask
  uint32_t dropout_offset = 0;  // offset of the dropout counter, for further masks of one seed

  // [B + 1]: offsets of packed sequences, from 0 to all tokens
  ConstTensorView cu_seqlens_q;

  // for f32 on AMX: the high one takes three products of a bf16 split (3xBF16), with a relative error of 1e-5, the
  // highest six. Elsewhere both are the same.
  attention::Precision precision = attention::Precision::kHighest;
  bool invariant = false;  // bitwise equal results for every split of the queries into calls, by the kernels that
                           // caches use
};

// lse is optional: the log-sum-exp of each row, natural logarithm, -inf where it sees no key.
struct Outputs {
  TensorView o;    // [B, T, Hq, Dv] in q's dtype; packed as q is
  TensorView lse;  // [B, Hq, T], packed [Hq, T_total]; f64 for f64, else f32
};

// Computes o, and lse where it is present.
//
// Edges. Any size may be 0, and there may be no global tokens. A row that sees no key has o = 0 and lse = -inf, and so
// has a row at or beyond query_lengths. With qg, the q of global tokens and the qg of all others are never read, so
// even a NaN there has no effect. A global token among padded keys is a row that sees all valid keys, and a key that no
// row sees.
//
// Dropout draws as attention does, but with qg the i-th global token of a sequence, ascending, has position 2^31 + i.
//
// Precision and reproducibility are those of attention, pass by pass: global tokens are gathered, so their bits do not
// depend on their positions.
//
// Cost. 2 (D + Dv) flops and one exponential per computed pair, about T (window + 1) + 2 n T pairs per head for n
// global tokens. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if only some of qg, kg and
// vg are present, if an output overlaps an input or itself, or if an option is out of range; Unsupported for a dtype or
// device without a kernel. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. `out` may have dtype f64
// whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Bytes that Forward reserves for all threads, partly in `ctx`: those of attention, and q, o and lse of the gathered
// rows of global tokens.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);

// The inputs and outputs of Forward, and the gradients of the outputs.
struct BackwardInputs : Inputs {
  ConstTensorView o, lse;  // outputs of Forward
  ConstTensorView d_o;     // gradient of o, in its shape and dtype
  ConstTensorView d_lse;   // gradient of lse; zero if absent
};

// Only present tensors are computed. Each has the shape and dtype of its input, with a contiguous last axis.
struct Gradients {
  TensorView dq, dk, dv, dqg, dkg, dvg;
};

// Computes the gradients of sum <d_o, o> + <d_lse, lse>. With qg they are the gradients of two calls of attention
// without a common tensor, one for the rows of global tokens and one for the others: dq is exactly 0 for global tokens
// and dqg for all others, and dk and dv have no contribution from global tokens. Without qg they are the gradients of
// attention with the pattern.
//
// Edges, precision, reproducibility and cost are those of attention. Memory beyond the arguments: BackwardWorkspace().
// Only heed.torch has the second derivative. Throws as Forward does. On throw, nothing has been written.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading, from the inputs, d_o and d_lse only. Outputs may have dtype f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that Backward reserves: those of attention, and the gathered rows of global tokens of q, o, lse and their
// gradients.
HEED_API int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in, const Options& options,
                                   const Gradients& out);

using attention::Explanation;  // visited_pairs counts both problems

// Describes what Forward would do. Data pointers may be null where only shapes are known, except that of tokens.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::longformer

#endif  // HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_H_

// The attention probabilities P, for selected rows or pooled into an image.
//
//   P_ij = exp(s_ij - lse_i) if keep_ij, else 0
//
// with the logits s, the rule keep and the log-sum-exp of attention.h, before
// dropout. With learned sinks, exp(sink_h) counts in lse_i: rows then sum to less
// than 1. A row that sees no key is 0; a row that sees a NaN is NaN at its visible keys.
//
// The probabilities are for inspection: they have no gradient, and neither values nor outputs are needed. They are
// recomputed from q and k tile by tile, so the result is the only memory of that size.
#ifndef HEED_OPS_EXACT_ATTENTION_WEIGHTS_ATTENTION_WEIGHTS_H_
#define HEED_OPS_EXACT_ATTENTION_WEIGHTS_ATTENTION_WEIGHTS_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::attention {

// q, k and lse as in attention.h; packed sequences for TileOfWeights only.
struct WeightsInputs {
  ConstTensorView q;    // [B, Tq, Hq, D]
  ConstTensorView k;    // [B, Tk, Hkv, D]
  ConstTensorView lse;  // [B, Hq, Tq] from Forward; computed if absent
};

// Selected rows and heads, in the order given; all where absent. i32 or i64.
struct WeightsSelection {
  ConstTensorView rows;   // [R] query indices below Tq
  ConstTensorView heads;  // [H] query heads below Hq
};

// Writes P of the selected heads and rows to `out` [B, H, R, Tk], f64 for f64, else
// f32; rows contiguous, the other axes with any strides.
//
// The result of a row depends neither on the selection nor on threads. Relative error of P: the errors of lse and of a
// logit. Cost: one product and one exponential per computed pair, twice that without `lse`. Memory beyond the
// arguments: a few tiles per thread.
//
// Throws InvalidArgument as Forward does, and for cu_seqlens, an index out of range
// or `out` of another shape or dtype; nothing has been written then.
HEED_API void Weights(Context& ctx, const WeightsInputs& in, const Options& options, const WeightsSelection& selection,
                      const TensorView& out);

// A rectangle of P: consecutive heads, rows and keys of one sequence.
struct Tile {
  int64_t sequence = 0;                  // entry of the batch, or packed sequence
  int64_t first_head = 0;                // query head
  int64_t first_row = 0, first_key = 0;  // of the sequence
  bool dropout = false;                  // P_ij Z_ij / (1 - dropout), as in attention.h, instead of P_ij
};

// Does what Weights does for a tile, whose size is that of `out` [heads, rows, keys]. q and k may be packed, with lse
// [Hq, Tq_total]. Keys outside the tile count in the lse alone, so that the pairs of several tiles are those
// of one. Throws as Weights does, and for a tile that is not inside its sequence.
HEED_API void TileOfWeights(Context& ctx, const WeightsInputs& in, const Options& options, const Tile& tile,
                            const TensorView& out);

enum class Reduce { kMean, kMax };

// Pools P of every head into `out` [B, Hq, r, c], in the dtype of Weights: row i falls into bin i r / Tq, key j into
// bin j c / Tk, rounded down. The mean and the maximum are over all pairs of a bin; masked pairs are 0.
//
// r is at most Tq and c at most Tk, each at least 1 unless Tq or Tk is 0. Memory
// beyond the arguments: O(c) and a few tiles per thread, whatever Tq and Tk are, and
// a copy of k where its rows are strided. Sums are in f64 over the rows of a bin and
// in f32 (f64) over keys; the bits do not depend on threads.
HEED_API void Map(Context& ctx, const WeightsInputs& in, const Options& options, Reduce reduce, const TensorView& out);

// Computes what Weights does in double, written for reading: scalar, one thread. `out` is f64.
HEED_API void WeightsReference(const WeightsInputs& in, const Options& options, const WeightsSelection& selection,
                               const TensorView& out);
HEED_API void TileOfWeightsReference(const WeightsInputs& in, const Options& options, const Tile& tile,
                                     const TensorView& out);
HEED_API void MapReference(const WeightsInputs& in, const Options& options, Reduce reduce, const TensorView& out);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_WEIGHTS_ATTENTION_WEIGHTS_H_

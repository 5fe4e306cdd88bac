// T5's relative position bias: a learned number per head and bucket of distances.
//
//   bias[h, i, j] = table[bucket(j - p_i), h]
//
// Query i stands at p_i = Tk - Tq + i (bottom right), or at i (top left). Up to
// half of its buckets, a side has one bucket per distance; beyond, buckets grow
// geometrically up to max_distance, and the last holds all that is farther:
//
//   n < m    bucket n                 m = floor(nb / 2)
//   n >= m   bucket min(nb - 1, m + floor((nb - m) ln(n / m) / ln(max_distance / m)))
//
// Bidirectional: nb = buckets / 2 per side, n = |j - p_i|, and keys after the
// query use the second half of the table. Causal: nb = buckets, n = max(p_i - j,
// 0), so all keys after the query share bucket 0. The limits of the buckets are
// found once, as integers, so that a distance that stands on a limit is never
// misplaced by a rounded logarithm: 8, 12, 16, 23, 32, 46, 64, 91 for nb = 16 and
// max_distance = 128.
//
// Source: Raffel et al., "Exploring the limits of transfer learning with a
// unified text-to-text transformer", arXiv:1910.10683.
#ifndef HEED_OPS_POSITIONS_T5_BIAS_H_
#define HEED_OPS_POSITIONS_T5_BIAS_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"

namespace heed {

enum class T5Direction { kBidirectional, kCausal };

struct T5BiasOptions {
  int64_t max_distance = 128;  // above m
  bool top_left = false;       // query 0 stands at 0, not at Tk - Tq
};

// bias [H, Tq, Tk] = the entries of table [buckets, H], which has the same dtype,
// any float, and keeps its bits. buckets is at least 2, or bidirectional even and
// at least 4. Any strides; sizes of 0 are legal, but for buckets. No shared
// memory.
//
// Throws InvalidArgument for a wrong shape, dtype, stride, overlap or option,
// before anything is written.
HEED_API void T5Bias(Context& ctx, const ConstTensorView& table, T5Direction direction, const T5BiasOptions& options,
                     const TensorView& bias);

// dtable [buckets, H] = the gradient of the table, given dbias [H, Tq, Tk], that
// of the bias:
//
//   dtable[k, h] = sum over i, j with bucket(j - p_i) = k of dbias[h, i, j]
//
// Sums are f64 in one order, along diagonals and then over the diagonals of a
// bucket, whatever the number of threads; the result is rounded once. Otherwise
// as T5Bias.
HEED_API void T5BiasBackward(Context& ctx, const ConstTensorView& dbias, T5Direction direction,
                             const T5BiasOptions& options, const TensorView& dtable);

// These compute biases and gradients from the formulas in long double, one pair at a
// time. They check nothing: they are for tests.
HEED_API void T5BiasReference(const ConstTensorView& table, T5Direction direction, const T5BiasOptions& options,
                              const TensorView& bias);

// See T5BiasReference.
HEED_API void T5BiasBackwardReference(const ConstTensorView& dbias, T5Direction direction, const T5BiasOptions& options,
                                      const TensorView& dtable);

}  // namespace heed

#endif  // HEED_OPS_POSITIONS_T5_BIAS_H_

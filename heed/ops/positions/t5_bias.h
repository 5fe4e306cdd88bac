// T5's relative position bias: a learned number per head and bucket of distances.
//
//   bias[h, i, j] = table[bucket(j - p_i), h]
//
// Query i has position p_i = Tk - Tq + i (bottom right), or i (top left). The first half of the buckets of a side have
// one distance each; beyond, buckets grow geometrically up to max_distance, and the last one holds all larger
// distances:
//
//   n < m    bucket n                 m = floor(nb / 2)
//   n >= m   bucket min(nb - 1, m + floor((nb - m) ln(n / m) / ln(max_distance / m)))
//
// Bidirectional: nb = buckets / 2 per side, n = |j - p_i|, and keys after the
// query use the second half of the table. Causal: nb = buckets, n = max(p_i - j,
// 0), so all keys after the query share bucket 0. The limits of the buckets are computed once, as integers, so that a
// rounded logarithm never misplaces a distance on a limit: 8, 12, 16, 23, 32, 46, 64, 91 for nb = 16 and max_distance =
// 128.
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
  bool top_left = false;       // query 0 has position 0 instead of Tk - Tq
};

// Copies the entries of table [buckets, H] to bias [H, Tq, Tk], bit for bit; both have the same dtype, any float.
// buckets is at least 2, or for bidirectional even and at least 4. Any strides; any size except buckets may be 0. The
// two share no memory.
//
// Throws InvalidArgument for a wrong shape, dtype, stride, overlap or option,
// before anything is written.
HEED_API void T5Bias(Context& ctx, const ConstTensorView& table, T5Direction direction, const T5BiasOptions& options,
                     const TensorView& bias);

// Computes dtable [buckets, H], the gradient of the table, from dbias [H, Tq, Tk], the gradient of the bias:
//
//   dtable[k, h] = sum over i, j with bucket(j - p_i) = k of dbias[h, i, j]
//
// Sums are f64 in a fixed order, along diagonals and then over the diagonals of a bucket, whatever the number of
// threads; the result is rounded once. Everything else is as in T5Bias.
HEED_API void T5BiasBackward(Context& ctx, const ConstTensorView& dbias, T5Direction direction,
                             const T5BiasOptions& options, const TensorView& dtable);

// Computes biases and gradients from the formulas in long double, one pair at a time, without checking arguments, for
// tests.
HEED_API void T5BiasReference(const ConstTensorView& table, T5Direction direction, const T5BiasOptions& options,
                              const TensorView& bias);

// See T5BiasReference.
HEED_API void T5BiasBackwardReference(const ConstTensorView& dbias, T5Direction direction, const T5BiasOptions& options,
                                      const TensorView& dtable);

}  // namespace heed

#endif  // HEED_OPS_POSITIONS_T5_BIAS_H_

// Sinusoidal position encoding: a table of sines and cosines.
//
//   interleaved   P[p, 2i] = sin(p w_i), P[p, 2i + 1] = cos(p w_i),
//                 w_i = 10000^(-2i/D)
//   concatenated  P[p, i] = sin(p w_i), P[p, D/2 + i] = cos(p w_i), i < D/2,
//                 w_i = 10000^(-i / (D/2 - 1))    (w_0 = 1 where D/2 is 1)
//
// With an odd D the last column is the next sine, without its cosine; D/2 is
// rounded down.
//
// Source: Vaswani et al., "Attention is all you need", arXiv:1706.03762; the
// concatenated order and its exponent are those of tensor2tensor and fairseq.
#ifndef HEED_OPS_POSITIONS_SINUSOIDAL_H_
#define HEED_OPS_POSITIONS_SINUSOIDAL_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"

namespace heed {

enum class SinusoidalOrder { kInterleaved, kConcatenated };

// Writes `table` [T, D], f32, D >= 1, any strides. Row p belongs to position p.
// Angles, sines and cosines are f64, the result is rounded once. Results depend neither on threads nor on T. T may be
// 0.
//
// Throws InvalidArgument for a wrong shape, dtype or stride.
HEED_API void Sinusoidal(Context& ctx, SinusoidalOrder order, const TensorView& table);

// Computes the table from the formulas, in long double. It does not check its arguments: it is for tests.
HEED_API void SinusoidalReference(SinusoidalOrder order, const TensorView& table);

}  // namespace heed

#endif  // HEED_OPS_POSITIONS_SINUSOIDAL_H_

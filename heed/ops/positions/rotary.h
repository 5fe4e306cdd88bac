// Rotary position encoding (RoPE): pairs of elements of a row, rotated by an
// angle that grows with the row's position.
//
//   angle_i = position * w_i,  w_i = base^(-2i/dim),  i < dim/2
//   y_a = f (x_a cos angle_i - x_b sin angle_i)
//   y_b = f (x_b cos angle_i + x_a sin angle_i)
//
// Pair i is (a, b) = (i, i + dim/2), half split: GPT-NeoX, Llama in Transformers;
// or (2i, 2i + 1), interleaved: GPT-J, the original Llama, DeepSeek. The two are equal up to a permutation of the
// elements; neither convention is the default, because the wrong one gives plausible but wrong results. Elements from
// dim on are copied. <R(p) q, R(p') k> depends only on q, k and p - p'.
//
// A scaling changes w_i, and for two types the factor f, which is 1 otherwise.
//
// Source: Su et al., "RoFormer", arXiv:2104.09864.
#ifndef HEED_OPS_POSITIONS_ROTARY_H_
#define HEED_OPS_POSITIONS_ROTARY_H_

#include <cstdint>
#include <optional>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/positions/rotary_scaling.h"

namespace heed {

enum class RotaryPairs { kHalfSplit, kInterleaved };

struct RotaryOptions {
  double base = 10000;              // above 1
  std::optional<int64_t> dim = {};  // rotated elements: even, 2 to D; default D
  RotaryScaling scaling = {};
  bool inverse = false;  // rotates by minus the angle, still times f

  bool operator==(const RotaryOptions&) const = default;
};

// y = the rows of x [B, T, H, D] or [T, H, D], rotated.
//
// positions is [T] or, with a batch, [B, T], i32 or i64, from -2^31 to 2^31:
// negative ones rotate backwards. x and y have one shape and dtype, any float;
// their last axis is contiguous, other strides are arbitrary, and they share no memory. Any size except D may be 0.
//
// inverse is the transpose of the rotation, so it maps the gradient of y to that
// of x; it undoes the rotation where f = 1.
//
// dynamic and longrope depend on the length of a sequence, which is the largest position in its row of positions plus
// 1: a sequence does not depend on other batch entries, but keys that were rotated while it was shorter are
// inconsistent with later ones. Rotate such keys again, or store them unrotated.
//
// Angles, cosines and sines are f64, with an error of at most |angle| 2^-51 for an
// unscaled frequency. The rotation is in f64 too, so that a result is rounded once, except for 16-bit dtypes, where it
// is in f32. Subnormal results may be 0. Results depend neither on threads, strides, the SIMD target nor other rows.
//
// Throws InvalidArgument for a wrong shape, dtype, stride, overlap, position or
// option, before anything is written.
HEED_API void Rotary(Context& ctx, const ConstTensorView& x, const ConstTensorView& positions, RotaryPairs pairs,
                     const RotaryOptions& options, const TensorView& y);

// Computes what Rotary() does from the formulas, in long double, one element at a time. It does not check its
// arguments: it is for tests.
HEED_API void RotaryReference(const ConstTensorView& x, const ConstTensorView& positions, RotaryPairs pairs,
                              const RotaryOptions& options, const TensorView& y);

}  // namespace heed

#endif  // HEED_OPS_POSITIONS_ROTARY_H_

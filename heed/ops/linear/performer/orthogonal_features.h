// Orthogonal random features: the directions of Performer's feature map (FAVOR+).
//
//   W [m, d]: blocks of d rows, the last one truncated
//   G [d, d] of independent N(0, 1),  G = Q R
//   row j of a block = n_j sign(R_jj) Q_{., j}     (without the sign: see below)
//   n_j = |g_j|, g_j another N(0, I_d)             scaling 0: norms as of Gaussian rows
//   n_j = sqrt(d)                                  scaling 1
//
// Rows of a block are orthogonal, and each row is N(0, I_d) (scaling 0), so that
//
//   E[exp(<w, x> - |x|^2 / 2) exp(<w, y> - |y|^2 / 2)] = exp(<x, y>)
//
// The sign makes Q Haar distributed. Without it the first entry of the first row of a block is never positive for d >
// 1, as with LAPACK, and the estimate is biased: 1.18 times too large in the mean at d = 8. Two libraries omit the
// sign; `haar_fix` = false is for comparison with them.
//
// Source: Choromanski et al., "Rethinking attention with Performers", arXiv:2009.14794;
// Mezzadri, "How to generate random matrices from the classical compact groups",
// arXiv:math-ph/0609050, for the sign.
#ifndef HEED_OPS_LINEAR_PERFORMER_ORTHOGONAL_FEATURES_H_
#define HEED_OPS_LINEAR_PERFORMER_ORTHOGONAL_FEATURES_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"

namespace heed {

enum class FeatureNorms { kChi, kRoot };  // scaling 0 and 1

struct OrthogonalFeaturesOptions {
  FeatureNorms norms = FeatureNorms::kChi;
  bool haar_fix = true;
};

// Draws `w` [m, d], f64, m >= 0 and 1 <= d <= 4096, any strides.
//
// The values depend on seed, d and the options only: a larger m does not change the first rows, and only additions,
// multiplications, divisions and square roots are used, so they are the same on every CPU and for any number of
// threads. Deviates are Box and Muller's: with Philox4x32-10 with the key `seed` at the counter (p, j, block, 2^31),
// four words are two uniforms of 53 bits u, v, and
//
//   G_{2p, j}, G_{2p+1, j} = sqrt(-2 log(1 - u)) (cos 2 pi v, sin 2 pi v)
//
// and g_j in the same way with 2^31 + 1. QR is Householder's, with R_jj = -sign(.) |.| except in the last column of d,
// as in LAPACK. About 8/3 m d^2 flops, blocks in parallel, and d (d + 2) doubles of scratch per thread.
//
// Throws InvalidArgument for a wrong shape, dtype or stride.
HEED_API void OrthogonalFeatures(Context& ctx, uint64_t seed, const OrthogonalFeaturesOptions& options,
                                 const TensorView& w);

// Computes W in long double, by reflections written out as matrices. It does not check its arguments: it is for tests
// with small d.
HEED_API void OrthogonalFeaturesReference(uint64_t seed, const OrthogonalFeaturesOptions& options, const TensorView& w);

}  // namespace heed

#endif  // HEED_OPS_LINEAR_PERFORMER_ORTHOGONAL_FEATURES_H_

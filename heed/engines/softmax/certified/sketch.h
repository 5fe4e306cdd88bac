// Bounds of softmax sums from a sketch of keys or from boxes around them (state/kv_view.h: SketchBlocks). Certified
// attention selects blocks of keys by them.
//
// With k^ = step n, the sketched key, and q^ = unit m, the query in 16-bit fixed point, the logit of key j is in the
// interval s^ +- delta, where
//
//   s^    = scale unit step <m, n>                            the integer <m, n> is exact
//   delta = |scale| (min(|q|_1 step / 2, |q|_2 error) + |q - q^|_inf step |n|_1)
//
// and |n|_1 <= 127 D. The soft cap, which is monotone, is applied to both ends, and terms of pairs are added to both.
// Per query row and block of 64 keys the kernel returns the sums of e^upper and of e^lower over the keys that the row
// sees. Its own rounding is included: logits are widened by 2^-20 of their size and of the terms' size, and by 2^-18
// where they are capped. The sums have a relative error below kSketchError.
// are capped, and the sums have a relative error below kSketchError.
#ifndef HEED_ENGINES_SOFTMAX_CERTIFIED_SKETCH_H_
#define HEED_ENGINES_SOFTMAX_CERTIFIED_SKETCH_H_

#include <cstddef>
#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/dtype.h"

namespace heed::softmax {

inline constexpr int64_t kSketchKeys = 64;
inline constexpr int kSketchRows = 4;  // rows per call, at most
inline constexpr double kSketchError = 2e-5;

// Query rows in fixed point. Per row and four channels there are two words of four bytes: the high digits and the low
// digits.
struct SketchQueries {
  int num_rows = 0;  // 1 to kSketchRows
  int64_t quads = 0;
  int32_t* words = nullptr;        // [quads][num_rows][2]
  int32_t starts[kSketchRows][2];  // -128 times the sum of the digits, as key bytes are 128 + n
  float factor[kSketchRows];       // scale unit
  // The factors of step, error and the query's part in delta.
  float by_step[kSketchRows], by_error[kSketchRows], by_query[kSketchRows];
  // Both begin at the first block of a call. `seen` has a bit for each key that the row sees; `terms`, unless null, are
  // added to the logits.
  const uint64_t* seen[kSketchRows];
  const float* terms[kSketchRows] = {};
  float softcap = 0;  // 0: none

  static int64_t NumWords(int64_t depth, int64_t rows) { return (depth + 3) / 4 * rows * 2; }
};

// Fills row r except `seen` and `terms`; `words` must have room. All logits of a row are NaN if q has NaN or infinity
// or is out of the range in which f32 gives bounds.
void PackSketchQuery(DType dtype, const void* q, int64_t depth, double scale, int r, SketchQueries* rows);

// Byte offsets of a block's parts. The bytes of keys are at offset 0.
struct SketchParts {
  int64_t step = 0, error = 0;
};

// One query row for bounds from boxes: its channels times the scale, rounded. If it has NaN or infinity, there are no
// bounds.
struct BoxQuery {
  const float* scaled = nullptr;
  int64_t depth = 0;
  const float* terms = nullptr;  // as SketchQueries::terms
  float softcap = 0;
};

// Byte offsets of min, max and mean of a block's 64 keys.
struct BoxParts {
  int64_t min = 0, max = 0, mean = 0;
};

// Per row and block: a logit, and the two sums relative to its exponential. A block with a key without a bound has NaNs
// or infinities; a block without a visible key has -infinity and zeros.
struct SketchMasses {
  float *logit = nullptr, *upper = nullptr, *lower = nullptr;
};

struct SketchPasses {
  // Computes blocks [begin, end) of 64 visible keys each, at blocks[i - begin]. No logit is above
  // sum max(q min, q max). By Jensen's inequality the sum of exponentials is at least 64 times the exponential of the
  // mean's logit. Both are widened by the f32 rounding. A soft cap is not convex, so with one the lower sum is 64 times
  // the exponential of the least logit, capped. Terms count with their largest and their least value.
  void (*box)(const BoxQuery& row, const std::byte* const* blocks, int64_t begin, int64_t end, const BoxParts& parts,
              const SketchMasses& masses) = nullptr;

  // Computes blocks [begin, end) into masses[row] at index i. Block i has keys [64 i, 64 i + 64) and is at
  // blocks[i - begin].
  void (*score)(const SketchQueries& rows, const std::byte* const* blocks, int64_t begin, int64_t end,
                const SketchParts& parts, const SketchMasses* masses) = nullptr;

  // Brings the sums of n blocks to one common logit, the largest, and returns it: -infinity if no key is visible. A
  // block without bounds gets an infinite upper sum and a lower sum of 0.
  float (*level)(const SketchMasses& masses, int64_t n) = nullptr;
};

// Returns the best passes that `ctx` allows.
SketchPasses SketchPassesFor(const Context& ctx);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_CERTIFIED_SKETCH_H_

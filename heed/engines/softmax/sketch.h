// Bounds of softmax weights from a sketch of keys or their boxes (state/kv_view.h: SketchBlocks): what certified
// attention chooses by.
//
// With k^ = step n, the sketched key, and q^ = unit m, the query in 16-bit fixed point, the logit of key j lies in
// s^ +- delta, where
//
//   s^    = scale unit step <m, n>                            the integer <m, n> is exact
//   delta = |scale| (min(|q|_1 step / 2, |q|_2 error) + |q - q^|_inf step |n|_1)
//
// and |n|_1 <= 127 D. Both ends meet the soft cap, which is monotone, and terms of pairs are added to both. Per query
// row and block of 64 keys the kernel returns the sums of e^upper and e^lower over the keys that the row sees. What it
// rounds itself is in them already: logits are widened by 2^-20 of their size and of the terms', by 2^-18 where they
// are capped, and the sums have a relative error below kSketchError.
#ifndef HEED_ENGINES_SOFTMAX_SKETCH_H_
#define HEED_ENGINES_SOFTMAX_SKETCH_H_

#include <cstddef>
#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/dtype.h"

namespace heed::softmax {

inline constexpr int64_t kSketchKeys = 64;
inline constexpr int kSketchRows = 4;  // most of one call
inline constexpr double kSketchError = 2e-5;

// Query rows in fixed point: of each four channels and row two words of four bytes, the high digits and the low ones.
struct SketchQueries {
  int num_rows = 0;  // 1 to kSketchRows
  int64_t quads = 0;
  int32_t* words = nullptr;        // [quads][num_rows][2]
  int32_t starts[kSketchRows][2];  // -128 times the sum of the digits: bytes are 128 + n
  float factor[kSketchRows];       // scale unit
  float by_step[kSketchRows], by_error[kSketchRows], by_query[kSketchRows];  // what delta is made of
  // Both begin at the first block of a call: `seen` has a bit for each key that the row sees, `terms` are added to the
  // logits of the keys, unless null.
  const uint64_t* seen[kSketchRows];
  const float* terms[kSketchRows] = {};
  float softcap = 0;  // 0: none

  static int64_t NumWords(int64_t depth, int64_t rows) { return (depth + 3) / 4 * rows * 2; }
};

// Fills row r, but for what it sees and what is added; `words` has room. With NaN or infinity in q, or where f32 can
// say nothing of it, all its logits are NaN.
void PackSketchQuery(DType dtype, const void* q, int64_t depth, double scale, int r, SketchQueries* rows);

// Where a block's parts are, in bytes from where it begins: bytes of keys come first.
struct SketchParts {
  int64_t step = 0, error = 0;
};

// One query row for bounds from boxes: its channels times the scale, rounded. With NaN or infinity nothing is known.
struct BoxQuery {
  const float* scaled = nullptr;
  int64_t depth = 0;
  const float* terms = nullptr;  // as those of SketchQueries
  float softcap = 0;
};

// Where min, max and mean of a block's 64 keys are.
struct BoxParts {
  int64_t min = 0, max = 0, mean = 0;
};

// Each row and block has a logit and, relative to its exponential, the two sums. A block with a key of which nothing is
// known has NaNs or infinities; one without a visible key has -infinity and zeros.
struct SketchMasses {
  float *logit = nullptr, *upper = nullptr, *lower = nullptr;
};

struct SketchPasses {
  // Blocks [begin, end) of 64 visible keys each, at blocks[i - begin]. No logit is above sum max(q min, q max), and by
  // Jensen's inequality the sum of exponentials is at least 64 times that of the mean; both widened by what f32 rounds.
  // With a soft cap, which is not convex, 64 times that of the capped least logit. Terms enter by their largest and
  // their least one.
  void (*box)(const BoxQuery& row, const std::byte* const* blocks, int64_t begin, int64_t end, const BoxParts& parts,
              const SketchMasses& masses) = nullptr;

  // Blocks [begin, end), block i with keys [64 i, 64 i + 64) and at blocks[i - begin], into masses[row], at i.
  void (*score)(const SketchQueries& rows, const std::byte* const* blocks, int64_t begin, int64_t end,
                const SketchParts& parts, const SketchMasses* masses) = nullptr;

  // Brings the sums of n blocks to one logit, that of the largest, which it returns: -infinity where nothing is
  // visible. A block of which nothing is known gets an infinite upper sum and a lower one of 0.
  float (*level)(const SketchMasses& masses, int64_t n) = nullptr;
};

// The best one that `ctx` allows.
SketchPasses SketchPassesFor(const Context& ctx);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_SKETCH_H_

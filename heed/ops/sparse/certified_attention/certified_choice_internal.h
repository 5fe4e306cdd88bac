// Selects the blocks that a row may drop, from bounds of each block's mass.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_CHOICE_INTERNAL_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_CHOICE_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <limits>

namespace heed::certified_attention {

// Upper and lower sums of n blocks for one row, all relative to one logit; an upper sum is infinite where no bound is
// known. A block with logit -infinity has no key visible to the row and does not count. The mass of a sink is always
// kept.
struct RowMasses {
  const float *upper = nullptr, *lower = nullptr;
  int64_t blocks = 0;
  const float* logits = nullptr;  // null: the row sees keys of every block
  double sink = 0;

  bool Sees(int64_t i) const { return logits == nullptr || logits[i] != -std::numeric_limits<float>::infinity(); }
};

// The bound of a row whose kept blocks are marked. It is at least the dropped probability, and 0 if no block is
// dropped.
float BoundOf(const RowMasses& masses, const uint8_t* kept);

// Selects in time linear in the number of blocks, except for sorting blocks whose masses are within a sixteenth of an
// octave of the last dropped one.
class Chooser {
 public:
  static int64_t Bytes(int64_t blocks);
  Chooser(void* memory, int64_t blocks);

  // Marks further blocks in descending order of their upper sums, ties to the lower index, until BoundOf() is at most
  // `epsilon`, if necessary all.
  void Keep(const RowMasses& masses, double epsilon, uint8_t* kept);

 private:
  static constexpr int64_t kBins = 1088;

  double *upper_, *lower_;  // [kBins]: sums over the blocks whose upper sum is in a bin
  int32_t* last_;           // [blocks]
};

// A smaller epsilon is treated as 0: f32 bounds do not resolve it.
inline constexpr double kLeastEpsilon = 0x1p-100;

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_CHOICE_INTERNAL_H_

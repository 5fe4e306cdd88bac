// Which blocks a row may do without, given bounds of what each weighs.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_CHOICE_INTERNAL_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_CHOICE_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <limits>

namespace heed::certified_attention {

// Upper and lower sums of n blocks for one row, all relative to one logit: an upper one is infinite where nothing is
// known. A block whose own logit is -infinity has no key that the row sees, and does not count. The weight of a sink is
// kept always.
struct RowMasses {
  const float *upper = nullptr, *lower = nullptr;
  int64_t blocks = 0;
  const float* logits = nullptr;  // null: the row sees some of each
  double sink = 0;

  bool Sees(int64_t i) const { return logits == nullptr || logits[i] != -std::numeric_limits<float>::infinity(); }
};

// The certificate of a row whose kept blocks are marked. It is at least the dropped mass and 0 where nothing is
// dropped.
float BoundOf(const RowMasses& masses, const uint8_t* kept);

// Chooses in time linear in the blocks, but for those whose masses are within a sixteenth of an octave of the last one
// that is dropped, which are sorted.
class Chooser {
 public:
  static int64_t Bytes(int64_t blocks);
  Chooser(void* memory, int64_t blocks);

  // Marks blocks besides those that are marked, in falling order of their upper sums, ties to the lower index, until
  // BoundOf() is at most `epsilon`, if need be all.
  void Keep(const RowMasses& masses, double epsilon, uint8_t* kept);

 private:
  static constexpr int64_t kBins = 1088;

  double *upper_, *lower_;  // [kBins]: sums of those whose upper sum is in a bin
  int32_t* last_;           // [blocks]
};

// An epsilon below it is taken for 0: f32 has nothing to say there.
inline constexpr double kLeastEpsilon = 0x1p-100;

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_CHOICE_INTERNAL_H_

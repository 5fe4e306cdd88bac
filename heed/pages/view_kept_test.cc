// The pairs of a pattern on the page of attention, against the pattern's own mask and attention's probabilities.
#include "heed/pages/view_kept.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/weights/attention_weights.h"

namespace heed::pages {
namespace {

constexpr int64_t kB = 2, kTq = 150, kTk = 170, kHq = 4, kHkv = 2, kD = 8;

class KeptCellsTest : public testing::Test {
 protected:
  KeptCellsTest() {
    layer_.q = q_.FillNormal(1).view();
    layer_.k = k_.FillNormal(2).view();
    options_.causal = true;
    options_.window = {100, -1};
  }

  bool Sees(int64_t row, int64_t key) const {
    const int64_t position = row + kTk - kTq;
    return key <= position && key >= position - options_.window.left;
  }

  // [Hq, Tq, Tk] of the first sequence: pairs that attention sees and the pattern keeps.
  std::vector<uint8_t> MaskOf(const Pattern& pattern) const {
    std::vector<uint8_t> keep(kB * kHq * kTq * kTk);
    Mask(pattern, {kTq, kTk, kHq, kHkv, std::vector<int64_t>(kB, kTk - kTq)}, false,
         TensorView(keep.data(), DType::kBool, {kB, kHq, kTq, kTk}));
    keep.resize(kHq * kTq * kTk);
    for (int64_t i = 0; i < std::ssize(keep); ++i) {
      keep[static_cast<size_t>(i)] &= Sees(i / kTk % kTq, i % kTk);
    }
    return keep;
  }

  // The mask pooled into cells, and all visible pairs pooled.
  struct Pooled {
    std::vector<int64_t> kept, seen;
  };
  Pooled Pool(const Pattern& pattern, int64_t rows, int64_t columns) const {
    const std::vector<uint8_t> keep = MaskOf(pattern);
    Pooled pooled = {std::vector<int64_t>(static_cast<size_t>(kHq * rows * columns)), {}};
    pooled.seen = pooled.kept;
    for (int64_t i = 0; i < std::ssize(keep); ++i) {
      const int64_t head = i / kTk / kTq, row = i / kTk % kTq, key = i % kTk;
      const auto cell = static_cast<size_t>((head * rows + row * rows / kTq) * columns + key * columns / kTk);
      pooled.kept[cell] += keep[static_cast<size_t>(i)];
      pooled.seen[cell] += Sees(row, key);
    }
    return pooled;
  }

  Context ctx_{1};
  Buffer q_{DType::kF64, {kB, kTq, kHq, kD}}, k_{DType::kF64, {kB, kTk, kHkv, kD}};
  ViewLayer layer_;
  attention::Options options_;
};

TEST_F(KeptCellsTest, SmallMapsHaveABitForEachPairOfEachHead) {
  const Pattern pattern = Pattern::Parse("per_head([atrous(3), neighborhood(9), streaming(2, 70), bigbird(16, 1)])");
  const KeptSet kept = KeptCells(ctx_, layer_, options_, pattern, kTq, kTk);
  const std::vector<uint8_t> expected = MaskOf(pattern);
  EXPECT_EQ(kept.header["bits"], 1);
  ASSERT_EQ(kept.header["heads"], kHq);
  constexpr int64_t kPairs = kTq * kTk, kBytes = (kPairs + 7) / 8;
  ASSERT_EQ(std::ssize(kept.cells), kHq * kBytes);
  for (int64_t head = 0; head < kHq; ++head) {
    double pairs = 0, seen = 0;
    for (int64_t i = 0; i < kPairs; ++i) {
      const int bit = kept.cells[static_cast<size_t>(head * kBytes + i / 8)] >> i % 8 & 1;
      ASSERT_EQ(bit, expected[static_cast<size_t>(head * kPairs + i)]) << head << " " << i / kTk << " " << i % kTk;
      pairs += bit;
      seen += Sees(i / kTk, i % kTk);
    }
    EXPECT_DOUBLE_EQ(kept.header["pairs"][static_cast<size_t>(head)].get<double>(), pairs / seen);
  }
}

TEST_F(KeptCellsTest, HeadsThatKeepTheSameShareTheirCells) {
  const KeptSet kept = KeptCells(ctx_, layer_, options_, Pattern::Parse("atrous(2)"), kTq, kTk);
  EXPECT_EQ(kept.header["heads"], 1);
  EXPECT_EQ(std::ssize(kept.cells), (kTq * kTk + 7) / 8);
  EXPECT_EQ(kept.header["pairs"].size(), kHq);
}

TEST_F(KeptCellsTest, LargeMapsHaveTheShareOfWhatAttentionSeesInACell) {
  constexpr int64_t kRows = 7, kColumns = 11;
  // Keeps all pairs of some cells, a few pairs of others, and one pair of a nearly empty cell.
  const Pattern pattern = Pattern::Parse("atrous(70) & sliding_window(90, 90) | streaming(0, 30)");
  const KeptSet kept = KeptCells(ctx_, layer_, options_, pattern, kRows, kColumns);
  EXPECT_EQ(kept.header["bits"], 8);
  const Pooled pooled = Pool(pattern, kRows, kColumns);
  ASSERT_EQ(std::ssize(kept.cells), kRows * kColumns);
  for (size_t i = 0; i < kept.cells.size(); ++i) {
    const int64_t some = pooled.kept[i], all = pooled.seen[i];
    const int64_t expected = all == 0 ? 255 : some == 0 ? 0 : std::max<int64_t>(1, 255 * some / all);
    EXPECT_EQ(kept.cells[i], expected) << i;
    if (all > 0) {
      EXPECT_EQ(kept.cells[i] == 255, some == all) << i;
    }
  }
}

TEST_F(KeptCellsTest, TheAttentionKeptIsThatOnKeptPairsWhateverTheSequence) {
  // A pattern with a set per sequence: the first sequence's set is used.
  const Pattern pattern = Pattern::Parse("global_tokens([[3, 40], [7, -1]]) | sliding_window(12)");
  const KeptSet kept = KeptCells(ctx_, layer_, options_, pattern, kTq, kTk);
  const Buffer weights(DType::kF64, {kB, kHq, kTq, kTk});
  attention::Weights(ctx_, {layer_.q, layer_.k, {}}, options_, {}, weights.view());
  const std::vector<uint8_t> keep = MaskOf(pattern);
  for (int64_t head = 0; head < kHq; ++head) {
    double sum = 0;
    for (int64_t i = head * kTq * kTk; i < (head + 1) * kTq * kTk; ++i) {
      sum += weights.as<double>()[i] * keep[static_cast<size_t>(i)];
    }
    EXPECT_NEAR(kept.header["attention"][static_cast<size_t>(head)].get<double>(), sum / kTq, 1e-12);
  }
}

TEST_F(KeptCellsTest, ARowThatSeesNothingHasNoShare) {
  ViewLayer longer = layer_;
  const Buffer q(DType::kF64, {kB, kTk + 5, kHq, kD});
  longer.q = q.FillNormal(4).view();  // its first five rows are before every key
  const KeptSet kept = KeptCells(ctx_, longer, options_, Pattern::Parse("sliding_window(1000, 1000)"), kTk + 5, kTk);
  for (const double share : kept.header["attention"].get<std::vector<double>>()) EXPECT_DOUBLE_EQ(share, 1);
  for (const double share : kept.header["pairs"].get<std::vector<double>>()) EXPECT_DOUBLE_EQ(share, 1);
}

}  // namespace
}  // namespace heed::pages

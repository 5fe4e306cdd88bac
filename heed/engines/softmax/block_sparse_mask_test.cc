// KeptKeys on its own: rows of several lists with different tiles and words.
#include "heed/engines/softmax/block_sparse_mask.h"

#include <cstddef>
#include <cstdint>
#include <map>

#include "gtest/gtest.h"

namespace heed::softmax {
namespace {

// Makes two blocks of 64 rows. The first keeps all of tile 0; in the second, each row keeps one key of tile 2, with the
// row's index.
BlockSparseMask TwoBlocks() {
  BlockSparseMask mask;
  mask.blocks = 2;
  mask.begins = {0, 1, 2};
  mask.tiles = {{0, -1}, {2, 0}};
  for (int64_t row = 0; row < BlockSparseMask::kRows; ++row) mask.words.push_back(uint64_t{1} << row);
  return mask;
}

TEST(KeptKeysTest, RowsThatReachIntoTheNextBlockHaveItsTiles) {
  const BlockSparseMask mask = TwoBlocks();
  KeptKeys<8> kept;
  constexpr int64_t kFirst = 60;
  kept.Begin(8, 0, [&](size_t lane) { return KeptKeys<8>::Row{&mask, 0, 0, kFirst + static_cast<int64_t>(lane)}; });
  const auto words = [&](int64_t key) {
    std::map<size_t, uint64_t> found;
    kept.Words(key, [&](size_t lane, uint64_t bits) { found[lane] = bits; });
    return found;
  };
  EXPECT_EQ(kept.Next(0), 0);
  EXPECT_FALSE(kept.KeepsAll(0));
  std::map<size_t, uint64_t> first, third;
  for (size_t lane = 0; lane < 8; ++lane) {
    const bool is_in_the_second = lane >= 4;
    first[lane] = is_in_the_second ? 0 : ~uint64_t{0};
    third[lane] = is_in_the_second ? uint64_t{1} << (lane - 4) : 0;
  }
  EXPECT_EQ(words(0), first);
  EXPECT_EQ(kept.Next(64), 2 * BlockSparseMask::kKeys);
  EXPECT_EQ(words(2 * BlockSparseMask::kKeys), third);
}

}  // namespace
}  // namespace heed::softmax

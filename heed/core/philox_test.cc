// Philox4x32-10 against its published known answers.
#include "heed/core/philox.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdint>

namespace heed {
namespace {

using Counter = std::array<uint32_t, 4>;

// Random123, tests/kat_vectors, philox4x32 10.
TEST(PhiloxTest, GivesThePublishedAnswers) {
  EXPECT_EQ(Philox({0, 0, 0, 0}, {0, 0}), (Counter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(Philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, IsAConstantExpression) { static_assert(Philox({0, 0, 0, 0}, {0, 0})[0] == 0x6627e8d5); }

TEST(PhiloxTest, EveryBitOfCounterAndKeyChangesAboutHalfTheOutput) {
  const Counter counter{1, 2, 3, 4};
  const std::array<uint32_t, 2> key{5, 6};
  const Counter base = Philox(counter, key);
  for (size_t bit = 0; bit < 192; ++bit) {
    Counter c = counter;
    std::array<uint32_t, 2> k = key;
    (bit < 128 ? c[bit / 32] : k[(bit - 128) / 32]) ^= 1u << (bit % 32);
    const Counter other = Philox(c, k);
    int changed = 0;
    for (size_t i = 0; i < 4; ++i) changed += std::popcount(base[i] ^ other[i]);
    EXPECT_GT(changed, 32) << "bit " << bit;
    EXPECT_LT(changed, 96) << "bit " << bit;
  }
}

}  // namespace
}  // namespace heed

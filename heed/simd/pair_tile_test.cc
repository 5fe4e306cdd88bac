// Register tiles of bf16 pairs are chains of dot products, bit for bit: every shape and size, tiles of BFMMLA among
// them. ARM's products, emulated ones too (tests/emulated_bfmmla_test.cc), have the bits of their specification in
// scalars, and tiles of them the bits that QEMU's have.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "heed/core/os.h"
#include "heed/harness/buffer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/simd/pair_tile_test.cc"  // this file
#include "hwy/foreach_target.h"                           // IWYU pragma: keep
#include "hwy/aligned_allocator.h"
#include "hwy/highway.h"
#if HWY_TARGET == HEED_PAIR_TARGET
// After highway.h, and before others that are compiled per target:
#include "heed/simd/pair_products-inl.h"
// After pair_products-inl.h:
#include "heed/simd/pair_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::pair_tile_test::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

constexpr hn::ScalableTag<float> d;
constexpr size_t N = hn::MaxLanes(hn::ScalableTag<float>());

// Calls f(std::integral_constant<int, R>, std::integral_constant<int, C>).
template <class F>
void WithShape(int rows, int vectors, const F& f) {
  const auto with_rows = [&](auto r) {
    if (vectors == 1) f(r, std::integral_constant<int, 1>());
    if (vectors == 2) f(r, std::integral_constant<int, 2>());
    if (vectors == 3) f(r, std::integral_constant<int, 3>());
    if (vectors == 4) f(r, std::integral_constant<int, 4>());
  };
  if (rows == 1) with_rows(std::integral_constant<int, 1>());
  if (rows == 2) with_rows(std::integral_constant<int, 2>());
  if (rows == 4) with_rows(std::integral_constant<int, 4>());
  if (rows == 8) with_rows(std::integral_constant<int, 8>());
}

// ARM's products, which round to odd; x86's round to nearest.
constexpr bool kQuads = HEED_QUAD_PRODUCTS;

// acc + a.lower b.lower + a.upper b.upper in every lane.
float Dot(uint32_t a, uint32_t b, float acc) {
  const hn::RebindToUnsigned<decltype(d)> words;
  return hn::GetLane(hs::DotPairs(d, hn::Set(words, a), hn::Set(words, b), hn::Set(d, acc)));
}

// The word of (first, second), rounded to bf16.
uint32_t Pair(float first, float second) { return hn::GetLane(hs::ToPairs(d, hn::Set(d, first), hn::Set(d, second))); }

// Adds the products of two rows a and two lanes b, each of two words, to sums[row][lane].
void AddQuads([[maybe_unused]] const uint32_t* a, [[maybe_unused]] const uint32_t* b, [[maybe_unused]] float* sums) {
#if HEED_QUAD_PRODUCTS
  const hn::RebindToUnsigned<decltype(d)> words;
  hn::StoreU(hs::AddQuads(d, hn::LoadU(words, a), hn::LoadU(words, b), hn::LoadU(d, sums)), d, sums);
#endif
}

hwy::AlignedFreeUniquePtr<uint32_t[]> Arranged(const uint32_t* rows, size_t num_rows, size_t lanes) {
  auto arranged = hwy::AllocateAligned<uint32_t>(num_rows * lanes);
  std::copy_n(rows, num_rows * lanes, arranged.get());
  hs::ArrangeLanes(d, arranged.get(), lanes, num_rows, lanes);
  return arranged;
}

// The three products of tiles; arguments are those of pair_tile-inl.h, with rows of `lanes` words.
void Logits(int rows, int vectors, const uint32_t* q, size_t lanes, const BF16* k, ptrdiff_t k_stride, size_t depth,
            float* s) {
  const auto packed = Arranged(q, (depth + 1) / 2, lanes);
  WithShape(rows, vectors, [&](auto r, auto c) {
    hn::Vec<decltype(d)> max[c.value];
    for (auto& m : max) m = hn::Zero(d);
    hs::LogitPairTile<r.value, c.value>(d, packed.get(), lanes, k, k_stride, depth, s, max,
                                        [](auto x, int, int) { return x; });
  });
}

void Values(int rows, int vectors, bool skip_masked, const uint32_t* p, size_t lanes, const uint32_t* v,
            ptrdiff_t v_stride, size_t num_pairs, bool first, const float* rescale, float* o) {
  WithShape(rows, vectors, [&](auto r, auto c) {
    hn::Vec<decltype(d)> factors[c.value];
    for (size_t i = 0; i < size_t{c.value}; ++i) factors[i] = hn::Load(d, rescale + i * N);
    if (skip_masked) {
      hs::ValuePairTile<r.value, c.value, true>(d, p, lanes, v, v_stride, num_pairs, first, factors, o);
    } else {
      const auto arranged = Arranged(p, num_pairs, lanes);
      hs::ValuePairTile<r.value, c.value, false>(d, arranged.get(), lanes, v, v_stride, num_pairs, first, factors, o);
    }
  });
}

// For rows of `columns` words of b and of out.
void Accumulate(int rows, int vectors, bool skip_masked, const uint32_t* a, ptrdiff_t a_row, ptrdiff_t a_step,
                const uint32_t* b, size_t count, float* out) {
  const size_t columns = static_cast<size_t>(vectors) * N;
  auto b_step = static_cast<ptrdiff_t>(columns);
#if HEED_QUAD_PRODUCTS
  // Quads of two rows by two words, each step's for all rows. A word that does not exist is masked, its factors are 0.
  const auto num_rows = static_cast<size_t>(rows), steps = (count + 1) / 2, step = (num_rows + 1) / 2 * 4;
  const auto quads = hwy::AllocateAligned<uint32_t>(steps * step);
  std::fill_n(quads.get(), steps * step, hs::kNoPair);
  for (size_t i = 0; i < count; ++i) {
    for (size_t r = 0; r < num_rows; ++r) {
      quads[i / 2 * step + r / 2 * 4 + r % 2 * 2 + i % 2] =
          a[static_cast<ptrdiff_t>(r) * a_row + static_cast<ptrdiff_t>(i) * a_step];
    }
  }
  auto whole = hwy::AllocateAligned<uint32_t>(2 * steps * columns);
  std::fill_n(whole.get(), 2 * steps * columns, 0);
  std::copy_n(b, count * columns, whole.get());
  const auto arranged = Arranged(whole.get(), 2 * steps, columns);
  a = quads.get();
  a_row = 2;
  a_step = static_cast<ptrdiff_t>(step);
  b = arranged.get();
  b_step *= 2;
  count = steps;
#endif
  WithShape(rows, vectors, [&](auto r, auto c) {
    const auto accumulate = skip_masked ? &hs::AccumulatePairTile<r.value, c.value, true, decltype(d)>
                                        : &hs::AccumulatePairTile<r.value, c.value, false, decltype(d)>;
    accumulate(d, a, a_row, a_step, b, b_step, count, out, static_cast<ptrdiff_t>(columns));
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::pair_tile_test::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HEED_PAIR_TARGET

#if HWY_ONCE && (HWY_TARGETS & HEED_PAIR_TARGET)
namespace heed::pair_tile_test {
namespace {

using HEED_PAIR_NAMESPACE::Dot;
using HEED_PAIR_NAMESPACE::kQuads;
using HEED_PAIR_NAMESPACE::N;

uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }
bool Same(float a, float b) { return Bits(a) == Bits(b); }

// Subnormal numbers are zeros with their sign, every NaN is the default one.
float Flushed(float x) {
  if (std::isnan(x)) return std::bit_cast<float>(0x7FC00000u);
  return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
float Part(uint32_t word, int upper) { return Flushed(std::bit_cast<float>(upper ? word & 0xFFFF0000u : word << 16)); }

// a + b towards zero, with an odd last bit where that is not exact.
float AddToOdd(float a, float b) {
  const double x = a, y = b, sum = x + y;
  if (!std::isfinite(sum) || sum == 0) return Flushed(static_cast<float>(sum));
  const double of_y = sum - x, rest = (x - (sum - of_y)) + (y - of_y);
  auto bits = std::bit_cast<uint64_t>(sum);
  if (rest != 0) {
    if ((rest > 0) != (sum > 0)) --bits;
    bits |= 1;
  }
  constexpr uint64_t kDropped = (uint64_t{1} << 29) - 1;
  const double truncated = std::bit_cast<double>(bits & ~kDropped);
  if (std::abs(truncated) > std::numeric_limits<float>::max()) {
    return std::copysign(std::numeric_limits<float>::infinity(), static_cast<float>(sum));
  }
  if (std::abs(truncated) < std::numeric_limits<float>::min()) return std::copysign(0.0f, static_cast<float>(sum));
  const auto odd = static_cast<uint32_t>((bits & kDropped) != 0);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(truncated)) | odd);
}

// BFDotAdd of the Arm Architecture Reference Manual. Products of bf16 have 16 bits, so that they are exact.
float SpecifiedDot(uint32_t a, uint32_t b, float acc) {
  const float products = AddToOdd(Flushed(Part(a, 0) * Part(b, 0)), Flushed(Part(a, 1) * Part(b, 1)));
  return AddToOdd(Flushed(acc), products);
}

// BFCVT: to nearest even, a NaN is a quiet one.
uint32_t SpecifiedHalf(float x) {
  if (std::isnan(x)) return Bits(x) >> 16 | 0x40u;
  return (Bits(x) + 0x7FFFu + (Bits(x) >> 16 & 1u)) >> 16;
}

class PairTileTest : public testing::Test {
 protected:
  void SetUp() override {
    if ((hwy::SupportedTargets() & HEED_PAIR_CPUS) == 0) GTEST_SKIP() << "this CPU has no bf16 dot product";
  }

  // Adds to a hash of all results, FNV-1a.
  void Record(std::span<const float> results) {
    for (const float x : results) hash_ = (hash_ ^ Bits(x)) * 0x100000001B3u;
  }
  // ARM's products, emulated on x86 or by QEMU, give all results the same bits, and this hash.
  void ExpectHashOfQemu(uint64_t expected) const {
    if (kQuads) {
      EXPECT_EQ(hash_, expected) << std::hex << "0x" << hash_;
    }
  }

  // Calls f(random numbers, rows, vectors, size).
  template <class F>
  void ForShapes(const F& f) {
    uint64_t seed = 1;
    for (const int rows : {1, 2, 4, 8}) {
      for (const int vectors : {1, 2, 3, 4}) {
        for (const size_t size : {1, 2, 3, 4, 5, 6, 7, 8, 31, 64, 65, 130}) {
          SCOPED_TRACE(testing::Message() << rows << " rows, " << vectors << " vectors, size " << size);
          Random random(seed++);
          f(random, static_cast<size_t>(rows), static_cast<size_t>(vectors), size);
          if (HasFatalFailure()) return;
        }
      }
    }
  }

 private:
  uint64_t hash_ = 0xCBF29CE484222325u;
};

// bf16 before a guard page; as words, two of each.
struct Halves {
  Buffer buffer;

  Halves(Random& random, size_t count) : buffer(DType::kBF16, {static_cast<int64_t>(count)}) {
    buffer.FillNormal(random.Word());
  }
  BF16* data() const { return buffer.as<BF16>(); }
  const uint32_t* words() const { return reinterpret_cast<const uint32_t*>(data()); }
};

// Makes all products and sums -0, given factors a and b.
void MakeNegativeZeros(const Buffer& a, const Buffer& b, const Buffer& sums) {
  a.FillConstant(-0.0);
  for (int64_t i = 0; i < b.view().num_elements(); ++i) b.as<BF16>()[i].bits &= 0x7FFF;
  sums.FillConstant(-0.0);
}

Buffer Floats(Random& random, size_t count) {
  return Buffer(DType::kF32, {static_cast<int64_t>(count)}).FillNormal(random.Word());
}

// Operands of products of all sizes. Sums of two, and of them and acc, are seldom exact.
struct Products {
  Random& random;

  uint32_t Half(int64_t exponent) const {
    constexpr uint32_t kSpecial[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080,
                                     0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81};
    const uint32_t bits = random.Word();
    if (random.Chance(0.02)) return kSpecial[bits % std::size(kSpecial)];
    return (bits & 0x807Fu) | static_cast<uint32_t>(std::clamp<int64_t>(exponent, 0, 255)) << 7;
  }
  // Sets a and b to words whose products have about this exponent.
  void Words(int64_t exponent, uint32_t* a, uint32_t* b) const {
    const auto factors = [&](int shift) {
      const int64_t of_a = random.Integer(1, 254);
      *a |= Half(of_a) << shift;
      *b |= Half(exponent - of_a + 127 + random.Integer(-2, 2)) << shift;
    };
    *a = *b = 0;
    factors(0);
    factors(16);
  }
  float Sum(int64_t exponent) const {
    const uint32_t upper = Half(exponent + random.Integer(-20, 20));
    return std::bit_cast<float>(upper << 16 | (random.Word() & 0xFFFFu));
  }
  int64_t Exponent() const { return random.Integer(-10, 265); }
  // Sets acc to the largest number, and words whose products are of the size of its last bit.
  void Largest(uint32_t* a, uint32_t* b, float* acc) const {
    Words(random.Integer(228, 231), a, b);
    *acc = random.Pick({1.0f, -1.0f}) * std::numeric_limits<float>::max();
  }
};

// Calls f twice, the second time in an environment that flushes subnormal numbers.
template <class F>
void InBothEnvironments(const F& f) {
  f();
  const os::ScopedFloatControl flush;
  f();
}

TEST_F(PairTileTest, TheDotProductIsAsSpecified) {
  if (!kQuads) GTEST_SKIP() << "the specification is ARM's";
  Random random(1);
  const Products products{random};
  for (int i = 0; i < 200000; ++i) {
    const int64_t exponent = products.Exponent();
    uint32_t a, b;
    products.Words(exponent, &a, &b);
    float acc = products.Sum(exponent);
    if (random.Chance(0.05)) products.Largest(&a, &b, &acc);
    const float expected = SpecifiedDot(a, b, acc);
    InBothEnvironments([&] {
      const float sum = Dot(a, b, acc);
      ASSERT_EQ(Bits(sum), Bits(expected)) << std::hex << a << " " << b << " " << Bits(acc) << ": " << Bits(sum);
    });
    if (HasFatalFailure()) return;
  }
}

TEST_F(PairTileTest, AQuadIsTwoDotProducts) {
  if (!kQuads) GTEST_SKIP() << "x86 has no such product";
  Random random(2);
  const Products products{random};
  for (int i = 0; i < 20000; ++i) {
    const int64_t exponent = products.Exponent();
    uint32_t a[4], b[4];
    float before[4], sums[4];
    for (int j = 0; j < 4; ++j) {
      products.Words(exponent, a + j, b + j);
      before[j] = sums[j] = products.Sum(exponent);
    }
    HEED_PAIR_NAMESPACE::AddQuads(a, b, sums);
    for (int j = 0; j < 4; ++j) {
      const uint32_t *row = a + j / 2 * 2, *lane = b + j % 2 * 2;
      const float expected = SpecifiedDot(row[1], lane[1], SpecifiedDot(row[0], lane[0], before[j]));
      ASSERT_EQ(Bits(sums[j]), Bits(expected)) << "sum " << j;
    }
  }
}

TEST_F(PairTileTest, PairsAreRoundedAsSpecified) {
  if (!kQuads) GTEST_SKIP() << "the specification is ARM's";
  Random random(3);
  const auto number = [&] {
    const uint32_t bits = random.Word();
    return std::bit_cast<float>(random.Chance(0.2) ? (bits & 0xFFFF0000u) | 0x8000u : bits);  // ties are rare
  };
  for (int i = 0; i < 200000; ++i) {
    const float first = number(), second = number();
    ASSERT_EQ(HEED_PAIR_NAMESPACE::Pair(first, second), SpecifiedHalf(first) | SpecifiedHalf(second) << 16)
        << std::hex << Bits(first) << " " << Bits(second);
  }
}

TEST_F(PairTileTest, LogitsAreChains) {
  ForShapes([&](Random& random, size_t rows, size_t vectors, size_t depth) {
    const size_t lanes = vectors * N, num_pairs = (depth + 1) / 2;
    const Halves q(random, 2 * num_pairs * lanes), k(random, rows * depth);
    for (size_t lane = 0; lane < lanes && depth % 2 != 0; ++lane) {
      q.data()[2 * ((num_pairs - 1) * lanes + lane) + 1].bits = 0;
    }
    const Buffer s = Floats(random, rows * lanes);
    HEED_PAIR_NAMESPACE::Logits(static_cast<int>(rows), static_cast<int>(vectors), q.words(), lanes, k.data(),
                                static_cast<ptrdiff_t>(depth), depth, s.as<float>());
    for (size_t r = 0; r < rows; ++r) {
      for (size_t lane = 0; lane < lanes; ++lane) {
        float sum = 0;
        for (size_t i = 0; i < num_pairs; ++i) {
          const BF16* at = k.data() + r * depth + 2 * i;
          const uint32_t upper = 2 * i + 1 < depth ? at[1].bits : 0;
          sum = Dot(at->bits | upper << 16, q.words()[i * lanes + lane], sum);
        }
        ASSERT_TRUE(Same(s.as<float>()[r * lanes + lane], sum)) << "row " << r << " lane " << lane;
      }
    }
    Record({s.as<float>(), rows * lanes});
  });
  ExpectHashOfQemu(0xC79CAC93303E5570);
}

TEST_F(PairTileTest, ValuesAreChains) {
  ForShapes([&](Random& random, size_t rows, size_t vectors, size_t num_pairs) {
    const size_t lanes = vectors * N;
    const Halves p(random, 2 * num_pairs * lanes), v(random, 2 * num_pairs * rows);
    const bool skips = random.Chance(0.3), first = random.Chance(0.3);
    for (size_t i = 0; i < 2 * num_pairs * lanes; ++i) {
      p.data()[i].bits &= 0x7FFF;
      if (random.Chance(0.2)) p.data()[i].bits = 0x8000;  // masked
    }
    if (skips) v.data()[random.Word() % (2 * num_pairs * rows)].bits = 0x7F80;
    const Buffer rescale = Floats(random, lanes), o = Floats(random, rows * lanes);
    if (random.Chance(0.1)) {
      MakeNegativeZeros(v.buffer, p.buffer, o);
      rescale.FillConstant(0.5);
    }
    const std::vector<float> before(o.as<float>(), o.as<float>() + rows * lanes);
    HEED_PAIR_NAMESPACE::Values(static_cast<int>(rows), static_cast<int>(vectors), skips, p.words(), lanes, v.words(),
                                static_cast<ptrdiff_t>(rows), num_pairs, first, rescale.as<float>(), o.as<float>());
    for (size_t r = 0; r < rows; ++r) {
      for (size_t lane = 0; lane < lanes; ++lane) {
        float sum = first ? 0 : before[r * lanes + lane] * rescale.as<float>()[lane];
        for (size_t j = 0; j < num_pairs; ++j) {
          const uint32_t weights = p.words()[j * lanes + lane];
          uint32_t values = v.words()[j * rows + r];
          if (skips && (weights & 0x8000u) != 0) values &= 0xFFFF0000u;
          if (skips && (weights & 0x80000000u) != 0) values &= 0xFFFFu;
          sum = Dot(values, weights, sum);
        }
        ASSERT_TRUE(Same(o.as<float>()[r * lanes + lane], sum)) << "row " << r << " lane " << lane;
      }
    }
    Record({o.as<float>(), rows * lanes});
  });
  ExpectHashOfQemu(0xAC0A0E779FFAD8A4);
}

TEST_F(PairTileTest, AccumulatedRowsAreChains) {
  ForShapes([&](Random& random, size_t rows, size_t vectors, size_t count) {
    const size_t columns = vectors * N;
    const bool by_column = random.Chance(0.5);
    const ptrdiff_t a_row = by_column ? 1 : static_cast<ptrdiff_t>(count),
                    a_step = by_column ? static_cast<ptrdiff_t>(rows) : -1;
    const Halves a(random, 2 * rows * count), b(random, 2 * count * columns);
    const uint32_t* first = by_column ? a.words() : a.words() + count - 1;
    const Buffer out = Floats(random, rows * columns);
    const bool skips = random.Chance(0.3);
    for (size_t i = 0; skips && i < 2 * rows * count; ++i) {
      if (random.Chance(0.2)) a.data()[i].bits = 0x8000;  // masked
    }
    if (skips) b.data()[random.Word() % (2 * count * columns)].bits = 0x7F80;
    if (random.Chance(0.1)) MakeNegativeZeros(a.buffer, b.buffer, out);
    const std::vector<float> before(out.as<float>(), out.as<float>() + rows * columns);
    HEED_PAIR_NAMESPACE::Accumulate(static_cast<int>(rows), static_cast<int>(vectors), skips, first, a_row, a_step,
                                    b.words(), count, out.as<float>());
    for (size_t r = 0; r < rows; ++r) {
      for (size_t c = 0; c < columns; ++c) {
        float sum = before[r * columns + c];
        for (size_t i = 0; i < count; ++i) {
          const uint32_t factor = first[static_cast<ptrdiff_t>(r) * a_row + static_cast<ptrdiff_t>(i) * a_step];
          uint32_t word = b.words()[i * columns + c];
          if (skips && (factor & 0xFFFFu) == 0x8000u) word &= 0xFFFF0000u;
          if (skips && factor >> 16 == 0x8000u) word &= 0xFFFFu;
          sum = Dot(factor, word, sum);
        }
        ASSERT_TRUE(Same(out.as<float>()[r * columns + c], sum)) << "row " << r << " column " << c;
      }
    }
    Record({out.as<float>(), rows * columns});
  });
  ExpectHashOfQemu(0x2A83038B0200435D);
}

}  // namespace
}  // namespace heed::pair_tile_test
#endif  // HWY_ONCE && (HWY_TARGETS & HEED_PAIR_TARGET)

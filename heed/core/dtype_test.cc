// Conversions of every 16-bit pattern and at every rounding boundary, compared with arithmetic in double that shares no
// code with the conversions.
#include "heed/core/dtype.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "heed/core/error.h"

namespace heed {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr DType kAll[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kI64, DType::kI32, DType::kBool};

// The value of a 16-bit float with `kMantissa` explicit bits, from the definition of the format.
template <int kMantissa>
double Value(uint32_t bits) {
  constexpr int kExponent = 15 - kMantissa;
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  const double sign = (bits >> 15) != 0 ? -1.0 : 1.0;
  const int e = static_cast<int>(bits >> kMantissa) & ((1 << kExponent) - 1);
  const double m = static_cast<double>(bits & ((1u << kMantissa) - 1));
  const double scale = std::exp2(kMantissa);
  if (e == (1 << kExponent) - 1) {
    return m == 0 ? sign * HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  }
  if (e == 0) return sign * (m / scale) * std::exp2(1 - kBias);
  return sign * (1 + m / scale) * std::exp2(e - kBias);
}

struct Half {
  static constexpr int kMantissa = 10;
  static constexpr DType kDType = DType::kF16;
  static float Widen(uint32_t b) { return ToFloat(F16{static_cast<uint16_t>(b)}); }
  static uint16_t Narrow(float x) { return ToF16(x).bits; }
};
struct Brain {
  static constexpr int kMantissa = 7;
  static constexpr DType kDType = DType::kBF16;
  static float Widen(uint32_t b) { return ToFloat(BF16{static_cast<uint16_t>(b)}); }
  static uint16_t Narrow(float x) { return ToBF16(x).bits; }
};

template <class T>
class SixteenBitTest : public testing::Test {
 protected:
  static constexpr uint32_t kInfinity = 0x7FFFu >> T::kMantissa << T::kMantissa;
  static double ValueOf(uint32_t bits) { return Value<T::kMantissa>(bits); }
  static uint16_t FromDouble(double x) {
    uint16_t bits = 0xABCD;
    StoreDouble(T::kDType, &bits, 0, x);
    return bits;
  }
  // The value at which rounding from `bits` changes to the next pattern. The exponent range is extended beyond the
  // largest finite pattern.
  static double Middle(uint32_t bits) {
    const double low = ValueOf(bits);
    return bits + 1 < kInfinity ? (low + ValueOf(bits + 1)) / 2 : low + (low - ValueOf(bits - 1)) / 2;
  }
};
using SixteenBits = testing::Types<Half, Brain>;
TYPED_TEST_SUITE(SixteenBitTest, SixteenBits);

TYPED_TEST(SixteenBitTest, EveryPatternWidensToItsValueAndBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float wide = TypeParam::Widen(bits);
    const double expected = this->ValueOf(bits);
    const uint16_t stored = static_cast<uint16_t>(bits);
    const double loaded = LoadAsDouble(TypeParam::kDType, &stored, 0);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(wide) && std::isnan(loaded)) << bits;
      const uint32_t back = TypeParam::Narrow(wide);
      ASSERT_TRUE(std::isnan(this->ValueOf(back))) << bits;
      ASSERT_EQ(back >> 15, bits >> 15);
      continue;
    }
    ASSERT_EQ(wide, expected) << bits;
    ASSERT_EQ(loaded, expected) << bits;
    ASSERT_EQ(std::signbit(wide), bits >= 0x8000) << bits;
    ASSERT_EQ(TypeParam::Narrow(wide), bits);
    ASSERT_EQ(this->FromDouble(expected), bits);
  }
}

TYPED_TEST(SixteenBitTest, TiesGoToTheEvenNeighbourAndAllElseToTheNearest) {
  for (uint32_t bits = 0; bits < this->kInfinity; ++bits) {
    const double middle = this->Middle(bits);
    const float tie = static_cast<float>(middle);
    ASSERT_EQ(tie, middle) << "ties are exact in f32";
    const uint32_t even = bits + (bits & 1);
    for (const uint32_t sign : {0u, 0x8000u}) {
      const float s = sign != 0 ? -1.0f : 1.0f;
      ASSERT_EQ(TypeParam::Narrow(s * tie), even | sign);
      ASSERT_EQ(TypeParam::Narrow(s * std::nextafter(tie, 0.0f)), bits | sign);
      ASSERT_EQ(TypeParam::Narrow(s * std::nextafter(tie, HUGE_VALF)), (bits + 1) | sign);
      // A double is rounded once: a distance of 2^-52 from the tie decides.
      ASSERT_EQ(this->FromDouble(s * middle), even | sign);
      ASSERT_EQ(this->FromDouble(s * std::nextafter(middle, 0.0)), bits | sign);
      ASSERT_EQ(this->FromDouble(s * std::nextafter(middle, HUGE_VAL)), (bits + 1) | sign);
    }
  }
}

TYPED_TEST(SixteenBitTest, ExtremesOfFloatAndDouble) {
  const uint32_t inf = this->kInfinity;
  EXPECT_EQ(TypeParam::Narrow(HUGE_VALF), inf);
  EXPECT_EQ(TypeParam::Narrow(-HUGE_VALF), inf | 0x8000);
  EXPECT_EQ(TypeParam::Narrow(std::numeric_limits<float>::max()), inf);
  EXPECT_EQ(this->FromDouble(std::numeric_limits<double>::max()), inf);
  EXPECT_EQ(this->FromDouble(-std::numeric_limits<double>::max()), inf | 0x8000);
  EXPECT_EQ(this->FromDouble(std::numeric_limits<double>::denorm_min()), 0);
  EXPECT_EQ(this->FromDouble(-std::numeric_limits<double>::denorm_min()), 0x8000);
  EXPECT_EQ(TypeParam::Narrow(std::numeric_limits<float>::denorm_min()), 0);
  for (const uint32_t payload : {0x7F800001u, 0x7FC00000u, 0xFF800001u, 0xFFFFFFFFu, 0x7F80FFFFu}) {
    const uint32_t narrow = TypeParam::Narrow(std::bit_cast<float>(payload));
    EXPECT_TRUE(std::isnan(this->ValueOf(narrow))) << payload;
    EXPECT_EQ(narrow >> 15, payload >> 31);
  }
}

TYPED_TEST(SixteenBitTest, RandomFloatsGoToTheNearestPattern) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!(std::abs(x) < this->Middle(this->kInfinity - 1))) continue;
    const uint32_t bits = TypeParam::Narrow(x) & 0x7FFF;
    ASSERT_LT(bits, this->kInfinity);
    const double a = std::abs(static_cast<double>(x));
    const double error = std::abs(this->ValueOf(bits) - a);
    ASSERT_LE(error, std::abs(this->ValueOf(bits + 1) - a)) << x;
    if (bits == 0) continue;
    ASSERT_LE(error, std::abs(this->ValueOf(bits - 1) - a)) << x;
  }
}

TYPED_TEST(SixteenBitTest, RoundingIsToNearestWhateverTheThreadHasSet) {
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    std::vector<uint16_t> got;
    std::fesetround(mode);
    for (uint32_t bits = 0; bits < 0x7F00; bits += 7) {
      const float x = TypeParam::Widen(bits);
      const uint32_t next = std::bit_cast<uint32_t>(x) + 0x123;
      got.push_back(TypeParam::Narrow(std::bit_cast<float>(next)));
    }
    std::fesetround(FE_TONEAREST);
    for (uint32_t bits = 0, i = 0; bits < 0x7F00; bits += 7, ++i) {
      const float x = TypeParam::Widen(bits);
      const uint32_t next = std::bit_cast<uint32_t>(x) + 0x123;
      ASSERT_EQ(got[i], TypeParam::Narrow(std::bit_cast<float>(next))) << bits;
    }
  }
}

TEST(DTypeTest, NamesAndSizesAreThoseOfTheTable) {
  const char* const names[] = {"f64", "f32", "bf16", "f16", "i64", "i32", "bool"};
  const size_t sizes[] = {8, 4, 2, 2, 8, 4, 1};
  for (size_t i = 0; i < std::size(kAll); ++i) {
    EXPECT_STREQ(Name(kAll[i]), names[i]);
    EXPECT_EQ(SizeOf(kAll[i]), sizes[i]);
    EXPECT_EQ(DTypeFromName(names[i]), kAll[i]);
    EXPECT_EQ(IsFloat(kAll[i]), i < 4);
  }
}

TEST(DTypeTest, UnknownNameIsRejectedWithTheListOfNames) {
  for (const char* name : {"", "F32", "f32 ", "float", "f8"}) {
    EXPECT_THAT([&] { DTypeFromName(name); },
                ThrowsMessage<InvalidArgument>("dtype is '" + std::string(name) +
                                               "', expected f64, f32, bf16, f16, i64, i32 or bool"));
  }
}

TEST(DTypeTest, LoadAndStoreReachNegativeAndUnalignedElements) {
  alignas(8) char bytes[64] = {};
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    char* const middle = bytes + 33;
    StoreDouble(dtype, middle, -2, 1.5);
    StoreDouble(dtype, middle, 1, -0.25);
    EXPECT_EQ(LoadAsDouble(dtype, middle, -2), 1.5);
    EXPECT_EQ(LoadAsDouble(dtype, middle, 1), -0.25);
  }
  const int64_t i64[] = {-1, std::numeric_limits<int64_t>::min()};
  const int32_t i32[] = {7, std::numeric_limits<int32_t>::min()};
  const uint8_t bools[] = {0, 1, 2, 255};
  EXPECT_EQ(LoadAsInt64(DType::kI64, i64 + 1, -1), -1);
  EXPECT_EQ(LoadAsInt64(DType::kI64, i64, 1), i64[1]);
  EXPECT_EQ(LoadAsInt64(DType::kI32, i32, 1), int64_t{-2147483648});
  EXPECT_EQ(LoadAsInt64(DType::kBool, bools, 0), 0);
  for (int64_t i = 1; i < 4; ++i) {
    EXPECT_EQ(LoadAsInt64(DType::kBool, bools, i), 1);
  }
}

TEST(DTypeTest, StoreDoubleToF32RoundsOnce) {
  float f = 0;
  StoreDouble(DType::kF32, &f, 0, 1 + std::exp2(-24));
  EXPECT_EQ(f, 1.0f);
  StoreDouble(DType::kF32, &f, 0, 1 + std::exp2(-24) + std::exp2(-52));
  EXPECT_EQ(f, std::nextafter(1.0f, 2.0f));
}

TEST(DTypeTest, TheWrongKindIsAnInternalError) {
  double x = 0;
  for (const DType dtype : {DType::kI64, DType::kI32, DType::kBool}) {
    EXPECT_THROW(LoadAsDouble(dtype, &x, 0), InternalError);
    EXPECT_THROW(StoreDouble(dtype, &x, 0, 1.0), InternalError);
  }
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    EXPECT_THROW(LoadAsInt64(dtype, &x, 0), InternalError);
  }
}

}  // namespace
}  // namespace heed

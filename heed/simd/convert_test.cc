// Widening and rounding against dtype.h on every SIMD target: all 16-bit values, and f32 values around every rounding
// boundary.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "heed/core/dispatch.h"
#include "heed/core/dtype.h"
#include "heed/core/os.h"
#include "heed/core/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/simd/convert_test.cc"  // this file
#include "hwy/foreach_target.h"                         // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::convert_test::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Widens the whole array by full vectors, and its end by partial ones.
template <class S>
void WidenAll(const S* from, size_t count, float* to) {
  const hn::ScalableTag<float> d;
  constexpr size_t N = hn::MaxLanes(d);
  size_t i = 0;
  for (; i + N <= count; i += N) {
    hn::StoreU(heed::HWY_NAMESPACE::LoadWide(d, from + i), d, to + i);
  }
  if (i < count) {
    hn::StoreN(heed::HWY_NAMESPACE::LoadWideN(d, from + i, count - i), d, to + i, count - i);
  }
}

template <class S>
void RoundAll(const float* from, size_t count, S* to) {
  const hn::ScalableTag<float> d;
  constexpr size_t N = hn::MaxLanes(d);
  for (size_t i = 0; i < count; i += N) {
    const size_t n = HWY_MIN(N, count - i);
    heed::HWY_NAMESPACE::StoreRounded(d, hn::LoadN(d, from + i, n), to + i, n);
  }
}

void WidenBF16(const BF16* from, size_t n, float* to) { WidenAll(from, n, to); }
void WidenF16(const F16* from, size_t n, float* to) { WidenAll(from, n, to); }
void RoundBF16(const float* from, size_t n, BF16* to) { RoundAll(from, n, to); }
void RoundF16(const float* from, size_t n, F16* to) { RoundAll(from, n, to); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::convert_test::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed {
namespace convert_test {
HWY_EXPORT(WidenBF16);
HWY_EXPORT(WidenF16);
HWY_EXPORT(RoundBF16);
HWY_EXPORT(RoundF16);
}  // namespace convert_test

namespace {

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

bool IsNaN(float x) { return x != x; }

// Every value of S, and the f32 values next to it and next to the midpoints between it and its neighbours.
template <class S>
std::vector<float> BoundaryValues() {
  std::vector<float> values;
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float x = ToFloat(S{static_cast<uint16_t>(h)});
    const float next = ToFloat(S{static_cast<uint16_t>(h + 1)});
    const uint32_t middle = static_cast<uint32_t>((uint64_t{Bits(x)} + Bits(next)) / 2);
    for (const uint32_t bits : {Bits(x), middle}) {
      for (int step = -1; step <= 1; ++step) {
        values.push_back(FromBits(bits + static_cast<uint32_t>(step)));
      }
    }
  }
  return values;
}

template <class S, class Widen, class Round, class To>
void Check(const std::string& target, Widen widen, Round round, To to) {
  SCOPED_TRACE(target + " " + Name(DTypeOf<S>::value));
  std::vector<S> all(0x10000 + 5);  // a remainder for every vector length
  for (size_t i = 0; i < all.size(); ++i) all[i] = {static_cast<uint16_t>(i)};
  const std::vector<float> values = BoundaryValues<S>();
  std::vector<float> widened(all.size());
  std::vector<S> rounded(values.size());
  for (const bool flush : {false, true}) {
    if (flush) {
      const os::ScopedFloatControl control;
      widen(all.data(), all.size(), widened.data());
      round(values.data(), values.size(), rounded.data());
    } else {
      widen(all.data(), all.size(), widened.data());
      round(values.data(), values.size(), rounded.data());
    }
    for (size_t i = 0; i < all.size(); ++i) {
      const float expected = ToFloat(all[i]);
      ASSERT_TRUE(IsNaN(expected) ? IsNaN(widened[i]) : Bits(widened[i]) == Bits(expected))
          << i << ": " << widened[i] << " instead of " << expected;
    }
    for (size_t i = 0; i < values.size(); ++i) {
      const S expected = to(values[i]);
      if (IsNaN(values[i])) {
        ASSERT_TRUE(IsNaN(ToFloat(rounded[i]))) << i;
      } else {
        ASSERT_EQ(rounded[i].bits, expected.bits) << values[i];
      }
    }
  }
}

TEST(ConvertTest, EveryValueAndEveryBoundaryOnEveryTarget) {
  for (const std::string& target : AvailableTargets()) {
    const size_t index = TargetIndex(TargetsUpTo(target));
    using namespace convert_test;  // NOLINT: the tables
    Check<BF16>(target, HWY_DISPATCH_TABLE(WidenBF16)[index], HWY_DISPATCH_TABLE(RoundBF16)[index],
                [](float x) { return ToBF16(x); });
    Check<F16>(target, HWY_DISPATCH_TABLE(WidenF16)[index], HWY_DISPATCH_TABLE(RoundF16)[index],
               [](float x) { return ToF16(x); });
  }
}

}  // namespace
}  // namespace heed
#endif  // HWY_ONCE

// Transposes move every bit of every element to its place: each element type and each number of lanes, on every SIMD
// target.
#include "heed/core/targets.h"
// After targets.h:
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/simd/transpose_test.cc"  // this file
#include "hwy/foreach_target.h"                           // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::transpose_test::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Distinct bits in every element, including NaNs.
template <class T>
uint64_t Pattern(size_t i, size_t j) {
  const uint64_t bits = 0xFFFFFFF0FFFFFFF0u - (i * 64 + j) * 0x0001000100010001u;
  return sizeof(T) == 8 ? bits : static_cast<uint32_t>(bits);
}

// Number of wrong elements.
template <class D>
int64_t WrongElements(D d) {
  using T = hn::TFromD<D>;
  using TU = hwy::MakeUnsigned<T>;
  constexpr size_t N = hn::MaxLanes(D());
  const hn::RebindToUnsigned<D> du;
  HWY_ALIGN TU memory[N * N];
  for (size_t i = 0; i < N; ++i) {
    for (size_t j = 0; j < N; ++j) {
      memory[i * N + j] = static_cast<TU>(Pattern<T>(i, j));
    }
  }
  hn::Vec<D> v[N];
  for (size_t i = 0; i < N; ++i) {
    v[i] = hn::BitCast(d, hn::Load(du, memory + i * N));
  }
  heed::HWY_NAMESPACE::Transpose(d, v);
  for (size_t i = 0; i < N; ++i) {
    hn::Store(hn::BitCast(du, v[i]), du, memory + i * N);
  }
  int64_t wrong = 0;
  for (size_t i = 0; i < N; ++i) {
    for (size_t j = 0; j < N; ++j) {
      wrong += memory[i * N + j] != static_cast<TU>(Pattern<T>(j, i));
    }
  }
  return wrong;
}

// All lane counts up to the target's.
template <class T>
int64_t WrongOfType() {
  constexpr size_t kMax = hn::MaxLanes(hn::ScalableTag<T>());
  constexpr size_t kBlock = HWY_MIN(kMax, 16 / sizeof(T));
  int64_t wrong = WrongElements(hn::ScalableTag<T>());
  wrong += WrongElements(hn::CappedTag<T, kBlock>());
  wrong += WrongElements(hn::CappedTag<T, HWY_MIN(kMax, 2 * kBlock)>());
  return wrong;
}

int64_t Wrong() {
  return WrongOfType<float>() + WrongOfType<double>() + WrongOfType<int32_t>() + WrongOfType<uint32_t>() +
         WrongOfType<int64_t>() + WrongOfType<uint64_t>();
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::transpose_test::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::transpose_test {

HWY_EXPORT(Wrong);

namespace {

TEST(TransposeTest, EveryElementFindsItsPlace) {
  for (const std::string& target : AvailableTargets()) {
    EXPECT_EQ(HWY_DISPATCH_TABLE(Wrong)[TargetIndex(TargetsUpTo(target))](), 0) << target;
  }
}

}  // namespace
}  // namespace heed::transpose_test
#endif  // HWY_ONCE

// Philox on vectors equals the scalar version in every lane, on every SIMD target, for both vector widths that kernels
// use.
#include "heed/core/targets.h"
// After targets.h:
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>

#include "heed/core/dispatch.h"
#include "heed/core/philox.h"
#include "heed/harness/buffer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/simd/philox_test.cc"  // this file
#include "hwy/foreach_target.h"                        // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/philox-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::philox_test::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Writes words 0 to 3 of all lanes, one after another; returns the number of lanes.
template <class D>
size_t Words(D d, uint32_t c0, const uint32_t* c1, const uint32_t* c2, uint32_t c3, uint32_t k0, uint32_t k1,
             uint32_t* words) {
  hn::Vec<D> v[4];
  heed::HWY_NAMESPACE::Philox(d, c0, hn::LoadU(d, c1), hn::LoadU(d, c2), c3, k0, k1, v);
  const size_t N = hn::Lanes(d);
  for (size_t i = 0; i < 4; ++i) hn::StoreU(v[i], d, words + i * N);
  return N;
}

size_t Whole(uint32_t c0, const uint32_t* c1, const uint32_t* c2, uint32_t c3, uint32_t k0, uint32_t k1,
             uint32_t* words) {
  return Words(hn::ScalableTag<uint32_t>(), c0, c1, c2, c3, k0, k1, words);
}

// Uses as many lanes as there are doubles in a vector.
size_t Half(uint32_t c0, const uint32_t* c1, const uint32_t* c2, uint32_t c3, uint32_t k0, uint32_t k1,
            uint32_t* words) {
  return Words(hn::Rebind<uint32_t, hn::ScalableTag<double>>(), c0, c1, c2, c3, k0, k1, words);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::philox_test::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::philox_test {

HWY_EXPORT(Whole);
HWY_EXPORT(Half);

namespace {

TEST(PhiloxVectorTest, EveryLaneEqualsTheScalarForm) {
  constexpr size_t kMaxLanes = 64;
  Random random(7);
  const auto word = [&] {
    return random.Pick<uint32_t>({0, 1, 0x80000000u, 0xFFFFFFFFu, random.Word(), random.Word()});
  };
  for (const std::string& target : AvailableTargets()) {
    const size_t index = TargetIndex(TargetsUpTo(target));
    for (int round = 0; round < 500; ++round) {
      const uint32_t c0 = word(), c3 = word(), k0 = word(), k1 = word();
      uint32_t c1[kMaxLanes], c2[kMaxLanes], words[4 * kMaxLanes];
      for (size_t i = 0; i < kMaxLanes; ++i) {
        c1[i] = word();
        c2[i] = word();
      }
      for (const bool half : {false, true}) {
        const size_t N = half ? HWY_DISPATCH_TABLE(Half)[index](c0, c1, c2, c3, k0, k1, words)
                              : HWY_DISPATCH_TABLE(Whole)[index](c0, c1, c2, c3, k0, k1, words);
        for (size_t lane = 0; lane < N; ++lane) {
          const std::array<uint32_t, 4> got = {words[lane], words[N + lane], words[2 * N + lane], words[3 * N + lane]};
          ASSERT_EQ(got, Philox({c0, c1[lane], c2[lane], c3}, {k0, k1})) << target << " lane " << lane << " of " << N;
        }
      }
    }
  }
}

}  // namespace
}  // namespace heed::philox_test
#endif  // HWY_ONCE

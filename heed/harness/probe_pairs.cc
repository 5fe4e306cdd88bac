// The probe of bf16 dot products, for the targets that have kernels on them.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/harness/probe_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/harness/probe_pairs.cc"  // this file
#include "hwy/foreach_target.h"                           // IWYU pragma: keep
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3_ZEN4
// After highway.h:
#include "heed/simd/pair_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::probe::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

// The number of chains is that of the FMA probe, each a variable of its own.
double Chains(int64_t iterations, double x_value, double y_value, double* flops) {
  const hn::ScalableTag<float> d;
  const auto first = hn::Set(d, static_cast<float>(x_value));
  const auto second = hn::Set(d, static_cast<float>(y_value));
  const auto x = hs::ToPairs(d, second, first), y = hs::ToPairs(d, second, second);
  auto a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0;
  auto a6 = a0, a7 = a0, a8 = a0, a9 = a0, a10 = a0, a11 = a0;
  for (int64_t i = 0; i < iterations; ++i) {
    a0 = hs::DotPairs(d, x, y, a0);
    a1 = hs::DotPairs(d, x, y, a1);
    a2 = hs::DotPairs(d, x, y, a2);
    a3 = hs::DotPairs(d, x, y, a3);
    a4 = hs::DotPairs(d, x, y, a4);
    a5 = hs::DotPairs(d, x, y, a5);
    a6 = hs::DotPairs(d, x, y, a6);
    a7 = hs::DotPairs(d, x, y, a7);
    a8 = hs::DotPairs(d, x, y, a8);
    a9 = hs::DotPairs(d, x, y, a9);
    a10 = hs::DotPairs(d, x, y, a10);
    a11 = hs::DotPairs(d, x, y, a11);
    // The chains have equal values, and a compiler would otherwise run one of them once.
    asm volatile("" : "+v"(a0.raw), "+v"(a1.raw), "+v"(a2.raw), "+v"(a3.raw));
    asm volatile("" : "+v"(a4.raw), "+v"(a5.raw), "+v"(a6.raw), "+v"(a7.raw));
    asm volatile("" : "+v"(a8.raw), "+v"(a9.raw), "+v"(a10.raw), "+v"(a11.raw));
  }
  *flops = 4.0 * 12.0 * static_cast<double>(hn::Lanes(d)) * static_cast<double>(iterations);
  const auto b0 = hn::Add(hn::Add(a0, a1), hn::Add(a2, a3));
  const auto b1 = hn::Add(hn::Add(a4, a5), hn::Add(a6, a7));
  const auto b2 = hn::Add(hn::Add(a8, a9), hn::Add(a10, a11));
  return hn::ReduceSum(d, hn::Add(hn::Add(b0, b1), b2));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::probe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3_ZEN4

#if HWY_ONCE
namespace heed::probe {

Chains PairChains() {
#if HWY_TARGETS & HWY_AVX3_ZEN4
  return &N_AVX3_ZEN4::Chains;
#else
  return nullptr;
#endif
}

}  // namespace heed::probe
#endif  // HWY_ONCE

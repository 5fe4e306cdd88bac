// The probe of bf16 products, for the targets that have kernels on them.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/harness/probe_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/harness/probe_pairs.cc"  // this file
#include "hwy/foreach_target.h"                           // IWYU pragma: keep
#include "hwy/highway.h"
#if HWY_TARGET == HEED_PAIR_TARGET
// After highway.h:
#include "heed/simd/pair_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::probe::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

// The instruction with the most products, and its flops per lane.
#if HEED_QUAD_PRODUCTS
constexpr double kFlopsPerLane = 8;
#define HEED_MULTIPLY hs::AddQuads
#define HEED_IN_REGISTER(x) "+w"(x.raw)
#else
constexpr double kFlopsPerLane = 4;
#define HEED_MULTIPLY hs::DotPairs
#define HEED_IN_REGISTER(x) "+v"(x.raw)
#endif

// The number of chains is that of the FMA probe, each a variable of its own.
double Chains(int64_t iterations, double x_value, double y_value, double* flops) {
  const hn::ScalableTag<float> d;
  const auto first = hn::Set(d, static_cast<float>(x_value));
  const auto second = hn::Set(d, static_cast<float>(y_value));
  const auto x = hs::ToPairs(d, second, first), y = hs::ToPairs(d, second, second);
  auto a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0;
  auto a6 = a0, a7 = a0, a8 = a0, a9 = a0, a10 = a0, a11 = a0;
  for (int64_t i = 0; i < iterations; ++i) {
    a0 = HEED_MULTIPLY(d, x, y, a0);
    a1 = HEED_MULTIPLY(d, x, y, a1);
    a2 = HEED_MULTIPLY(d, x, y, a2);
    a3 = HEED_MULTIPLY(d, x, y, a3);
    a4 = HEED_MULTIPLY(d, x, y, a4);
    a5 = HEED_MULTIPLY(d, x, y, a5);
    a6 = HEED_MULTIPLY(d, x, y, a6);
    a7 = HEED_MULTIPLY(d, x, y, a7);
    a8 = HEED_MULTIPLY(d, x, y, a8);
    a9 = HEED_MULTIPLY(d, x, y, a9);
    a10 = HEED_MULTIPLY(d, x, y, a10);
    a11 = HEED_MULTIPLY(d, x, y, a11);
    // The chains have equal values, and a compiler would otherwise run one of them once.
    asm volatile("" : HEED_IN_REGISTER(a0), HEED_IN_REGISTER(a1), HEED_IN_REGISTER(a2), HEED_IN_REGISTER(a3));
    asm volatile("" : HEED_IN_REGISTER(a4), HEED_IN_REGISTER(a5), HEED_IN_REGISTER(a6), HEED_IN_REGISTER(a7));
    asm volatile("" : HEED_IN_REGISTER(a8), HEED_IN_REGISTER(a9), HEED_IN_REGISTER(a10), HEED_IN_REGISTER(a11));
  }
  *flops = kFlopsPerLane * 12 * static_cast<double>(hn::Lanes(d)) * static_cast<double>(iterations);
  const auto b0 = hn::Add(hn::Add(a0, a1), hn::Add(a2, a3));
  const auto b1 = hn::Add(hn::Add(a4, a5), hn::Add(a6, a7));
  const auto b2 = hn::Add(hn::Add(a8, a9), hn::Add(a10, a11));
  return hn::ReduceSum(d, hn::Add(hn::Add(b0, b1), b2));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::probe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HEED_PAIR_TARGET

#if HWY_ONCE
namespace heed::probe {

Chains PairChains() {
#if HWY_TARGETS & HEED_PAIR_TARGET
  return &HEED_PAIR_NAMESPACE::Chains;
#else
  return nullptr;
#endif
}

}  // namespace heed::probe
#endif  // HWY_ONCE

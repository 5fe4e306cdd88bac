// The decode kernel for bf16 on CPUs whose bf16 dot product outruns their FMA.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/decode_bf16_pairs.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3_ZEN4
// After highway.h:
#include "heed/engines/softmax/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

void RunBF16Pairs(Context& ctx, const Problem& problem) {
  Decode<PairDecodeOperands>(ctx, problem);
}

int64_t ScratchBF16Pairs(const Problem& problem, int num_threads) {
  using O = PairDecodeOperands;
  return ScratchBytes<O>(problem, DecodePlan<O>(problem), num_threads);
}

int64_t RowsBF16Pairs() { return DecodeRows<PairDecodeOperands>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3_ZEN4

#if HWY_ONCE
namespace heed::softmax {

#if HWY_TARGETS & HWY_AVX3_ZEN4

void DecodeBF16Pairs(Context& ctx, const Problem& problem) {
  N_AVX3_ZEN4::RunBF16Pairs(ctx, problem);
}

int64_t DecodeWorkspaceBF16Pairs(const Context& ctx, const Problem& problem) {
  return N_AVX3_ZEN4::ScratchBF16Pairs(problem, ctx.num_threads());
}

int64_t DecodeRowsBF16Pairs(const Context&, const Problem&) {
  return N_AVX3_ZEN4::RowsBF16Pairs();
}

#else  // never called

void DecodeBF16Pairs(Context&, const Problem&) {}
int64_t DecodeWorkspaceBF16Pairs(const Context&, const Problem&) { return 0; }
int64_t DecodeRowsBF16Pairs(const Context&, const Problem&) { return 0; }

#endif  // HWY_TARGETS & HWY_AVX3_ZEN4

}  // namespace heed::softmax
#endif  // HWY_ONCE

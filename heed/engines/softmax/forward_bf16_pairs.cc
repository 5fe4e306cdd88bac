// The forward kernel for bf16 on CPUs whose bf16 dot product outruns their FMA.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/error.h"
#include "heed/engines/softmax/forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/forward_bf16_pairs.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3_ZEN4
// After highway.h:
#include "heed/engines/softmax/tasks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

void RunPairs(Context& ctx, const Problem& problem) {
  Forward<PairOperands>(ctx, problem);
}

int64_t ScratchPairs(const Problem& problem, int num_threads) {
  return ScratchBytes<PairOperands>(problem, MakePlan<PairOperands>(problem), num_threads);
}

int64_t LanesPairs(const Problem& problem) { return NumLanes<PairOperands>(problem); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3_ZEN4

#if HWY_ONCE
namespace heed::softmax {

#if HWY_TARGETS & HWY_AVX3_ZEN4

bool HasForwardBF16Pairs() { return true; }

void ForwardBF16Pairs(Context& ctx, const Problem& problem) {
  N_AVX3_ZEN4::RunPairs(ctx, problem);
}

int64_t ForwardWorkspaceBF16Pairs(const Context& ctx, const Problem& problem) {
  return N_AVX3_ZEN4::ScratchPairs(problem, ctx.num_threads());
}

int64_t ForwardLanesBF16Pairs(const Context&, const Problem& problem) {
  return N_AVX3_ZEN4::LanesPairs(problem);
}

#else  // never called

bool HasForwardBF16Pairs() { return false; }
void ForwardBF16Pairs(Context&, const Problem&) {}
int64_t ForwardWorkspaceBF16Pairs(const Context&, const Problem&) { return 0; }
int64_t ForwardLanesBF16Pairs(const Context&, const Problem&) { return 0; }

#endif  // HWY_TARGETS & HWY_AVX3_ZEN4

}  // namespace heed::softmax
#endif  // HWY_ONCE

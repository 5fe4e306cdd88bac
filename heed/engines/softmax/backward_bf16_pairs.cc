// The backward kernel for bf16 on CPUs whose bf16 dot product outruns their FMA.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/error.h"
#include "heed/engines/softmax/backward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/backward_bf16_pairs.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3_ZEN4
// After highway.h:
#include "heed/engines/softmax/backward-inl.h"
#include "heed/engines/softmax/vector_gradients-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

void RunPairs(Context& ctx, const Problem& problem, const Gradients& gradients) {
  Backward<VectorGradients<PairGradients>>(ctx, problem, gradients);
}

BackwardBytes BytesPairs(const Problem& problem, const Gradients& gradients) {
  return BytesOfBackward<VectorGradients<PairGradients>>(problem, gradients);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3_ZEN4

#if HWY_ONCE
namespace heed::softmax {

#if HWY_TARGETS & HWY_AVX3_ZEN4

void BackwardBF16Pairs(Context& ctx, const Problem& problem, const Gradients& gradients) {
  N_AVX3_ZEN4::RunPairs(ctx, problem, gradients);
}

BackwardBytes BackwardWorkspaceBF16Pairs(const Context&, const Problem& problem,
                                         const Gradients& gradients) {
  return N_AVX3_ZEN4::BytesPairs(problem, gradients);
}

#else  // never called

void BackwardBF16Pairs(Context&, const Problem&, const Gradients&) {}
BackwardBytes BackwardWorkspaceBF16Pairs(const Context&, const Problem&,
                                         const Gradients&) {
  return {};
}

#endif  // HWY_TARGETS & HWY_AVX3_ZEN4

}  // namespace heed::softmax
#endif  // HWY_ONCE

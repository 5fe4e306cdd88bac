// The decode kernel for f32. A file of its own so that dtypes compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/softmax/forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/decode_f32.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/softmax/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

void RunDecodeF32(Context& ctx, const Problem& problem) { Decode<DecodeOperands<float>>(ctx, problem); }

int64_t ScratchDecodeF32(const Problem& problem, int num_threads) {
  using O = DecodeOperands<float>;
  return ScratchBytes<O>(problem, DecodePlan<O>(problem), num_threads);
}

int64_t RowsDecodeF32(const Problem&) { return DecodeRows<DecodeOperands<float>>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HWY_EXPORT(RunDecodeF32);
HWY_EXPORT(ScratchDecodeF32);
HWY_EXPORT(RowsDecodeF32);

void DecodeF32(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(RunDecodeF32)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t DecodeWorkspaceF32(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(ScratchDecodeF32)[TargetIndex(ctx.allowed_targets())](
      problem, ctx.num_threads());
}

int64_t DecodeRowsF32(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(RowsDecodeF32)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::softmax
#endif  // HWY_ONCE

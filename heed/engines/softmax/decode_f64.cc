// The decode kernel for f64. A file of its own so that dtypes compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/softmax/forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/decode_f64.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/softmax/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

void RunDecodeF64(Context& ctx, const Problem& problem) { Decode<DecodeOperands<double>>(ctx, problem); }

int64_t ScratchDecodeF64(const Problem& problem, int num_threads) {
  using O = DecodeOperands<double>;
  return ScratchBytes<O>(problem, DecodePlan<O>(problem), num_threads);
}

int64_t RowsDecodeF64(const Problem&) { return DecodeRows<DecodeOperands<double>>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HWY_EXPORT(RunDecodeF64);
HWY_EXPORT(ScratchDecodeF64);
HWY_EXPORT(RowsDecodeF64);

void DecodeF64(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(RunDecodeF64)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t DecodeWorkspaceF64(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(ScratchDecodeF64)[TargetIndex(ctx.allowed_targets())](
      problem, ctx.num_threads());
}

int64_t DecodeRowsF64(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(RowsDecodeF64)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::softmax
#endif  // HWY_ONCE

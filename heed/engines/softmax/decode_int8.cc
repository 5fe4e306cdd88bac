// The decode kernel for int8 rows of keys and values. A file of its own so that dtypes compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/softmax/forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/decode_int8.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/softmax/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

void RunDecodeInt8(Context& ctx, const Problem& problem) { Decode<QuantizedOperands>(ctx, problem); }

int64_t ScratchDecodeInt8(const Problem& problem, int num_threads) {
  using O = QuantizedOperands;
  return ScratchBytes<O>(problem, DecodePlan<O>(problem), num_threads);
}

int64_t RowsDecodeInt8(const Problem&) { return DecodeRows<QuantizedOperands>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HWY_EXPORT(RunDecodeInt8);
HWY_EXPORT(ScratchDecodeInt8);
HWY_EXPORT(RowsDecodeInt8);

void DecodeInt8(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(RunDecodeInt8)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t DecodeWorkspaceInt8(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(ScratchDecodeInt8)[TargetIndex(ctx.allowed_targets())](
      problem, ctx.num_threads());
}

int64_t DecodeRowsInt8(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(RowsDecodeInt8)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::softmax
#endif  // HWY_ONCE

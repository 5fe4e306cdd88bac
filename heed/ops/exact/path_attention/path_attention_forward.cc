// The forward pass of PaTH attention: blocks of keys are prepared, then each block of rows passes over the keys from
// its own block to the first, with an online softmax.
//
// FMA-bound: per pair D for the logit, Dv for the value and D D / 64 for the query's way over the block of keys. All
// blocks of rows are independent.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/ops/exact/path_attention/path_attention_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/exact/path_attention/path_attention_forward.cc"  // this file
#include "hwy/foreach_target.h"                                                       // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/exact/path_attention/blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::path_attention::HWY_NAMESPACE {

mechanism::Reservation ForwardMemoryImpl(const Call& call, DType dtype) {
  return ht::ForwardMemoryOf<Path>(call, dtype);
}

void ForwardImpl(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  ht::ForwardAll<Path>(ctx, call, in, out);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::path_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::path_attention {

HWY_EXPORT(ForwardImpl);
HWY_EXPORT(ForwardMemoryImpl);

void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  HWY_DISPATCH_TABLE(ForwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(ForwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::path_attention
#endif  // HWY_ONCE

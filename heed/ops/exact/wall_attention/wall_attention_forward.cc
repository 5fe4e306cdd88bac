// The forward pass of Wall attention, by transitions-inl.h.
//
// FMA-bound: per pair D for the logit and Dv for the value, in register tiles but for the pairs within a block of rows,
// which take D more. All blocks of rows are independent.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/ops/exact/wall_attention/wall_attention_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/exact/wall_attention/wall_attention_forward.cc"  // this file
#include "hwy/foreach_target.h"                                                       // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/exact/wall_attention/blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::wall_attention::HWY_NAMESPACE {

mechanism::Reservation ForwardMemoryImpl(const Call& call, DType dtype) {
  return ht::ForwardMemoryOf<Wall>(call, dtype);
}

void ForwardImpl(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  ht::ForwardAll<Wall>(ctx, call, in, out);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::wall_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::wall_attention {

HWY_EXPORT(ForwardImpl);
HWY_EXPORT(ForwardMemoryImpl);

void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  HWY_DISPATCH_TABLE(ForwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(ForwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::wall_attention
#endif  // HWY_ONCE

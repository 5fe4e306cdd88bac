// The kernels of attention weights for f32, which 16-bit tensors are widened to.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/softmax/weights_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/weights_f32.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/softmax/weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

using OperandsF32 = FmaOperands<float>;

void RowsF32(Context& ctx, const RowsCall& call) {
  RunRows<OperandsF32>(ctx, *call.problem, call.lse, call.queries, call.heads,
                       call.out);
}

void PooledF32(Context& ctx, const PooledCall& call) {
  RunPooled<OperandsF32>(ctx, *call.problem, call.lse, call.pool, call.out);
}

int64_t ScratchF32(const Problem& p, const Pool* pool) {
  return Workspace<OperandsF32>::Bytes(WeightsPlan<OperandsF32>(p)) +
         (pool == nullptr ? 0 : PoolBytes<OperandsF32>(p, *pool));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HWY_EXPORT(RowsF32);
HWY_EXPORT(PooledF32);
HWY_EXPORT(ScratchF32);

WeightsKernels WeightsF32(const Context& ctx) {
  const size_t target = TargetIndex(ctx.allowed_targets());
  return {HWY_DISPATCH_TABLE(RowsF32)[target], HWY_DISPATCH_TABLE(PooledF32)[target],
          HWY_DISPATCH_TABLE(ScratchF32)[target]};
}

}  // namespace heed::softmax
#endif  // HWY_ONCE

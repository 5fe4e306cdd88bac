// The kernels of attention weights for f64.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/softmax/weights_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/weights_f64.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/softmax/weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

using OperandsF64 = FmaOperands<double>;

void RowsF64(Context& ctx, const RowsCall& call) {
  RunRows<OperandsF64>(ctx, *call.problem, call.lse, call.queries, call.heads,
                       call.out);
}

void PooledF64(Context& ctx, const PooledCall& call) {
  RunPooled<OperandsF64>(ctx, *call.problem, call.lse, call.pool, call.out);
}

int64_t ScratchF64(const Problem& p, const Pool* pool) {
  return Workspace<OperandsF64>::Bytes(WeightsPlan<OperandsF64>(p)) +
         (pool == nullptr ? 0 : PoolBytes<OperandsF64>(p, *pool));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HWY_EXPORT(RowsF64);
HWY_EXPORT(PooledF64);
HWY_EXPORT(ScratchF64);

WeightsKernels WeightsF64(const Context& ctx) {
  const size_t target = TargetIndex(ctx.allowed_targets());
  return {HWY_DISPATCH_TABLE(RowsF64)[target], HWY_DISPATCH_TABLE(PooledF64)[target],
          HWY_DISPATCH_TABLE(ScratchF64)[target]};
}

}  // namespace heed::softmax
#endif  // HWY_ONCE

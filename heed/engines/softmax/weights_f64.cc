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
  const Problem& p = *call.problem;
  WithPlan<OperandsF64>(ctx, p, 0, 0, [&](auto vectors, const Plan& plan) {
    RunRows<OperandsF64, vectors.value>(ctx, p, plan, call.lse, call.queries,
                                      call.heads, call.out);
  });
}

void PooledF64(Context& ctx, const PooledCall& call) {
  const Problem& p = *call.problem;
  const int64_t columns = PoolBytes(p, call.pool, 1, sizeof(double)) - PoolBytes(p, call.pool, 0, 0);
  WithPlan<OperandsF64>(ctx, p, columns, PoolBytes(p, call.pool, 0, 0),
                      [&](auto vectors, const Plan& plan) {
                        RunPooled<OperandsF64, vectors.value>(
                            ctx, p, plan, call.lse, call.pool, call.out);
                      });
}

int64_t ScratchF64(const Problem& p, const Pool* pool) {
  const Plan plan = MakePlan<OperandsF64>(p);
  return Workspace<OperandsF64>::Bytes(plan) +
         (pool == nullptr ? 0 : PoolBytes(p, *pool, plan.lanes, sizeof(double)));
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

// The recurrence backward for f32. A file of its own so that dtypes compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/recurrence/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/backward_f32.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/recurrence/backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

void BackRunF32(Context& ctx, const Problem& problem, const Gradients& gradients,
                const ChunkStates& states) {
  Backward<float>(ctx, problem, gradients, states);
}

BackwardBytes BackBytesF32(int64_t threads, const Problem& problem, const ChunkStates& states) {
  return BackwardWorkspace<float>(threads, problem, states);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HWY_EXPORT(BackRunF32);
HWY_EXPORT(BackBytesF32);

void BackwardF32(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(BackRunF32)[TargetIndex(ctx.allowed_targets())](ctx, problem, gradients, {});
}

void BackwardTiles(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(BackRunF32)[TargetIndex(ctx.allowed_targets())](
      ctx, problem, gradients, StatesInTiles(ctx, problem));
}

BackwardBytes BackwardBytesF32(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(BackBytesF32)[TargetIndex(ctx.allowed_targets())](
      ctx.num_threads(), problem, {});
}

BackwardBytes BackwardBytesTiles(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(BackBytesF32)[TargetIndex(ctx.allowed_targets())](
      ctx.num_threads(), problem, StatesInTiles(ctx, problem));
}

}  // namespace heed::recurrence
#endif  // HWY_ONCE

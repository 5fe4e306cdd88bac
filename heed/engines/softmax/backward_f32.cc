// The backward kernel for f32. A file of its own so that dtypes compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/softmax/backward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/backward_f32.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/softmax/backward-inl.h"
#include "heed/engines/softmax/vector_gradients-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

void RunF32(Context& ctx, const Problem& problem, const Gradients& gradients) {
  Backward<VectorGradients<FmaGradients<float>>>(ctx, problem, gradients);
}

BackwardBytes BytesF32(const Problem& problem, const Gradients& gradients) {
  return BytesOfBackward<VectorGradients<FmaGradients<float>>>(problem, gradients);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HWY_EXPORT(RunF32);
HWY_EXPORT(BytesF32);

void BackwardF32(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(RunF32)[TargetIndex(ctx.allowed_targets())](ctx, problem, gradients);
}

BackwardBytes BackwardWorkspaceF32(const Context& ctx, const Problem& problem,
                                   const Gradients& gradients) {
  return HWY_DISPATCH_TABLE(BytesF32)[TargetIndex(ctx.allowed_targets())](problem, gradients);
}

}  // namespace heed::softmax
#endif  // HWY_ONCE

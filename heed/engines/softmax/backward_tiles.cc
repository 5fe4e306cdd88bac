// The backward kernels in matrix tiles, and the same emulated, for tests.
#define HEED_MATRIX_TILES
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/softmax/backward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/backward_tiles.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3_SPR || HWY_TARGET == HWY_AVX2
// After highway.h:
#include "heed/engines/softmax/backward-inl.h"
#include "heed/engines/softmax/matrix_gradients-inl.h"
#include "heed/simd/emulated_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

using Unit = hs::TilesOfTarget;

// f(operands of as many products as the problem takes). Weights of f16 take the pieces of f32,
// and what they are multiplied with as many: a third one of zeros.
template <class F>
auto WithGradients(const Problem& p, const F& f) {
  if (p.dtype == DType::kBF16) return f.template operator()<MatrixGradients<TileOperands<1, 1, Unit>>>();
  if (p.high_precision) return f.template operator()<MatrixGradients<TileOperands<3, 3, Unit>>>();
  return f.template operator()<MatrixGradients<TileOperands<6, 6, Unit>>>();
}

void RunTiles(Context& ctx, const Problem& problem, const Gradients& gradients) {
  WithGradients(problem, [&]<class P>() { Backward<P>(ctx, problem, gradients); });
}

BackwardBytes BytesTiles(const Problem& problem, const Gradients& gradients) {
  return WithGradients(problem, [&]<class P>() { return BytesOfBackward<P>(problem, gradients); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3_SPR || HWY_TARGET == HWY_AVX2

#if HWY_ONCE
namespace heed::softmax {

#if (HWY_TARGETS & HWY_AVX3_SPR) && (HWY_TARGETS & HWY_AVX2)

void BackwardTiles(Context& ctx, const Problem& problem, const Gradients& gradients) {
  if (TilesOf(ctx.allowed_targets()) == TileUnit::kEmulated) {
    return N_AVX2::RunTiles(ctx, problem, gradients);
  }
  N_AVX3_SPR::RunTiles(ctx, problem, gradients);
}

BackwardBytes BackwardWorkspaceTiles(const Context& ctx, const Problem& problem,
                                     const Gradients& gradients) {
  return TilesOf(ctx.allowed_targets()) == TileUnit::kEmulated
             ? N_AVX2::BytesTiles(problem, gradients)
             : N_AVX3_SPR::BytesTiles(problem, gradients);
}

#else  // never called

void BackwardTiles(Context&, const Problem&, const Gradients&) {}
BackwardBytes BackwardWorkspaceTiles(const Context&, const Problem&, const Gradients&) {
  return {};
}

#endif  // HWY_TARGETS & HWY_AVX3_SPR

}  // namespace heed::softmax
#endif  // HWY_ONCE

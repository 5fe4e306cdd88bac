// The forward kernels in matrix tiles, and the same emulated, for tests.
#define HEED_MATRIX_TILES
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/engines/softmax/forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/forward_tiles.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3_SPR || HWY_TARGET == HWY_AVX2
// After highway.h:
#include "heed/engines/softmax/tasks-inl.h"
#include "heed/engines/softmax/tile_operands-inl.h"
#include "heed/simd/emulated_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

using Unit = hs::TilesOfTarget;

// f(operands of as many products as the problem takes).
template <class F>
auto WithProducts(const Problem& p, const F& f) {
  switch (TileProducts(p)) {
    case 1: return f(TileOperands<1, 1, Unit>());
    case 3: return f(TileOperands<3, 3, Unit>());
    case 4: return f(TileOperands<4, 5, Unit>());
    default: return f(TileOperands<6, 6, Unit>());
  }
}

void RunTiles(Context& ctx, const Problem& problem) {
  WithProducts(problem, [&](auto operands) { Forward<decltype(operands)>(ctx, problem); });
}

int64_t ScratchTiles(const Problem& problem, int num_threads) {
  return WithProducts(problem, [&](auto operands) {
    using O = decltype(operands);
    return ScratchBytes<O>(problem, MakePlan<O>(problem), num_threads);
  });
}

int64_t LanesTiles(const Problem& problem) {
  return WithProducts(problem, [&](auto operands) { return NumLanes<decltype(operands)>(problem); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3_SPR || HWY_TARGET == HWY_AVX2

#if HWY_ONCE
namespace heed::softmax {
namespace {

bool Emulated(const Context& ctx) {
  return TilesOf(ctx.allowed_targets()) == TileUnit::kEmulated;
}

}  // namespace

#if (HWY_TARGETS & HWY_AVX3_SPR) && (HWY_TARGETS & HWY_AVX2)

bool HasForwardTiles() { return true; }

void ForwardTiles(Context& ctx, const Problem& problem) {
  if (Emulated(ctx)) return N_AVX2::RunTiles(ctx, problem);
  N_AVX3_SPR::RunTiles(ctx, problem);
}

int64_t ForwardWorkspaceTiles(const Context& ctx, const Problem& problem) {
  if (Emulated(ctx)) return N_AVX2::ScratchTiles(problem, ctx.num_threads());
  return N_AVX3_SPR::ScratchTiles(problem, ctx.num_threads());
}

int64_t ForwardLanesTiles(const Context& ctx, const Problem& problem) {
  return Emulated(ctx) ? N_AVX2::LanesTiles(problem) : N_AVX3_SPR::LanesTiles(problem);
}

#else  // never called

bool HasForwardTiles() { return false; }
void ForwardTiles(Context&, const Problem&) {}
int64_t ForwardWorkspaceTiles(const Context&, const Problem&) { return 0; }
int64_t ForwardLanesTiles(const Context&, const Problem&) { return 0; }

#endif  // HWY_TARGETS & HWY_AVX3_SPR

}  // namespace heed::softmax
#endif  // HWY_ONCE

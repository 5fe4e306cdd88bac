// The recurrence forward in matrix tiles, and the same emulated, for tests.
#define HEED_MATRIX_TILES
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/recurrence/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/forward_tiles.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3_SPR || HWY_TARGET == HWY_AVX2
// After highway.h:
#include "heed/engines/recurrence/tile_chunks-inl.h"
#include "heed/simd/emulated_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

using Unit = hs::TilesOfTarget;

void RunTiles(Context& ctx, const Problem& problem) { ForwardInChunks<Unit>(ctx, problem); }

int64_t BytesTiles(const Problem& problem) { return ChunkBuffers::Bytes(problem); }

ChunkStates States(const Problem& problem) {
  return {ChunkBuffers::Bytes(problem), &StatesOfChunks<Unit>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3_SPR || HWY_TARGET == HWY_AVX2

#if HWY_ONCE
namespace heed::recurrence {

// What is exact in bf16, and decays that a pair of tokens shares over all channels.
bool TakesTiles(const Problem& p) {
  const bool identity = p.feature == Feature::kIdentity && p.key_feature == Feature::kIdentity;
  return p.dtype == DType::kBF16 && p.delta == Delta::kNone && !p.channels && identity && p.causal && p.gate != Gate::kKey &&
         !p.has_value_decay && !p.has_bonus && !p.normalize && p.key_mask.data == nullptr;
}

#if (HWY_TARGETS & HWY_AVX3_SPR) && (HWY_TARGETS & HWY_AVX2)

bool HasForwardTiles() { return true; }

void ForwardTiles(Context& ctx, const Problem& problem) {
  if (TilesOf(ctx.allowed_targets()) == TileUnit::kEmulated) return N_AVX2::RunTiles(ctx, problem);
  N_AVX3_SPR::RunTiles(ctx, problem);
}

int64_t ForwardBytesTiles(const Context& ctx, const Problem& problem) {
  return TilesOf(ctx.allowed_targets()) == TileUnit::kEmulated ? N_AVX2::BytesTiles(problem)
                                                               : N_AVX3_SPR::BytesTiles(problem);
}

ChunkStates StatesInTiles(const Context& ctx, const Problem& problem) {
  return TilesOf(ctx.allowed_targets()) == TileUnit::kEmulated ? N_AVX2::States(problem)
                                                               : N_AVX3_SPR::States(problem);
}

#else  // never called

bool HasForwardTiles() { return false; }
void ForwardTiles(Context&, const Problem&) {}
int64_t ForwardBytesTiles(const Context&, const Problem&) { return 0; }
ChunkStates StatesInTiles(const Context&, const Problem&) { return {}; }

#endif  // HWY_TARGETS & HWY_AVX3_SPR

}  // namespace heed::recurrence
#endif  // HWY_ONCE

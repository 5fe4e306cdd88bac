// The decode kernel for int8 rows in matrix tiles, and the same emulated, for tests.
#define HEED_MATRIX_TILES
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/softmax/forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/decode_int8_tiles.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3_SPR || HWY_TARGET == HWY_AVX2
// After highway.h:
#include "heed/engines/softmax/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

void RunInt8Tiles(Context& ctx, const Problem& problem) { Decode<ByteOperands>(ctx, problem); }

int64_t ScratchInt8Tiles(const Problem& problem, int num_threads) {
  return ScratchBytes<ByteOperands>(problem, DecodePlan<ByteOperands>(problem), num_threads);
}

int64_t RowsInt8Tiles() { return DecodeRows<ByteOperands>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3_SPR || HWY_TARGET == HWY_AVX2

#if HWY_ONCE
namespace heed::softmax {

#if (HWY_TARGETS & HWY_AVX3_SPR) && (HWY_TARGETS & HWY_AVX2)

namespace {

bool Emulated(const Context& ctx) {
  return TilesOf(ctx.allowed_targets()) == TileUnit::kEmulated;
}

}  // namespace

void DecodeInt8Tiles(Context& ctx, const Problem& problem) {
  if (Emulated(ctx)) return N_AVX2::RunInt8Tiles(ctx, problem);
  N_AVX3_SPR::RunInt8Tiles(ctx, problem);
}

int64_t DecodeWorkspaceInt8Tiles(const Context& ctx, const Problem& problem) {
  if (Emulated(ctx)) return N_AVX2::ScratchInt8Tiles(problem, ctx.num_threads());
  return N_AVX3_SPR::ScratchInt8Tiles(problem, ctx.num_threads());
}

int64_t DecodeRowsInt8Tiles(const Context& ctx, const Problem&) {
  return Emulated(ctx) ? N_AVX2::RowsInt8Tiles() : N_AVX3_SPR::RowsInt8Tiles();
}

#else  // never called

void DecodeInt8Tiles(Context&, const Problem&) {}
int64_t DecodeWorkspaceInt8Tiles(const Context&, const Problem&) { return 0; }
int64_t DecodeRowsInt8Tiles(const Context&, const Problem&) { return 0; }

#endif  // HWY_TARGETS & HWY_AVX3_SPR

}  // namespace heed::softmax
#endif  // HWY_ONCE

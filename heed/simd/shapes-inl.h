// Shapes of register tiles that depend on how many registers a target has, and how wide they are: one table, from
// which kernels take their numbers.
//
// Compiled once per SIMD target.
#if defined(HEED_SIMD_SHAPES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_SHAPES_INL_H_
#undef HEED_SIMD_SHAPES_INL_H_
#else
#define HEED_SIMD_SHAPES_INL_H_
#endif

#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {

// Tiles of the recurrence engine. One of t tokens and c vectors of the state's columns has t c sums, t c vectors of
// values and c of the state.
struct RecurrenceShapes {
  int strip;           // vectors of a strip of columns
  int ungated_tokens;  // tokens of a tile where nothing decays; tiles of decays have kTileTokens
  int delta_strip;     // vectors of a strip of a delta rule
  int delta_row_sums;  // vectors of rows of a delta rule's state whose sums over lanes are taken at once
};
inline constexpr RecurrenceShapes kRecurrenceShapes =
    kVectorRegisters == 32 ? RecurrenceShapes{.strip = 2, .ungated_tokens = 4, .delta_strip = 4, .delta_row_sums = 1}
                           : RecurrenceShapes{.strip = 2, .ungated_tokens = 3, .delta_strip = 2, .delta_row_sums = 4};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_SHAPES_INL_H_

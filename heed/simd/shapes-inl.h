// The shapes of register tiles and of blocks of rows, by SIMD target: all numbers that depend on the number of vector
// registers. Kernels have no such numbers of their own.
//
// A product's register tile is R rows by C vectors of sums, each a chain of FMAs. It must hide the latency of an FMA (4
// cycles on two ports: 8 sums), leave registers for C vectors and one broadcast, and load little: R C FMAs read R + C
// operands. With 16 registers that is 6 x 2; 4 x 2 just hides the latency and has no slack.
#if defined(HEED_SIMD_SHAPES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_SHAPES_INL_H_
#undef HEED_SIMD_SHAPES_INL_H_
#else
#define HEED_SIMD_SHAPES_INL_H_
#endif

#include "hwy/highway.h"

// Vector registers of the target. Emulated products of ARM have the shapes of ARM.
#undef HEED_VECTOR_REGISTERS
#if HWY_TARGET <= HWY_AVX3 || !HWY_ARCH_X86 || defined(HEED_EMULATE_BFMMLA)
#define HEED_VECTOR_REGISTERS 32
#else
#define HEED_VECTOR_REGISTERS 16
#endif

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {

inline constexpr int kVectorRegisters = HEED_VECTOR_REGISTERS;

struct Shapes {
  int tile_vectors;    // of a product's register tile, at most
  int block_vectors;   // of query rows in a block of attention: each key passes through the core once per block
  int prefetch_mib;    // heads with more keys and values prefetch those of the next tile; 0: none do
  int scan_states;     // of a vector of channels that a scan keeps in registers
  int scan_decays;     // computed side by side: one is a long chain, and few registers let a processor overlap few
  int column_block;    // vectors of the state's columns in a recurrence's register tile
  int ungated_tokens;  // tokens of such a tile where nothing decays; tiles with decays have kTileTokens
  int delta_block;     // vectors of the state's columns that a delta rule passes over at once
  int delta_row_sums;  // vectors of a delta rule's rows whose sums over lanes are taken at once
};
inline constexpr Shapes kShapes = kVectorRegisters == 32 ? Shapes{.tile_vectors = 4,
                                                                  .block_vectors = 4,
                                                                  .prefetch_mib = 0,
                                                                  .scan_states = 16,
                                                                  .scan_decays = 1,
                                                                  .column_block = 2,
                                                                  .ungated_tokens = 4,
                                                                  .delta_block = 4,
                                                                  .delta_row_sums = 1}
                                                         : Shapes{.tile_vectors = 2,
                                                                  .block_vectors = 8,
                                                                  .prefetch_mib = 4,
                                                                  .scan_states = 4,
                                                                  .scan_decays = 2,
                                                                  .column_block = 2,
                                                                  .ungated_tokens = 3,
                                                                  .delta_block = 2,
                                                                  .delta_row_sums = 4};

// Rows of a register tile of C vectors.
template <int C>
constexpr int TileRows() {
  if (kVectorRegisters == 32) return C >= 4 ? 4 : 8;
  return C >= 2 ? 6 : 8;
}

// Rows of the next smaller tile, for what tiles of R rows leave: 64 rows are ten tiles of 6 and one of 4.
template <int R>
constexpr int FewerRows() {
  return R == 6 ? 4 : (R + 1) / 2;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_SHAPES_INL_H_

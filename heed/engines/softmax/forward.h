// Entry points of the forward kernels, one set per dtype.
#ifndef HEED_ENGINES_SOFTMAX_FORWARD_H_
#define HEED_ENGINES_SOFTMAX_FORWARD_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/visit.h"

namespace heed::softmax {

// Twice the keys of other kernels: each tile loads and stores its outputs, and half
// the time of multiplying goes by between.
inline constexpr KeyGrid kPairGrid = {.tile = 2 * kTileKeys, .step = 2};

// Rows of a key head that decoding multiplies with its keys and values at once.
inline constexpr int kDecodeRows = 8;

// Query heads per key head from which decoding int8 rows in tiles is faster. Not rows, of which
// a prefill has more than decoding: both shall have the same bits.
inline constexpr int64_t kFewestTileHeads = 8;

// Channels of keys that products of bytes can add up in 32 bits.
inline constexpr int64_t kMostByteChannels = int64_t{1} << 16;

// F32 computes bf16 and f16 too, widened. BF16Pairs needs HasBF16Pairs() of
// dispatch.h, and a compiler that knows such CPUs.
bool HasForwardBF16Pairs();
void ForwardF32(Context& ctx, const Problem& problem);
void ForwardF64(Context& ctx, const Problem& problem);
void ForwardBF16Pairs(Context& ctx, const Problem& problem);
int64_t ForwardWorkspaceF32(const Context& ctx, const Problem& problem);
int64_t ForwardWorkspaceF64(const Context& ctx, const Problem& problem);
int64_t ForwardWorkspaceBF16Pairs(const Context& ctx, const Problem& problem);
int64_t ForwardLanesF32(const Context& ctx, const Problem& problem);
int64_t ForwardLanesF64(const Context& ctx, const Problem& problem);
int64_t ForwardLanesBF16Pairs(const Context& ctx, const Problem& problem);

// In matrix tiles, which TilesOf() of dispatch.h must allow: all dtypes but f64. A product of
// two factors is one of bf16, four of their pieces for f16, six for f32 or three where that
// is enough.
int TileProducts(const Problem& problem);
bool HasForwardTiles();
void ForwardTiles(Context& ctx, const Problem& problem);
int64_t ForwardWorkspaceTiles(const Context& ctx, const Problem& problem);
int64_t ForwardLanesTiles(const Context& ctx, const Problem& problem);

// Steps are the keys of a product of tiles.
inline constexpr KeyGrid kMatrixGrid = {.tile = kTileKeys, .step = 32};

// Blocks of kDecodeRows rows, or as many as lanes if these are fewer. Int8 is of keys and
// values; its Bytes need HasByteProducts() of dispatch.h, its Tiles and BF16Pairs what the
// forward ones need.
bool HasDecodeInt8Bytes();
void DecodeF32(Context& ctx, const Problem& problem);
void DecodeF64(Context& ctx, const Problem& problem);
void DecodeInt8(Context& ctx, const Problem& problem);
void DecodeInt8Bytes(Context& ctx, const Problem& problem);
void DecodeInt8Tiles(Context& ctx, const Problem& problem);
void DecodeBF16Pairs(Context& ctx, const Problem& problem);
int64_t DecodeWorkspaceF32(const Context& ctx, const Problem& problem);
int64_t DecodeWorkspaceF64(const Context& ctx, const Problem& problem);
int64_t DecodeWorkspaceInt8(const Context& ctx, const Problem& problem);
int64_t DecodeWorkspaceInt8Bytes(const Context& ctx, const Problem& problem);
int64_t DecodeWorkspaceInt8Tiles(const Context& ctx, const Problem& problem);
int64_t DecodeWorkspaceBF16Pairs(const Context& ctx, const Problem& problem);
int64_t DecodeRowsF32(const Context& ctx, const Problem& problem);
int64_t DecodeRowsF64(const Context& ctx, const Problem& problem);
int64_t DecodeRowsInt8(const Context& ctx, const Problem& problem);
int64_t DecodeRowsInt8Bytes(const Context& ctx, const Problem& problem);
int64_t DecodeRowsInt8Tiles(const Context& ctx, const Problem& problem);
int64_t DecodeRowsBF16Pairs(const Context& ctx, const Problem& problem);

// One block of rows of one key head of one sequence, and the order in which
// threads take them: sequences by falling cost, heads in turn, late rows first
// (under a causal mask they are the long ones).
class BlockQueue {
 public:
  BlockQueue(const Problem& problem, int64_t lanes);

  struct Task {
    int64_t sequence, key_head, block;
  };
  int64_t size() const { return begins_.back(); }
  Task At(int64_t index) const;
  int64_t IndexOf(const Task& task) const;

 private:
  std::vector<int64_t> order_;   // sequence indices
  std::vector<int64_t> places_;  // in order_, by sequence
  std::vector<int64_t> blocks_;  // per key head, by place in order_
  std::vector<int64_t> begins_;  // first task, by place in order_
  int64_t key_heads_;
};

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_FORWARD_H_

// The division of a forward pass: the grids of keys of the kernels, and the order of their tasks.
#ifndef HEED_ENGINES_SOFTMAX_FORWARD_FORWARD_H_
#define HEED_ENGINES_SOFTMAX_FORWARD_FORWARD_H_

#include <cstdint>
#include <vector>

#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"

namespace heed::softmax {

// Tiles have twice the keys of other kernels: every tile loads and stores the outputs, and between these the bf16 dot
// product takes only half the time per key that FMA takes.
inline constexpr KeyGrid kPairGrid = {.tile = 2 * kTileKeys, .step = 2};

// The query rows of a key head that small-M kernels multiply with its keys and values at once.
inline constexpr int kDecodeRows = 8;

// From this number of query heads per key head on, AMX is faster for decoding int8 K and V. The rule counts heads and
// not rows, because prefill has more rows than decoding and both must have the same bits.
inline constexpr int64_t kFewestAmxHeads = 8;

// The most channels of keys for which integer products of bytes fit 32-bit sums.
inline constexpr int64_t kMostByteChannels = int64_t{1} << 16;

// Returns the number of bf16 AMX products that one product of the problem takes: one for bf16; for the bf16 split of
// f16, four; for that of f32 (3xBF16), six, or three where their precision is enough.
int AmxProducts(const Problem& problem);

// A step is the keys of one AMX product.
inline constexpr KeyGrid kAmxGrid = {.tile = kTileKeys, .step = 32};

// The tasks of a forward pass, each one block of rows of one key head of one sequence, and the order in which threads
// take them: sequences by falling cost, heads in turn, and last rows first, because under the causal diagonal these see
// the most keys.
class BlockQueue {
 public:
  BlockQueue(const Problem& problem, int64_t lanes);

  struct Task {
    int64_t sequence, key_head, block;
  };
  int64_t size() const { return begins_.back(); }
  Task At(int64_t index) const;
  int64_t most_blocks() const;  // of a key head
  int64_t IndexOf(const Task& task) const;

 private:
  std::vector<int64_t> order_;   // sequence indices
  std::vector<int64_t> places_;  // by sequence, the index in order_
  std::vector<int64_t> blocks_;  // per key head, in the order of order_
  std::vector<int64_t> begins_;  // first task, in the order of order_
  int64_t key_heads_;
};

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_FORWARD_FORWARD_H_

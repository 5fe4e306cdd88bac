// How a forward pass is cut: grids of keys and rows of the kernels, and the order of their tasks.
#ifndef HEED_ENGINES_SOFTMAX_FORWARD_H_
#define HEED_ENGINES_SOFTMAX_FORWARD_H_

#include <cstdint>
#include <vector>

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
inline constexpr int64_t kFewestAmxHeads = 8;

// Channels of keys that products of bytes can add up in 32 bits.
inline constexpr int64_t kMostByteChannels = int64_t{1} << 16;

// Products of bf16 that a product of two factors in matrix tiles takes: one of bf16, four of the pieces of f16, six of
// those of f32, or three where that is enough.
int AmxProducts(const Problem& problem);

// Steps are the keys of a product of tiles.
inline constexpr KeyGrid kAmxGrid = {.tile = kTileKeys, .step = 32};

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
  int64_t most_blocks() const;  // of a key head
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

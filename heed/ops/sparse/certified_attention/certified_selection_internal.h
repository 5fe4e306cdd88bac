// The blocks that each row of a call reads, and its bound: what decoding and prefill have in common.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_SELECTION_INTERNAL_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_SELECTION_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/engines/softmax/sketch.h"
#include "heed/ops/sparse/certified_attention/certified_choice_internal.h"

namespace heed::certified_attention {

// Keys in blocks with a sketch, and where queries stand to them.
struct SketchedKeys {
  struct Sequence {
    int64_t keys = 0, start = 0, rows = 0;  // valid keys; the position of row 0; rows that see something
  };
  int64_t heads = 0;
  std::vector<Sequence> sequences;
  softmax::SketchParts parts;
  bool by_boxes = false;  // of whole blocks; a row's last one is bounded by its sketch
  softmax::BoxParts boxes;
  std::function<const std::byte*(int64_t b, int64_t head, int64_t block)> block;
};

inline int64_t BlocksOf(int64_t keys) { return (keys + softmax::kSketchKeys - 1) / softmax::kSketchKeys; }

// Rows of the same 64-th of positions may share their blocks, or each have its own; heads of a group share them always.
class Selection {
 public:
  Selection(const SketchedKeys& keys, const ConstTensorView& q, double scale, bool causal, double epsilon,
            bool rows_share);

  // A head whose rows keep everything, without a look at its sketch.
  void SetDense(int64_t b, int64_t h);
  bool IsDense(int64_t b, int64_t h) const { return dense_[Head(b, h)] != 0; }

  // Chooses for all rows, or for those of sets [begin, end) alone. Takes ctx's scratch and shared memory.
  void Choose(Context& ctx) { Choose(ctx, 0, sets_); }
  void Choose(Context& ctx, int64_t begin, int64_t end);

  struct Count {
    int64_t kept = 0, visible = 0;  // blocks, of all sets
  };
  Count CountOf(int64_t b, int64_t h) const { return CountOf(b, h, 0, sets_); }
  Count CountOf(int64_t b, int64_t h, int64_t begin, int64_t end) const;
  bool drops() const;  // any block of any row

  int64_t blocks() const { return blocks_; }
  int64_t sets() const { return sets_; }  // of rows, of a sequence
  int64_t SetOf(int64_t b, int64_t i) const;
  const uint8_t* Kept(int64_t b, int64_t h, int64_t set) const { return kept_.data() + At(b, h, set); }
  float Bound(int64_t b, int64_t head, int64_t i) const {
    return bounds_[static_cast<size_t>((b * query_heads_ + head) * rows_ + i)];
  }

 private:
  struct Rows {
    int64_t begin = 0, end = 0;
  };
  Rows RowsOf(int64_t b, int64_t set) const;  // that see something
  int64_t Visible(int64_t b, int64_t i) const;  // keys, from the first on
  size_t Head(int64_t b, int64_t h) const { return static_cast<size_t>(b * keys_.heads + h); }
  size_t At(int64_t b, int64_t h, int64_t set) const {
    return static_cast<size_t>(((b * keys_.heads + h) * sets_ + set) * blocks_);
  }
  softmax::SketchMasses MassesOf(const Context& ctx, int64_t slot, int64_t row) const;
  void Score(Context& ctx, int64_t b, int64_t h, int64_t set, int64_t range, int64_t slot, int worker) const;
  void ScoreBoxes(Context& ctx, int64_t b, int64_t h, int64_t set, int64_t begin, std::span<const std::byte* const> blocks,
                  int64_t slot, int worker) const;
  const std::byte* QueryAt(int64_t b, int64_t i, int64_t head) const;
  void ChooseSet(Context& ctx, int64_t b, int64_t h, int64_t set, int64_t slot, int worker);

  const SketchedKeys& keys_;
  const ConstTensorView& q_;
  const double scale_, epsilon_;
  const bool causal_, rows_share_;
  const softmax::SketchPasses* passes_ = nullptr;
  int64_t rows_, query_heads_, group_, blocks_ = 0, sets_ = 0, most_rows_ = 1;
  std::vector<uint8_t> kept_;   // [batch, heads, sets, blocks]
  std::vector<float> bounds_;   // [batch, query heads, rows]
  std::vector<uint8_t> dense_;  // [batch, heads]
};

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_SELECTION_INTERNAL_H_

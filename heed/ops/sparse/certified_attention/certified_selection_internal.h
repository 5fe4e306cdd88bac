// The blocks that each row of a call reads, and its bound: common to decoding and prefill.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_SELECTION_INTERNAL_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_SELECTION_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "heed/core/context.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/certified/sketch.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/ops/sparse/certified_attention/certified_choice_internal.h"

namespace heed::certified_attention {

// Keys in blocks with a sketch, counted from key 0 of each sequence.
struct SketchedKeys {
  softmax::SketchParts parts;
  bool by_boxes = false;  // for whole blocks; a row's last block and partly visible blocks are bounded by their sketch
  softmax::BoxParts boxes;
  std::function<const std::byte*(int64_t sequence, int64_t head, int64_t block)> block;
};

inline int64_t BlocksOf(int64_t keys) { return (keys + softmax::kSketchKeys - 1) / softmax::kSketchKeys; }

// Rows with the same position / 64 may share their blocks, or each have their own; heads of a group always share them.
// The problem's pattern has been placed. The problem and the keys outlive the selection.
class Selection {
 public:
  Selection(const softmax::Problem& problem, const SketchedKeys& keys, double epsilon, bool rows_share);

  // Makes a head's rows keep everything, without reading its sketch.
  void SetDense(int64_t n, int64_t h);
  bool IsDense(int64_t n, int64_t h) const { return dense_[Head(n, h)] != 0; }

  // Selects blocks for all rows, or for those of sets [begin, end) only. Uses ctx's scratch and shared memory.
  void Choose(Context& ctx) { Choose(ctx, 0, sets_); }
  void Choose(Context& ctx, int64_t begin, int64_t end);

  struct Count {
    int64_t kept = 0, visible = 0;  // blocks with a key visible to a row, of the sets selected for so far
  };
  Count CountOf(int64_t n, int64_t h) const { return CountOf(n, h, 0, sets_); }
  Count CountOf(int64_t n, int64_t h, int64_t begin, int64_t end) const;
  bool drops() const;  // true if any row drops a block

  int64_t blocks() const { return blocks_; }
  int64_t sets() const { return sets_; }  // sets of rows in a sequence
  int64_t SetOf(int64_t n, int64_t i) const;
  const uint8_t* Kept(int64_t n, int64_t h, int64_t set) const { return kept_.data() + At(n, h, set); }
  float Bound(int64_t n, int64_t head, int64_t i) const {
    return bounds_[static_cast<size_t>((n * problem_.query_heads + head) * rows_ + i)];
  }

  // The number of rows of a table of blocks by position, which begins at position 0. Rows at other positions share
  // nothing and keep all visible blocks.
  int64_t positions() const { return positions_; }
  bool has_rows_elsewhere() const { return elsewhere_; }

 private:
  struct Rows {
    int64_t begin = 0, end = 0;
  };
  Rows RowsOf(int64_t n, int64_t set) const;                  // rows of the set that see a key
  softmax::Interval BlocksOfRow(int64_t n, int64_t i) const;  // from the first to the last block in which the row may
                                                              // see a key
  softmax::Interval BlocksOfSet(int64_t n, int64_t set) const;
  bool IsElsewhere(int64_t n, int64_t set) const;
  const softmax::Sequence& SequenceOf(int64_t n) const { return problem_.sequences[static_cast<size_t>(n)]; }
  size_t Head(int64_t n, int64_t h) const { return static_cast<size_t>(n * problem_.key_heads + h); }
  size_t List(int64_t n, int64_t h, int64_t set) const {
    return Head(n, h) * static_cast<size_t>(sets_) + static_cast<size_t>(set);
  }
  size_t At(int64_t n, int64_t h, int64_t set) const { return List(n, h, set) * static_cast<size_t>(blocks_); }
  void KeepAll(int64_t n, int64_t h, int64_t set);

  // A worker's memory for up to kSketchRows rows and a range of blocks.
  struct Scratch {
    int32_t* words;
    float* scaled;
    uint64_t* seen;  // [rows, range]
    float* terms;    // [rows, range, 64]; null if no term is added
    int64_t LayOut(const softmax::Problem& p, void* base);
  };
  struct QueryRow {
    int64_t n, i, head;
  };
  softmax::SketchMasses MassesOf(const Context& ctx, int64_t slot, int64_t row) const;
  void Score(Context& ctx, int64_t n, int64_t h, int64_t set, int64_t range, int64_t slot, int worker) const;
  void ScoreBoxes(const QueryRow& row, const softmax::SketchQueries& one, const std::byte* const* blocks,
                  const softmax::Interval& range, float* scaled, const softmax::SketchMasses& masses) const;
  void FindSeen(const QueryRow& row, const softmax::Interval& range, uint64_t* seen) const;
  void FindTerms(const QueryRow& row, const softmax::Interval& range, uint64_t* seen, float* terms) const;
  const std::byte* QueryAt(const QueryRow& row) const;
  void ChooseSet(Context& ctx, int64_t n, int64_t h, int64_t set, int64_t slot, int worker);

  const softmax::Problem& problem_;
  const SketchedKeys& keys_;
  const double epsilon_;
  const bool rows_share_;
  const softmax::SketchPasses* passes_ = nullptr;
  int64_t rows_ = 0, group_, blocks_ = 0, sets_ = 0, most_rows_ = 1, positions_ = 0;
  bool elsewhere_ = false;
  std::vector<uint8_t> kept_;   // [sequences, heads, sets, blocks]
  std::vector<Count> counts_;   // [sequences, heads, sets]
  std::vector<float> bounds_;   // [sequences, query heads, rows]
  std::vector<uint8_t> dense_;  // [sequences, heads]
};

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_SELECTION_INTERNAL_H_

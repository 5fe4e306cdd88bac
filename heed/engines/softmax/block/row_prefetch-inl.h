// Prefetch of rows: while a block is computed, it prefetches what the next block reads.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_ROW_PREFETCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_ROW_PREFETCH_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_ROW_PREFETCH_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_ROW_PREFETCH_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hs = heed::HWY_NAMESPACE;  // simd/

// Prefetches rows of several tensors, a few lines at a time, between register tiles. Rows are too far apart for a
// hardware prefetcher, and a core that has too many misses outstanding drops or delays further prefetches.
class RowPrefetch {
 public:
  static constexpr size_t kMostTensors = 24;

  // Drops everything that has not been prefetched yet.
  void Clear() {
    num_tensors_ = tensor_ = 0;
    lines_ = lines_per_call_ = left_ = 0;
  }

  // Adds tokens of one head of a tensor.
  void Add(const Rows& rows, DType dtype, int64_t depth, const Sequence& s, int64_t first, int64_t head,
           const Interval& tokens) {
    if (rows.data == nullptr || depth == 0 || tokens.empty() || num_tensors_ == kMostTensors) return;
    const auto size = static_cast<int64_t>(SizeOf(dtype));
    const int64_t row =
        s.batch * rows.batch_stride + (first + tokens.begin) * rows.token_stride + head * rows.head_stride;
    tensors_[num_tensors_++] = {static_cast<const char*>(rows.data) + row * size, rows.token_stride * size,
                                depth * size, tokens.size()};
    lines_ += (depth * size + kLine - 1) / kLine * tokens.size();
  }

  // Adds the rows of a block, which may be of several heads.
  void Add(const Rows& rows, DType dtype, int64_t depth, const Sequence& s, int64_t key_head, const BlockGrid& grid,
           int64_t block) {
    const int64_t count = grid.NumRows(block);
    for (int64_t lane = 0; lane < count;) {
      const BlockGrid::Row row = grid.At(block, lane);
      const int64_t queries = std::min(count - lane, grid.num_queries - row.query);
      Add(rows, dtype, depth, s, s.first_q, key_head * grid.heads + row.head, {row.query, row.query + queries});
      lane += queries;
    }
  }

  // Divides all lines evenly over this number of calls of Some().
  void Spread(int64_t calls) {
    lines_per_call_ = lines_ == 0 ? 0 : std::max(kFewestLines, lines_ / std::max<int64_t>(calls, 1) + 1);
  }

  HWY_INLINE void Some() {
    for (int64_t i = 0; i < lines_per_call_; ++i) {
      if (left_ <= 0 && !NextRow()) return;
      hs::PrefetchToL2(at_);
      at_ += kLine;
      left_ -= kLine;
    }
  }

 private:
  static constexpr int64_t kLine = 64, kFewestLines = 3;
  struct Tensor {
    const char* row;
    int64_t stride, bytes, rows;
  };

  bool NextRow() {
    while (tensor_ < num_tensors_ && tensors_[tensor_].rows == 0) ++tensor_;
    if (tensor_ == num_tensors_) return false;
    Tensor& tensor = tensors_[tensor_];
    at_ = tensor.row;
    left_ = tensor.bytes;
    tensor.row += tensor.stride;
    --tensor.rows;
    return left_ > 0 || NextRow();
  }

  size_t num_tensors_ = 0, tensor_ = 0;
  int64_t lines_ = 0, lines_per_call_ = 0;
  int64_t left_ = 0;  // bytes left in the current row
  const char* at_ = nullptr;
  Tensor tensors_[kMostTensors];
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_ROW_PREFETCH_INL_H_

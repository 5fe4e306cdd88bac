// What one thread of the backward pass works in, and how rows come near in time.
//
// Compiled once per SIMD target and dtype.
#if defined(HEED_ENGINES_SOFTMAX_GRADIENT_BUFFERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_GRADIENT_BUFFERS_INL_H_
#undef HEED_ENGINES_SOFTMAX_GRADIENT_BUFFERS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_GRADIENT_BUFFERS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "heed/engines/softmax/gradient_rows-inl.h"
#include "heed/engines/softmax/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/rows-inl.h"
#include "heed/engines/softmax/visit.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hs = heed::HWY_NAMESPACE;  // simd/

// One thread's buffers. P multiplies: VectorGradients or MatrixGradients.
template <class P>
struct GradientBuffers {
  using O = typename P::Operands;
  using T = typename O::Compute;
  Workspace<O> block;
  typename O::Query* d_o;  // [Dv][W], in lanes
  T* d_logits;             // [tile][W]: dP, then dS
  T* slopes;               // [tile][W]
  typename P::Buffers products;

  static int64_t Bytes(const Problem& p, const Plan& plan) {
    GradientBuffers unused = {};
    return unused.LayOut(p, plan, nullptr);
  }
  void Init(const Problem& p, const Plan& plan) {
    LayOut(p, plan, this);
    block.copied_sequence = block.copied_head = -1;
    block.slopes = p.softcap > 0 ? slopes : nullptr;
  }

 private:
  int64_t LayOut(const Problem& p, const Plan& plan, void* base) {
    Carver carver(base, (sizeof(GradientBuffers) + 127) / 128 * 128);
    carver.Next(block.queries, plan.queries);
    carver.Next(block.logits, plan.logits);
    carver.Next(d_o, O::QueryRows(p.value_depth) * plan.lanes);
    carver.Next(d_logits, plan.logits);
    carver.Next(slopes, p.softcap > 0 ? plan.logits : 0);
    products.LayOut(carver, p, plan);
    return carver.bytes();
  }
};

// Asks for the rows that the next block reads, a few lines at a time between register
// tiles: they lie far apart, where no hardware prefetcher follows, and a core drops
// what it is asked for while it waits for too much.
class RowPrefetch {
 public:
  static constexpr int kTensors = 3, kLines = 3;
  struct Tensor {
    const char* data = nullptr;  // row (head 0 of the group, query 0)
    int64_t head_stride = 0, query_stride = 0, bytes = 0;
  };
  Tensor tensors[kTensors];

  RowPrefetch(const BlockGrid& grid, int64_t block)
      : grid_(grid), block_(block), rows_(block < 0 ? 0 : grid.NumRows(block)) {}

  HWY_INLINE void Some() {
    for (int i = 0; i < kLines; ++i) {
      if (left_ <= 0 && !NextRow()) return;
      hs::PrefetchToL2(at_);
      at_ += 64;
      left_ -= 64;
    }
  }

 private:
  bool NextRow() {
    if (next_ == kTensors * rows_) return false;
    const Tensor& tensor = tensors[next_ % kTensors];
    const BlockGrid::Row row = grid_.At(block_, next_ / kTensors);
    at_ = tensor.data + row.head * tensor.head_stride + row.query * tensor.query_stride;
    left_ = tensor.bytes;
    ++next_;
    return left_ > 0 || NextRow();
  }

  const BlockGrid& grid_;
  int64_t block_, rows_, next_ = 0, left_ = 0;
  const char* at_ = nullptr;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_GRADIENT_BUFFERS_INL_H_

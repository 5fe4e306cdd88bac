// The buffers of one thread of the backward pass.
//
// Compiled once per SIMD target and dtype.
#if defined(HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_BUFFERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_BUFFERS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_BUFFERS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_BUFFERS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "heed/engines/softmax/backward/gradient_rows-inl.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/block/rows-inl.h"
#include "heed/engines/softmax/tile_list.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

// The buffers of one thread. P computes the last three products: VectorGradients or AmxGradients.
template <class P>
struct GradientBuffers {
  using O = typename P::Operands;
  using T = typename O::Compute;
  Workspace<O> block;
  typename O::Query* d_o;  // [Dv][W], a query per lane
  T* d_logits;             // [tile][W]: dP, then dS
  T* slopes;               // [tile][W]
  T* relative;             // the group's part of the gradient of the relative bias
  typename P::Buffers products;

  static int64_t Bytes(const Problem& p, const Plan& plan) {
    GradientBuffers unused = {};
    return unused.LayOut(p, plan, nullptr);
  }
  static int64_t RelativeSize(const Problem& p) {
    return p.relative_bias.present() ? p.group() * SharedGradients<T>::RelativeRow(p) : 0;
  }
  void Init(const Problem& p, const Plan& plan) {
    LayOut(p, plan, this);
    block.copied_sequence = block.copied_head = -1;
    block.slopes = p.softcap > 0 ? slopes : nullptr;
    block.ahead.Clear();
  }

 private:
  int64_t LayOut(const Problem& p, const Plan& plan, void* base) {
    Carver carver(base, (sizeof(GradientBuffers) + 127) / 128 * 128);
    carver.Next(block.queries, plan.queries);
    carver.Next(block.logits, plan.logits);
    carver.Next(d_o, O::QueryRows(p.value_depth) * plan.lanes);
    carver.Next(d_logits, plan.logits);
    carver.Next(slopes, p.softcap > 0 ? plan.logits : 0);
    carver.Next(relative, RelativeSize(p));
    products.LayOut(carver, p, plan);
    return carver.bytes();
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_BUFFERS_INL_H_

// K and V of one key head as a task reads them: in place in the caller's tensor, or copied.
//
// Compiled once per SIMD target and operand type.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_HEAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_HEAD_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_HEAD_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_HEAD_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "heed/engines/softmax/block/operands-inl.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

// The state that a task holds while it multiplies: none, or the AMX tile registers.
struct NoSession {};
template <class O>
struct SessionType {
  using Type = NoSession;
};
template <class O>
  requires requires { typename O::Tiles; }
struct SessionType<O> {
  using Type = typename O::Tiles::Session;
};
template <class O>
using SessionOf = typename SessionType<O>::Type;

// K and V of one key head, and where they are read.
template <class O>
struct Head {
  SourceRows key_source, value_source;
  SourceRows key_scale, value_scale;  // the scales of quantised rows
  Place keys_at, values_at;
  Operand<typename O::Key> keys;
  Operand<typename O::Value> values;
  bool is_long = false;  // beyond L2, and read where it is or from a copy of the head

  // True if the rows of the next tile are prefetched. Shorter heads gain nothing by that and lose 2 %.
  bool PrefetchesTiles() const { return hs::kShapes.prefetch_mib > 0 && is_long; }
};

template <class O>
HWY_INLINE void CopyKeys(const SourceRows& from, const Interval& keys, int64_t depth, Workspace<O>& w) {
  if constexpr (O::kUsesAmx) {
    w.keys_finite = O::CopyKeys(from, keys.begin, keys.end, depth, w.keys);
  } else {
    O::CopyKeys(from, keys.begin, keys.end, depth, w.keys);
  }
}

// Returns the head of a task. Copies K and V if the plan says so and the thread's copy is of another head. Defined in
// block_parts-inl.h.
template <class O>
HWY_NOINLINE Head<O> HeadOf(const Problem& p, const Plan& plan, int64_t sequence, int64_t key_head, Workspace<O>& w);

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_HEAD_INL_H_

// K and V of one key head, wherever a task reads them: as the caller has them, or copied.
//
// Compiled once per SIMD target and operand type.
#if defined(HEED_ENGINES_SOFTMAX_HEAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_HEAD_INL_H_
#undef HEED_ENGINES_SOFTMAX_HEAD_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_HEAD_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "heed/engines/softmax/operands-inl.h"
#include "heed/engines/softmax/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/visit.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

// What a task holds while it multiplies.
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

// K and V of one key head, wherever they are read.
template <class O>
struct Head {
  SourceRows key_source, value_source;
  SourceRows key_scale, value_scale;  // where rows are quantised
  Place keys_at, values_at;
  Operand<typename O::Key> keys;
  Operand<typename O::Value> values;
};

template <class O>
HWY_INLINE void CopyKeys(const SourceRows& from, const Interval& keys, int64_t depth,
                         Workspace<O>& w) {
  if constexpr (O::kMatrixTiles) {
    w.keys_finite = O::CopyKeys(from, keys.begin, keys.end, depth, w.keys);
  } else {
    O::CopyKeys(from, keys.begin, keys.end, depth, w.keys);
  }
}

// The head of a task, copied if the plan says so and it is not there yet.
template <class O>
HWY_INLINE Head<O> HeadOf(const Problem& p, const Plan& plan, int64_t sequence,
                          int64_t key_head, Workspace<O>& w) {
  const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
  Head<O> head;
  if constexpr (O::kQuantized) {
    head.key_source = PagedKeysOf(p, p.k, s, key_head, sizeof(int8_t));
    head.value_source = PagedKeysOf(p, p.v, s, key_head, sizeof(int8_t));
    head.key_scale = PagedKeysOf(p, p.k_scale, s, key_head, sizeof(float));
    head.value_scale = PagedKeysOf(p, p.v_scale, s, key_head, sizeof(float));
  } else {
    head.key_source = KeysOf(p, p.k, s, key_head);
    head.value_source = KeysOf(p, p.v, s, key_head);
  }
  head.keys_at = plan.keys_at;
  head.values_at = plan.values_at;
  head.keys = {w.keys, static_cast<ptrdiff_t>(p.depth), s.key_begin};
  head.values = {w.values, static_cast<ptrdiff_t>(p.value_depth), s.key_begin};
  if constexpr (O::kKeysInLanes) return head;  // whose products read the sources
  if (plan.keys_at == Place::kCaller) {
    head.keys = {head.key_source.template At<typename O::Key>(0),
                 head.key_source.stride, 0};
  }
  if (plan.values_at == Place::kCaller) {
    head.values = {head.value_source.template At<typename O::Value>(0),
                   head.value_source.stride, 0};
  }
  if (w.copied_sequence == sequence && w.copied_head == key_head) return head;
  if (plan.keys_at == Place::kHead) {
    CopyKeys<O>(head.key_source, {s.key_begin, s.key_end}, p.depth, w);
  }
  if (plan.values_at == Place::kHead) {
    O::CopyValues(head.value_source, s.key_begin, s.key_end, p.value_depth, w.values);
  }
  w.copied_sequence = sequence;
  w.copied_head = key_head;
  return head;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_HEAD_INL_H_

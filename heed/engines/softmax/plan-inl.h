// One thread's buffers: their sizes, their places, and copies of K and V.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_SOFTMAX_PLAN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_PLAN_INL_H_
#undef HEED_ENGINES_SOFTMAX_PLAN_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_PLAN_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/visit.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// Vectors of lanes that one block may hold: a tile of C rows takes C C + C + 1
// registers.
inline constexpr int kMaxVectors = hs::kVectorRegisters == 32 ? 4 : 2;

// Sizes of one thread's buffers, in elements, and whether K and V are copied.
//
// Rows of [B, T, H, D] lie H D elements apart: multiples of 4 KiB fall into the
// same cache sets, and pages are used by 1 / H. Left in place, V costs up to 40 %
// at 4 KiB. A head is therefore copied once per thread, unless it has too few
// queries to be worth it or is too long to keep.
struct Plan {
  int vectors = 1;   // C
  int64_t lanes = 0; // W
  bool pack = false;
  int64_t queries = 0, logits = 0, outputs = 0, keys = 0, values = 0;

  int64_t elements() const {
    return queries + logits + 2 * outputs + keys + values;
  }
};

template <class T>
Plan MakePlan(const Problem& p) {
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
  constexpr int64_t kMinPackRows = 64;
  constexpr int64_t kMaxPackBytes = int64_t{64} << 20;
  int64_t lanes_wanted = 0, rows = 0, max_keys = 0;
  for (const Sequence& s : p.sequences) {
    lanes_wanted = std::max(lanes_wanted, s.num_queries > kMaxVectors * N
                                              ? s.num_queries
                                              : s.num_queries * p.group());
    rows = std::max(rows, s.num_queries * p.group());
    max_keys = std::max(max_keys, s.key_end - s.key_begin);
  }
  Plan plan;
  while (plan.vectors < kMaxVectors && plan.vectors * N < lanes_wanted) {
    plan.vectors *= 2;
  }
  plan.lanes = plan.vectors * N;
  const bool strided =
      p.k.token_stride != p.depth || p.v.token_stride != p.value_depth;
  const double pack_bytes = static_cast<double>(max_keys) *
                            static_cast<double>(p.depth + p.value_depth) *
                            sizeof(T);
  plan.pack = strided && rows >= kMinPackRows && pack_bytes <= kMaxPackBytes;
  plan.queries = p.depth * plan.lanes;
  plan.logits = kTileKeys * plan.lanes;
  plan.outputs = p.value_depth * plan.lanes;
  // Whole cache lines, so that what follows stays aligned.
  const auto lines = [](int64_t elements) { return (elements + 31) / 32 * 32; };
  plan.keys = plan.pack ? lines(max_keys * p.depth) : 0;
  plan.values = plan.pack ? lines(max_keys * p.value_depth) : 0;
  return plan;
}

// One thread's buffers. The head that K and V were last copied from is kept, as
// successive tasks mostly share it.
template <class T>
struct Workspace {
  int64_t packed_sequence, packed_head;
  T *queries, *logits, *outputs, *totals, *keys, *values;

  static constexpr int64_t kHeaderBytes = 128;

  void Init(const Plan& plan) {
    packed_sequence = packed_head = -1;
    queries = reinterpret_cast<T*>(reinterpret_cast<char*>(this) + kHeaderBytes);
    logits = queries + plan.queries;
    outputs = logits + plan.logits;
    totals = outputs + plan.outputs;
    keys = totals + plan.outputs;
    values = keys + plan.keys;
  }
};

// K and V of one key head as the tiles read them: key j at data + j stride.
template <class T>
struct HeadRows {
  const T* data;
  ptrdiff_t stride;
};

template <class T>
HeadRows<T> InPlace(const Rows& rows, int64_t batch, int64_t token, int64_t head) {
  return {static_cast<const T*>(rows.data) + batch * rows.batch_stride +
              token * rows.token_stride + head * rows.head_stride,
          static_cast<ptrdiff_t>(rows.token_stride)};
}

template <class T>
HeadRows<T> Packed(const HeadRows<T>& from, int64_t begin, int64_t end,
                   int64_t depth, T* HWY_RESTRICT to) {
  const size_t num_bytes = static_cast<size_t>(depth) * sizeof(T);
  for (int64_t j = begin; j < end; ++j) {
    std::memcpy(to + (j - begin) * depth, from.data + j * from.stride, num_bytes);
  }
  return {to - begin * depth, static_cast<ptrdiff_t>(depth)};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_PLAN_INL_H_

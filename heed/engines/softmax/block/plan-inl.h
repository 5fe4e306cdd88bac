// The buffers of one thread: their sizes, their places, and the copies of K and V.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_PLAN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_PLAN_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_PLAN_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_PLAN_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/block/operands-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/block/row_prefetch-inl.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// The place where K or V of a head is read: the caller's tensor, a copy of the head, or a copy of the current tile.
enum class Place { kCaller, kHead, kTile };

// Sizes of one thread's buffers, in elements, and where K and V are read.
//
// Rows of a [B, T, H, D] tensor are H D elements apart. If that is a multiple of 4 KiB, they fall into the same cache
// sets, and only 1 / H of each memory page is used: V in place then costs up to 40 %. A head that is strided, or that
// the products cannot read as it is, is therefore copied once per thread, unless it has too few queries to repay the
// copy or is too long to keep. With many queries a copy pays for any head, by 1.5 points of peak at 2048, because
// scratch is on huge pages.
struct Plan {
  int vectors = 1;    // C
  int64_t lanes = 0;  // W
  int64_t rows = 0;   // query rows of a block, at most
  Place keys_at = Place::kCaller, values_at = Place::kCaller;
  int64_t queries = 0, logits = 0, weights = 0, outputs = 0, spare = 0, keys = 0, values = 0;
};

// The fewest vectors that a block may have. Where a vector has no more lanes than decoding takes rows, blocks of one
// vector would never run, because so few rows are decoded. A block of several register tiles of lanes computes only
// those that have rows, so narrower blocks would save nothing. A block of one register tile computes all of it, so
// narrower blocks save work.
template <class O>
inline constexpr int kFewestVectors =
    O::kMostVectors > hs::kShapes.tile_vectors
        ? O::kMostVectors
        : HWY_MAX(O::kLaneVectors, hn::MaxLanes(hn::ScalableTag<typename O::Compute>()) <= kDecodeRows ? 2 : 1);

// Makes the plan. `vectors` is C; with 0, C is as small as the number of rows allows.
template <class O>
Plan MakePlan(const Problem& p, int vectors = 0) {
  using T = typename O::Compute;
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
  constexpr int64_t kMinCopyRows = 64, kMinKeyCopyRows = 256, kMinAnyCopyRows = 1024;
  constexpr int64_t kMaxCopyBytes = int64_t{64} << 20;
  int64_t lanes_wanted = 0, rows = 0, max_keys = 0;
  bool in_order = p.page_tokens == 0;  // rows of keys are a constant stride apart
  for (const Sequence& s : p.sequences) {
    lanes_wanted =
        std::max(lanes_wanted, s.num_queries > O::kMostVectors * N ? s.num_queries : s.num_queries * p.group());
    rows = std::max(rows, s.num_queries * p.group());
    max_keys = std::max(max_keys, s.key_end - s.key_begin);
    in_order = in_order && s.tail == nullptr;
  }
  Plan plan;
  plan.vectors = kFewestVectors<O>;
  while (plan.vectors < O::kMostVectors && plan.vectors * N < lanes_wanted) {
    plan.vectors *= 2;
  }
  if (vectors != 0) plan.vectors = vectors;
  plan.vectors = std::max(plan.vectors, O::kLaneVectors);
  plan.lanes = plan.rows = plan.vectors * N;
  const double bytes_of_head =
      static_cast<double>(max_keys) * (static_cast<double>(p.depth) * sizeof(typename O::Key) +
                                       static_cast<double>(p.value_depth) * sizeof(typename O::Value));
  const bool strided = p.k.token_stride != p.depth || p.v.token_stride != p.value_depth;
  const auto place = [&](bool readable, int64_t fewest_rows) {
    if (O::kKeysInLanes) return Place::kCaller;  // reads any storage, pages too
    readable = readable && in_order;
    const bool gains = strided || !readable || rows >= kMinAnyCopyRows;
    const bool copy = rows >= (readable ? fewest_rows : kMinCopyRows) && bytes_of_head <= kMaxCopyBytes;
    if (copy && gains && !p.pages_gone) return Place::kHead;
    return readable ? Place::kCaller : Place::kTile;
  };
  plan.keys_at = place(O::KeysInPlace(p.dtype), kMinKeyCopyRows);
  const bool no_values = p.value_depth == 0;  // only probabilities are computed
  plan.values_at = no_values ? Place::kCaller : place(O::ValuesInPlace(p.dtype), kMinCopyRows);
  const auto keys_held = [&](Place at) {
    if (at == Place::kCaller) return int64_t{0};
    return at == Place::kHead ? max_keys : std::min(max_keys, O::kGrid.tile);
  };
  plan.queries = O::QueryRows(p.depth) * plan.lanes;
  plan.logits = O::kGrid.tile * plan.lanes;
  plan.outputs = O::OutputRows(p.value_depth) * plan.lanes;
  plan.keys = O::KeySize(keys_held(plan.keys_at), p.depth);
  plan.values = O::ValueSize(keys_held(plan.values_at), p.value_depth);
  if constexpr (O::kUsesAmx) {
    plan.weights = O::WeightRows() * plan.lanes;
    plan.spare = plan.outputs;
  }
  return plan;
}

// One thread's buffers. The workspace records which head its copies of K and V are of, because successive tasks mostly
// share one.
template <class O>
struct Workspace {
  using T = typename O::Compute;
  int64_t copied_sequence, copied_head;
  typename O::Query* queries;
  T* logits;
  uint32_t* weights;  // P, if it is not stored in place of the logits
  T *outputs, *totals;
  T* spare;  // the outputs that the AMX pipeline began with
  typename O::Key* keys;
  typename O::Value* values;
  bool keys_finite;     // of the copied keys; known for AMX only
  T* slopes = nullptr;  // slope of the soft cap, beside the logits; null: not needed
  RowPrefetch ahead;    // prefetches what is read after the current block

  static int64_t Bytes(const Plan& plan) {
    Workspace unused = {};
    return unused.LayOut(plan, nullptr);
  }
  void Init(const Plan& plan) {
    copied_sequence = copied_head = -1;
    slopes = nullptr;
    ahead.Clear();
    LayOut(plan, reinterpret_cast<char*>(this));
  }

 private:
  // Lays out the buffers behind this struct, each on cache lines of its own. Returns where they end.
  int64_t LayOut(const Plan& plan, char* base) {
    Carver carver(base, (sizeof(Workspace) + 127) / 128 * 128);
    carver.Next(queries, plan.queries);
    carver.Next(logits, plan.logits);
    carver.Next(weights, plan.weights);
    carver.Next(outputs, plan.outputs);
    carver.Next(totals, plan.outputs);
    carver.Next(spare, plan.spare);
    carver.Next(keys, plan.keys);
    carver.Next(values, plan.values);
    return carver.bytes();
  }
};

template <class O>
Workspace<O>& WorkspaceOf(Context& ctx, int worker) {
  return *static_cast<Workspace<O>*>(ctx.Scratch(worker));
}

// Reserves scratch for every thread: a workspace, followed by `more_bytes`.
template <class O>
void ReserveWorkspaces(Context& ctx, const Plan& plan, int64_t more_bytes = 0) {
  ctx.ReserveScratch(Workspace<O>::Bytes(plan) + more_bytes);
  for (int worker = 0; worker < ctx.num_threads(); ++worker) WorkspaceOf<O>(ctx, worker).Init(plan);
}

inline SourceRows SourceOf(const Rows& rows, DType dtype, int64_t batch, int64_t token, int64_t head) {
  // A tensor without elements may have a null address, to which no offset may be added.
  const int64_t first =
      rows.data == nullptr ? 0 : batch * rows.batch_stride + token * rows.token_stride + head * rows.head_stride;
  return {static_cast<const char*>(rows.data) + first * static_cast<int64_t>(SizeOf(dtype)),
          static_cast<ptrdiff_t>(rows.token_stride), dtype};
}

// Returns the rows of a key head in pages, whose elements have `element` bytes.
inline SourceRows PagedKeysOf(const Problem& p, const Rows& rows, const Sequence& s, int64_t key_head, size_t element) {
  return {nullptr,       static_cast<ptrdiff_t>(rows.token_stride),
          p.dtype,       s.pages,
          p.page_tokens, rows.page_offset + key_head * rows.head_stride * static_cast<int64_t>(element),
          s.tail,        s.tail_begin};
}

// Returns K or V of a key head.
inline SourceRows KeysOf(const Problem& p, const Rows& rows, const Sequence& s, int64_t key_head) {
  if (s.pages == nullptr) {
    SourceRows source = SourceOf(rows, p.dtype, s.batch, s.first_k, key_head);
    source.tail = s.tail;
    source.tail_begin = s.tail_begin;
    return source;
  }
  return PagedKeysOf(p, rows, s, key_head, SizeOf(p.dtype));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_PLAN_INL_H_

// Exact attention forward: query rows in lanes, tiled online softmax.
//
// Compiled once per SIMD target and dtype. For W = C N rows at a time:
//
//   per segment of 512 keys, a fresh state (m, l, O):
//     per visited tile of 64 keys:
//       S[key][lane]  = K Q^T                register tiles, K read in place
//       S             = softcap, biases, masks; m' = max(m, max S)
//       P             = exp(S - m'), l = l exp(m - m') + sum P
//       O[dim][lane]  = O exp(m - m') + V^T P, V read in place
//     merge the segment into the row's totals
//   o = O / l, transposed back
//
// FMA is the bound: 2 (D + Dv) flops per pair against one exponential of about
// ten instructions. Rows in lanes need no horizontal sums and no packing of K and
// V; statistics are plain vectors, masks are lane masks.
//
// Canonical order: a logit is one chain over the depth, l and each output one
// chain over the keys of a segment, segments are merged ascending. Everything a
// row does not see is an exact no-op on it (S = -inf, P = 0, factors of 1), so
// its bits depend on nothing but its own keys and the grid they lie on.
#if defined(HEED_ENGINES_SOFTMAX_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_FORWARD_INL_H_
#undef HEED_ENGINES_SOFTMAX_FORWARD_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_FORWARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "heed/core/context.h"
#include "heed/core/os.h"
#include "heed/engines/softmax/forward.h"
#include "heed/engines/softmax/logits-inl.h"
#include "heed/engines/softmax/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/rows-inl.h"
#include "heed/engines/softmax/visit.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"
// After highway.h:
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// One block of rows, from queries to outputs.
template <class T, int C>
class Block {
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr size_t N = hn::MaxLanes(D());
  static constexpr size_t W = C * N;

 public:
  Block(const Problem& problem, const Sequence& sequence, const BlockGrid& grid,
        int64_t key_head, int64_t block, const Workspace<T>& workspace,
        const HeadRows<T>& keys, const HeadRows<T>& values)
      : p_(problem), s_(sequence), grid_(grid), key_head_(key_head),
        block_(block), keys_(keys), values_(values), w_(workspace),
        num_rows_(static_cast<size_t>(grid.NumRows(block))) {}

  HWY_ATTR void Compute() {
    const T* q[W];
    SetLanes(q);
    const double factor = p_.softcap > 0 && SoftcapRidesOnQueries(p_.softcap)
                              ? p_.scale * SoftcapFactor(p_.softcap)
                              : p_.scale;
    RowsToLanes(d_, q, num_rows_, static_cast<size_t>(p_.depth),
                static_cast<T>(factor), W, w_.queries);
    Pass</*kFlagMasked=*/false>();
    // A weight of 0 cannot hide a value of NaN or infinity, nor a bias of -inf such
    // a logit. If one came through, do it again with masked pairs told apart; all
    // other bits stay.
    if (any_tile_ && MaskedLeaked()) Pass</*kFlagMasked=*/true>();
    Finish();
  }

 private:
  HWY_INLINE void SetLanes(const T** q) {
    const bool dropout = p_.dropout > 0;
    for (size_t lane = 0; lane < W; ++lane) {
      const bool present = lane < num_rows_;
      const BlockGrid::Row row =
          present ? grid_.At(block_, static_cast<int64_t>(lane))
                  : BlockGrid::Row{0, 0};
      const int64_t head = key_head_ * grid_.heads + row.head;
      if (present) {
        runs_[lane] = VisibleKeys(p_, s_, row.query);
        q[lane] = static_cast<const T*>(p_.q.data) +
                  s_.batch * p_.q.batch_stride +
                  (s_.first_q + row.query) * p_.q.token_stride +
                  head * p_.q.head_stride;
      }
      const KeyRuns runs = present ? runs_[lane] : KeyRuns();
      using TI = typename Lanes<T, W>::TI;
      lanes_.first_begin[lane] = static_cast<TI>(runs.first.begin);
      lanes_.first_end[lane] = static_cast<TI>(runs.first.end);
      lanes_.second_begin[lane] = static_cast<TI>(runs.second.begin);
      lanes_.second_end[lane] = static_cast<TI>(runs.second.end);
      const int64_t position = s_.start + row.query;
      lanes_.position[lane] = position;
      if (dropout) {
        lanes_.position_low[lane] = static_cast<uint32_t>(position);
        lanes_.head_row[lane] =
            static_cast<uint32_t>(s_.batch * p_.query_heads + head);
      }
      if (!p_.slopes.empty()) {
        lanes_.slope[lane] = static_cast<T>(
            p_.slopes[static_cast<size_t>(s_.batch * p_.slopes_stride + head)]);
      }
      if (!p_.segments_q.empty()) {
        const int32_t id = p_.segments_q[static_cast<size_t>(
            s_.batch * p_.segments_q_stride + row.query)];
        lanes_.segment[lane] = static_cast<TI>(id < 0 ? -1 : id);
      }
      lanes_.bias[lane] = PairRow(p_.bias, SizeOf(p_.bias.dtype), head, row.query);
      lanes_.mask[lane] = PairRow(p_.mask, 1, head, row.query);
    }
    // What each vector of lanes can see, to leave out vectors that see nothing
    // of a tile's keys.
    for (size_t c = 0; c < C; ++c) {
      Interval& hull = hull_[c] = {};
      for (size_t lane = c * N; lane < std::min(num_rows_, (c + 1) * N); ++lane) {
        for (const Interval& run : {runs_[lane].first, runs_[lane].second}) {
          if (run.empty()) continue;
          hull = hull.empty() ? run
                              : Interval{std::min(hull.begin, run.begin),
                                         std::max(hull.end, run.end)};
        }
      }
    }
  }

  const void* PairRow(const Pairs& pairs, size_t element, int64_t head,
                      int64_t query) const {
    if (pairs.data == nullptr) return nullptr;
    return static_cast<const char*>(pairs.data) +
           (s_.batch * pairs.batch_stride + head * pairs.head_stride +
            query * pairs.query_stride) *
               static_cast<int64_t>(element);
  }

  // All visited tiles, into totals_: un-normalised outputs, maxima, sums.
  template <bool kFlagMasked>
  HWY_INLINE void Pass() {
    V m[C], l[C];  // of the segment
    outputs_ = w_.outputs;
    totals_ = w_.totals;
    any_tile_ = false;
    int64_t segment = -1;
    bool first_segment = true, first_tile = true;
    TileVisits visits(s_.key_begin, {runs_, num_rows_});
    for (Tile tile; visits.Next(&tile);) {
      if (by_data()) {
        const Cover cover = CoverOf(p_, s_, grid_, block_, key_head_, tile.keys);
        if (cover == Cover::kNone) continue;
        partial_ = cover == Cover::kSome;
      }
      if (tile.segment != segment) {
        if (segment >= 0) {
          Merge(first_segment, m, l);
          first_segment = false;
        }
        segment = tile.segment;
        first_tile = true;
        for (int c = 0; c < C; ++c) {
          m[c] = hn::Set(d_, -std::numeric_limits<T>::infinity());
          l[c] = hn::Zero(d_);
        }
      }
      OneTile<kFlagMasked>(tile, first_tile, m, l);
      first_tile = false;
      any_tile_ = true;
    }
    if (any_tile_) Merge(first_segment, m, l);
  }

  bool by_data() const { return p_.mask.data != nullptr || !p_.segments_q.empty(); }

  // A segment's state into the totals. The first one is taken as it is, which is
  // what merging it into an empty total gives, bit for bit.
  HWY_INLINE void Merge(bool first, const V* m, const V* l) {
    if (first) {
      std::swap(outputs_, totals_);
      for (int c = 0; c < C; ++c) {
        hn::Store(m[c], d_, max_ + static_cast<size_t>(c) * N);
        hn::Store(l[c], d_, sum_ + static_cast<size_t>(c) * N);
      }
      return;
    }
    V keep[C], add[C];
    for (int c = 0; c < C; ++c) {
      const size_t at = static_cast<size_t>(c) * N;
      const V old = hn::Load(d_, max_ + at);
      const V max = hn::Max(old, m[c]);
      const V shift = Shift(max);
      keep[c] = Weight(d_, hn::Sub(old, shift));
      add[c] = Weight(d_, hn::Sub(m[c], shift));
      hn::Store(max, d_, max_ + at);
      hn::Store(hn::MulAdd(l[c], add[c],
                           hn::Mul(hn::Load(d_, sum_ + at), keep[c])),
                d_, sum_ + at);
    }
    for (int64_t e = 0; e < p_.value_depth; ++e) {
      for (int c = 0; c < C; ++c) {
        const size_t at = static_cast<size_t>(e) * W + static_cast<size_t>(c) * N;
        const V total = hn::Mul(hn::Load(d_, totals_ + at), keep[c]);
        hn::Store(hn::MulAdd(hn::Load(d_, outputs_ + at), add[c], total), d_,
                  totals_ + at);
      }
    }
  }

  // What is subtracted from logits: the maximum, or 0 where there is none yet.
  HWY_INLINE V Shift(V max) const {
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    return hn::IfThenElse(hn::Eq(max, none), hn::Zero(d_), max);
  }

  // The parts of a tile that the same vectors of lanes see, ascending. A vector
  // outside them sees nothing there: neither product needs it.
  HWY_INLINE int SplitTile(const Tile& tile, Run* runs) const {
    if (tile.full) {
      runs[0] = {tile.keys.begin, tile.keys.end, 0, C};
      return 1;
    }
    int count = 0;
    for (int64_t at = tile.keys.begin; at < tile.keys.end;) {
      int64_t end = tile.keys.end;
      size_t c0 = C, c1 = 0;
      for (size_t c = 0; c < C; ++c) {
        const bool sees = hull_[c].begin <= at && at < hull_[c].end;
        if (sees) {
          c0 = std::min(c0, c);
          c1 = c + 1;
        }
        if (hull_[c].begin > at) end = std::min(end, hull_[c].begin);
        if (hull_[c].end > at) end = std::min(end, hull_[c].end);
      }
      if (c0 < c1) runs[count++] = {at, end, c0, c1};
      at = end;
    }
    return count;
  }

  // f(std::integral_constant<int, number of vectors>) for a run.
  template <class F>
  HWY_INLINE static void WithVectors(size_t count, const F& f) {
    if constexpr (C >= 4) {
      if (count == 4) return f(std::integral_constant<int, 4>());
      if (count == 3) return f(std::integral_constant<int, 3>());
    }
    if constexpr (C >= 2) {
      if (count == 2) return f(std::integral_constant<int, 2>());
    }
    return f(std::integral_constant<int, 1>());
  }

  template <bool kFlagMasked>
  HWY_INLINE void OneTile(const Tile& tile, bool first, V* m, V* l) {
    Run runs[2 * C + 1];
    const int num_runs = SplitTile(tile, runs);
    const int64_t origin = tile.keys.begin;
    V max[C];
    for (int c = 0; c < C; ++c) {
      max[c] = hn::Set(d_, -std::numeric_limits<T>::infinity());
    }
    for (int r = 0; r < num_runs; ++r) Logits<kFlagMasked>(runs[r], tile, max);

    V shift[C], rescale[C];
    for (int c = 0; c < C; ++c) {
      max[c] = hn::Max(max[c], m[c]);
      shift[c] = Shift(max[c]);
      rescale[c] = Weight(d_, hn::Sub(m[c], shift[c]));
      m[c] = max[c];
      l[c] = hn::Mul(l[c], rescale[c]);
    }
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      T* s = At(run, origin);
      WithVectors(run.c1 - run.c0, [&](auto vectors) HWY_ATTR {
        Exponentials<W, vectors.value, kFlagMasked>(
            d_, static_cast<size_t>(run.end - run.begin), s, shift + run.c0,
            l + run.c0);
      });
      if (p_.dropout > 0) {
        ApplyDropout<W>(d_, run, origin, p_, lanes_, w_.logits);
      }
    }

    // Where a tile falls apart, the outputs are rescaled beforehand, once.
    const bool whole = num_runs == 1 && runs[0].c0 == 0 && runs[0].c1 == C;
    if (!whole) {
      for (int64_t e = 0; e < p_.value_depth; ++e) {
        for (int c = 0; c < C; ++c) {
          T* at = outputs_ + static_cast<size_t>(e) * W + static_cast<size_t>(c) * N;
          hn::Store(first ? hn::Zero(d_) : hn::Mul(hn::Load(d_, at), rescale[c]),
                    d_, at);
        }
      }
      for (int c = 0; c < C; ++c) rescale[c] = hn::Set(d_, T{1});
    }
    for (int r = 0; r < num_runs; ++r) {
      Values<kFlagMasked>(runs[r], origin, whole && first, rescale);
    }
  }

  T* At(const Run& run, int64_t origin) const {
    return w_.logits + static_cast<size_t>(run.begin - origin) * W + run.c0 * N;
  }

  // Asks for the biases of lanes [begin, end) and the next tile's keys. Rows of a
  // bias lie far apart, where no hardware prefetcher follows, and there are more of
  // them than a core can wait for at once: hence a few at a time, between products.
  HWY_INLINE void PrefetchBias(size_t begin, size_t end, int64_t key) const {
    if (p_.bias.data == nullptr || p_.bias.key_stride != 1) return;
    const int64_t element = static_cast<int64_t>(SizeOf(p_.bias.dtype));
    for (size_t lane = begin; lane < std::min(end, num_rows_); ++lane) {
      const char* row = static_cast<const char*>(lanes_.bias[lane]) + key * element;
      for (int64_t at = 0; at < kTileKeys * element; at += 64) {
        PrefetchToL2(row + at);
      }
    }
  }

  // K Q^T of a run, each logit finished by f(logit, key, vector).
  template <int kVectors, class F>
  HWY_INLINE void Products(const Run& run, int64_t origin, V* max, const F& f) {
    const T* k = keys_.data + run.begin * keys_.stride;
    T* s = At(run, origin);
    hs::ForTiles<hs::TileRows<kVectors>()>(
        0, static_cast<size_t>(run.end - run.begin),
        [&](auto rows, size_t j) HWY_ATTR {
          const int64_t key = run.begin + static_cast<int64_t>(j);
          PrefetchBias(j, j + rows.value, run.end);
          hs::LogitTile<rows.value, kVectors>(
              d_, w_.queries + run.c0 * N, W,
              k + static_cast<ptrdiff_t>(j) * keys_.stride, keys_.stride,
              static_cast<size_t>(p_.depth), s + j * W, max,
              [&](V x, int r, int c) HWY_ATTR { return f(x, key + r, c); });
        });
  }

  // S of a run, in the normative order. Each step leaves the maximum of what it
  // wrote, so that the last one has it.
  template <bool kFlagMasked>
  HWY_INLINE void Logits(const Run& run, const Tile& visited, V* max) {
    const int64_t origin = visited.keys.begin;
    WithVectors(run.c1 - run.c0, [&](auto vectors) HWY_ATTR {
      constexpr int kVectors = vectors.value;
      V m[kVectors];
      for (int c = 0; c < kVectors; ++c) {
        m[c] = hn::Set(d_, -std::numeric_limits<T>::infinity());
      }
      T* tile = w_.logits;
      const auto keep = [](V x, int64_t, int) HWY_ATTR { return x; };
      const bool alibi = !p_.slopes.empty(), softcap = p_.softcap > 0;
      if (!alibi || softcap) Products<kVectors>(run, origin, m, keep);
      if (softcap) {
        ApplySoftcap<W, kVectors>(d_, run, origin, p_.softcap, tile, m);
      }
      if (alibi) {
        const Alibi<kVectors, D> bias(d_, run, visited.grid, lanes_);
        const auto add = [&](V x, int64_t key, int c) HWY_ATTR {
          return bias(d_, x, key, c);
        };
        if (softcap) {
          Rewrite<W, kVectors>(d_, run, origin, tile, m, add);
        } else {  // nothing in between: while the logits are in registers
          Products<kVectors>(run, origin, m, add);
        }
      }
      if (p_.bias.data != nullptr) {
        ApplyBias<W, kVectors, kFlagMasked>(d_, run, origin, p_.bias, lanes_, tile, m);
      }
      if (partial_ && p_.mask.data != nullptr) {
        ApplyMask<W, kVectors>(d_, run, origin, p_.mask, lanes_, tile, m);
      }
      if (partial_ && !p_.segments_q.empty()) {
        ApplySegments<W, kVectors>(
            d_, run, origin, p_.segments_k.data() + s_.batch * p_.segments_k_stride,
            lanes_, tile, m);
      }
      if (!visited.full && p_.windowed()) {
        ApplyRuns<W, kVectors, 2>(d_, run, origin, lanes_, tile, m);
      } else if (!visited.full) {
        ApplyRuns<W, kVectors, 1>(d_, run, origin, lanes_, tile, m);
      }
      for (int c = 0; c < kVectors; ++c) {
        V& of_tile = max[run.c0 + static_cast<size_t>(c)];
        of_tile = hn::Max(m[c], of_tile);
      }
    });
  }

  template <bool kFlagMasked>
  HWY_INLINE void Values(const Run& run, int64_t origin, bool first,
                         const V* rescale) {
    const T* p = At(run, origin);
    const T* v = values_.data + run.begin * values_.stride;
    WithVectors(run.c1 - run.c0, [&](auto vectors) HWY_ATTR {
      hs::ForTiles<hs::TileRows<vectors.value>()>(
          0, static_cast<size_t>(p_.value_depth),
          [&](auto rows, size_t e) HWY_ATTR {
            hs::ValueTile<rows.value, vectors.value, kFlagMasked>(
                d_, p, W, v + e, values_.stride,
                static_cast<size_t>(run.end - run.begin), first,
                rescale + run.c0, outputs_ + e * W + run.c0 * N);
          });
    });
  }

  // True if something that masks should have hidden may have come through: an
  // output that is not finite although the sum is, or with a bias, which may mask
  // a NaN among the logits, a sum that is not.
  HWY_INLINE bool MaskedLeaked() const {
    for (size_t lane = 0; lane < num_rows_; lane += N) {
      const V sum = hn::Load(d_, sum_ + lane);
      V marks = hn::Zero(d_);  // NaN as soon as one output is not finite
      for (int64_t e = 0; e < p_.value_depth; ++e) {
        marks = hn::MulAdd(hn::Load(d_, totals_ + static_cast<size_t>(e) * W + lane),
                           hn::Zero(d_), marks);
      }
      auto leaked = hn::And(hn::IsNaN(marks), hn::IsFinite(sum));
      if (p_.bias.data != nullptr) leaked = hn::Or(leaked, hn::IsNaN(sum));
      const auto present = hn::FirstN(d_, num_rows_ - lane);
      if (!hn::AllFalse(d_, hn::And(leaked, present))) return true;
    }
    return false;
  }

  HWY_INLINE void Finish() {
    T* o[W];
    HWY_ALIGN T factor[W];
    HWY_ALIGN T lse[W];
    if (!any_tile_) {
      std::fill(totals_, totals_ + static_cast<size_t>(p_.value_depth) * W, T{0});
      std::fill(sum_, sum_ + W, T{0});
      std::fill(max_, max_ + W, T{0});
    }
    const V undropped = hn::Set(d_, static_cast<T>(1 / (1 - p_.dropout)));
    for (size_t lane = 0; lane < W; lane += N) {
      const V sum = hn::Load(d_, sum_ + lane);
      const auto empty = hn::Eq(sum, hn::Zero(d_));
      hn::Store(hn::IfThenZeroElse(empty, hn::Div(undropped, sum)), d_,
                factor + lane);
      const V natural = hn::Add(hn::Load(d_, max_ + lane), hn::Log(d_, sum));
      const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
      const V nan = hn::Add(sum, sum);  // where the sum is NaN, so is its log
      hn::Store(hn::IfThenElse(hn::IsNaN(sum), nan,
                               hn::IfThenElse(empty, none, natural)),
                d_, lse + lane);
    }
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      const BlockGrid::Row row = grid_.At(block_, static_cast<int64_t>(lane));
      const int64_t head = key_head_ * grid_.heads + row.head;
      const int64_t token = s_.first_q + row.query;
      o[lane] = const_cast<T*>(static_cast<const T*>(p_.o.data)) +
                s_.batch * p_.o.batch_stride + token * p_.o.token_stride +
                head * p_.o.head_stride;
      if (p_.lse.data != nullptr) {
        const_cast<T*>(static_cast<const T*>(
            p_.lse.data))[s_.batch * p_.lse.batch_stride +
                          token * p_.lse.token_stride +
                          head * p_.lse.head_stride] = lse[lane];
      }
      if (!p_.sinks.empty() && factor[lane] != 0) {
        const double sink = p_.sinks[static_cast<size_t>(head)];
        factor[lane] = static_cast<T>(
            static_cast<double>(factor[lane]) /
            (1 + std::exp(sink - static_cast<double>(lse[lane]))));
      }
    }
    LanesToRows(d_, totals_, W, static_cast<size_t>(p_.value_depth), factor, o,
                num_rows_);
  }

  static constexpr D d_{};
  const Problem& p_;
  const Sequence& s_;
  const BlockGrid& grid_;
  const int64_t key_head_, block_;
  const HeadRows<T> keys_, values_;
  const Workspace<T>& w_;
  const size_t num_rows_;
  T* outputs_ = nullptr;  // of the current segment
  T* totals_ = nullptr;   // of all segments so far
  bool any_tile_ = false;
  bool partial_ = false;  // the mask or segments cut into the current tile
  HWY_ALIGN T max_[W], sum_[W];
  Lanes<T, W> lanes_;
  KeyRuns runs_[W];
  Interval hull_[C];
};

template <class T, int C>
void RunBlocks(Context& ctx, const Problem& p, const Plan& plan) {
  const BlockQueue queue(p, plan.lanes);
  ctx.ParallelFor(queue.size(), [&](int64_t index, int worker) HWY_ATTR {
    const os::ScopedFloatControl float_control;
    const BlockQueue::Task task = queue.At(index);
    const Sequence& s = p.sequences[static_cast<size_t>(task.sequence)];
    Workspace<T>& w = *static_cast<Workspace<T>*>(ctx.Scratch(worker));
    HeadRows<T> keys = InPlace<T>(p.k, s.batch, s.first_k, task.key_head);
    HeadRows<T> values = InPlace<T>(p.v, s.batch, s.first_k, task.key_head);
    if (plan.pack) {
      if (w.packed_sequence != task.sequence || w.packed_head != task.key_head) {
        Packed(keys, s.key_begin, s.key_end, p.depth, w.keys);
        Packed(values, s.key_begin, s.key_end, p.value_depth, w.values);
        w.packed_sequence = task.sequence;
        w.packed_head = task.key_head;
      }
      keys = {w.keys - s.key_begin * p.depth, static_cast<ptrdiff_t>(p.depth)};
      values = {w.values - s.key_begin * p.value_depth,
                static_cast<ptrdiff_t>(p.value_depth)};
    }
    const BlockGrid grid(p, s, plan.lanes);
    Block<T, C>(p, s, grid, task.key_head, task.block, w, keys, values).Compute();
  });
}

template <class T>
int64_t ScratchBytes(const Problem& p) {
  return Workspace<T>::kHeaderBytes +
         MakePlan<T>(p).elements() * static_cast<int64_t>(sizeof(T));
}

template <class T>
void Forward(Context& ctx, const Problem& p) {
  const Plan plan = MakePlan<T>(p);
  ctx.ReserveScratch(static_cast<size_t>(ScratchBytes<T>(p)));
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<Workspace<T>*>(ctx.Scratch(worker))->Init(plan);
  }
  switch (plan.vectors) {
    case 1: return RunBlocks<T, 1>(ctx, p, plan);
    case 2: return RunBlocks<T, 2>(ctx, p, plan);
    default: return RunBlocks<T, kMaxVectors>(ctx, p, plan);
  }
}

template <class T>
int64_t NumLanes(const Problem& p) {
  return MakePlan<T>(p).lanes;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_FORWARD_INL_H_

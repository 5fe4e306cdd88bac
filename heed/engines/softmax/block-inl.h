// A block of query rows, one per lane, and its logits tile by tile: what every
// pass over exact attention does first.
//
// Compiled once per SIMD target, operand type and number of vectors. A tile is
// S[key][lane] = K Q^T, in cache, with soft cap, biases and masks applied.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "heed/core/context.h"
#include "heed/engines/softmax/decays-inl.h"
#include "heed/engines/softmax/kept_tile-inl.h"
#include "heed/engines/softmax/logits-inl.h"
#include "heed/engines/softmax/operands-inl.h"
#include "heed/engines/softmax/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/rows-inl.h"
#include "heed/engines/softmax/visit.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

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

template <class O, int C>
class Block {
 public:
  Block(const Problem& problem, const Sequence& sequence, const BlockGrid& grid,
        int64_t key_head, int64_t block, Workspace<O>& workspace,
        const Head<O>& head)
      : p_(problem), s_(sequence), grid_(grid), key_head_(key_head),
        block_(block), head_(head), w_(workspace),
        num_rows_(static_cast<size_t>(grid.NumRows(block))) {}

  // The queries are those of several sequences, one after the other, as many of each.
  void Join(const Sequence* members, int64_t queries_each) {
    members_ = members;
    queries_each_ = queries_each;
  }

 protected:
  using T = typename O::Compute;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr size_t N = hn::MaxLanes(D());
  static constexpr size_t W = C * N;

  // The keys that each row sees.
  HWY_INLINE void FindKeys() {
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      BlockGrid::Row& row = rows_[lane] = grid_.At(block_, static_cast<int64_t>(lane));
      of_[lane] = &s_;
      if (members_ != nullptr) {
        of_[lane] = members_ + row.query / queries_each_;
        row.query %= queries_each_;
      }
      runs_[lane] = VisibleKeys(p_, *of_[lane], row.query);
    }
  }

  // Leaves out all other keys.
  HWY_INLINE void KeepKeys(const Interval& keys) {
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      for (Interval* run : {&runs_[lane].first, &runs_[lane].second}) {
        *run = {std::max(run->begin, keys.begin), std::min(run->end, keys.end)};
      }
    }
  }

  HWY_INLINE bool SeesAny() const {
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      if (runs_[lane].size() > 0) return true;
    }
    return false;
  }

  // Everything else that does not depend on the tile.
  HWY_INLINE void Prepare() {
    const void* q[W];
    SetLanes(q);
    PackQueries(p_.dtype, q);
  }

  // What the passes over a tile need to know of each lane, and where its query is.
  HWY_NOINLINE void SetLanes(const void** q) {
    const bool dropout = p_.dropout > 0;
    for (size_t lane = 0; lane < W; ++lane) {
      const bool present = lane < num_rows_;
      const BlockGrid::Row row = present ? rows_[lane] : BlockGrid::Row{0, 0};
      const Sequence& s = present ? *of_[lane] : s_;
      const int64_t head = key_head_ * grid_.heads + row.head;
      if (present) {
        q[lane] = static_cast<const char*>(p_.q.data) +
                  (s.batch * p_.q.batch_stride +
                   (s.first_q + row.query) * p_.q.token_stride +
                   head * p_.q.head_stride) *
                      static_cast<int64_t>(SizeOf(p_.dtype));
      }
      const KeyRuns runs = present ? runs_[lane] : KeyRuns();
      using TI = typename Lanes<T, W>::TI;
      lanes_.first_begin[lane] = static_cast<TI>(runs.first.begin);
      lanes_.first_end[lane] = static_cast<TI>(runs.first.end);
      lanes_.second_begin[lane] = static_cast<TI>(runs.second.begin);
      lanes_.second_end[lane] = static_cast<TI>(runs.second.end);
      const int64_t position = s.start + row.query;
      lanes_.position[lane] = position;
      if (dropout) {
        lanes_.position_low[lane] = static_cast<uint32_t>(position);
        lanes_.head_row[lane] =
            static_cast<uint32_t>(s.batch * p_.query_heads + head);
      }
      if (!p_.slopes.empty()) {
        lanes_.slope[lane] = static_cast<T>(
            p_.slopes[static_cast<size_t>(s.batch * p_.slopes_stride + head)]);
      }
      if (!p_.segments_q.empty()) {
        const int32_t id = p_.segments_q[static_cast<size_t>(
            s.batch * p_.segments_q_stride + s.first_q + row.query)];
        lanes_.segment[lane] = static_cast<TI>(id < 0 ? -1 : id);
      }
      if (p_.forgets && present) decays_.SetLane(p_, s, lane, head, position);
      lanes_.bias[lane] = PairRow(p_.bias, SizeOf(p_.bias.dtype), s, head, row.query);
      lanes_.mask[lane] = PairRow(p_.mask, 1, s, head, row.query);
    }
    if (p_.forgets) decays_.EndLanes();
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

  // The queries, which these rows are, into lanes.
  HWY_NOINLINE void PackQueries(DType dtype, const void* const* rows) {
    const double factor = p_.softcap > 0 && SoftcapRidesOnQueries(p_.softcap)
                              ? p_.scale * SoftcapFactor(p_.softcap)
                              : p_.scale;
    factor_ = O::Split(factor);
    const auto depth = static_cast<size_t>(p_.depth);
    if constexpr (O::kMatrixTiles) {
      queries_finite_ = O::PackQueries(dtype, rows, num_rows_, depth, factor_.of_queries, W,
                                       w_.queries);
    } else {
      O::PackQueries(dtype, rows, num_rows_, depth, factor_.of_queries, W, w_.queries);
    }
    raw_ = O::kMatrixTiles && factor_.of_logits > 0 && p_.softcap == 0 && p_.slopes.empty() &&
           p_.bias.data == nullptr;
    // What is forgotten joins them in their unit, unless it would not fit.
    if (p_.forgets) raw_ = raw_ && factor_.of_logits > 0x1p-32 && factor_.of_logits < 0x1p32;
  }

  // f(tile) for each tile of which some pair is kept, ascending.
  template <class F>
  HWY_INLINE void ForTiles(const F& f) {
    const bool by_data = p_.mask.data != nullptr || !p_.segments_q.empty();
    TileVisits visits(s_, {runs_, num_rows_}, O::kGrid);
    if (p_.has_pattern) BeginKept(s_.key_begin);
    while (true) {
      if (p_.has_pattern) visits.SkipTo(kept_.lists.Next(visits.at()));
      Tile tile;
      if (!visits.Next(&tile)) break;
      Cover cover = Cover::kAll, kept = Cover::kAll;
      if (by_data) cover = CoverOf(p_, s_, grid_, block_, key_head_, tile.keys);
      if (p_.has_pattern) kept = kept_.Find(tile.keys);
      if (cover == Cover::kNone || kept == Cover::kNone) continue;
      masked_ = cover == Cover::kSome;
      partly_kept_ = kept == Cover::kSome;
      partial_ = masked_ || partly_kept_;
      keys_until_ = tile.until;
      if constexpr (O::kQuantized) between_ = O::Between(p_, head_, tile);
      if (head_.keys_at == Place::kTile) {
        CopyKeys<O>(head_.key_source, tile.keys, p_.depth, w_);
        head_.keys.first = tile.keys.begin;
      }
      f(tile);
    }
  }

  // Whether a pattern keeps any of these keys, as far as can be told by tiles; before anything else is known of the
  // block, as most answers are no.
  HWY_INLINE bool MayKeep(const Interval& keys) const {
    if (s_.kept == nullptr) return true;
    for (int64_t lane = 0; lane < static_cast<int64_t>(num_rows_);) {
      const BlockGrid::Row row = grid_.At(block_, lane);
      if (s_.kept->KeepsAny(s_.kept_batch, key_head_ * grid_.heads + row.head, row.query, keys.begin, keys.end)) {
        return true;
      }
      lane += std::min(Visits::kRows - row.query % Visits::kRows, grid_.num_queries - row.query);
    }
    return false;
  }

  // How many of the groups of keys before this key MayKeep() holds for and `visits` contains.
  HWY_INLINE int64_t KeptGroupsBefore(int64_t end, const GroupVisits& visits, int64_t group_keys) {
    int64_t count = 0;
    BeginKept(s_.key_begin);
    for (int64_t key = kept_.lists.Next(s_.key_begin); key < end;) {
      const int64_t group = (key - s_.key_begin) / group_keys;
      count += visits.Contains(group) ? 1 : 0;
      key = kept_.lists.Next(s_.key_begin + (group + 1) * group_keys);
    }
    return count;
  }

  // Looks for tiles from that of this key on.
  HWY_INLINE void BeginKept(int64_t key) {
    kept_.lists.Begin(num_rows_, key, [&](size_t lane) {
      const BlockGrid::Row& row = rows_[lane];
      return typename KeptKeys<W>::Row{of_[lane]->kept, of_[lane]->kept_batch,
                                       key_head_ * grid_.heads + row.head, row.query};
    });
  }

  // The parts of a tile that the same vectors of lanes see, ascending. A vector
  // outside them sees nothing there: neither product needs it.
  HWY_INLINE int SplitTile(const Tile& tile, Run* runs) const {
    if (tile.full && !partly_kept_) {
      runs[0] = {tile.keys.begin, tile.keys.end, 0, C};
      return 1;
    }
    // Borders stay between steps of keys, as the tile's own do.
    const auto up = [&](int64_t key) {
      return std::min(tile.keys.end, key + ((tile.grid - key) & (O::kKeyStep - 1)));
    };
    const auto down = [&](int64_t key) {
      return key - (key - tile.grid) % O::kKeyStep;
    };
    Interval seen[C];
    for (size_t c = 0; c < C; ++c) {
      Interval hull = hull_[c];
      if (partly_kept_) {
        const Interval kept = kept_.Hull(tile.keys, c);
        hull = {std::max(hull.begin, kept.begin), std::min(hull.end, kept.end)};
        if (hull.empty()) hull = {};
      }
      seen[c] = {down(std::max(hull.begin, tile.keys.begin)), up(std::max(hull.end, tile.keys.begin))};
    }
    int count = 0;
    for (int64_t at = tile.keys.begin; at < tile.keys.end;) {
      int64_t end = tile.keys.end;
      size_t c0 = C, c1 = 0;
      for (size_t c = 0; c < C; ++c) {
        if (seen[c].begin <= at && at < seen[c].end) {
          c0 = std::min(c0, c);
          c1 = c + 1;
        }
        if (seen[c].begin > at) end = std::min(end, seen[c].begin);
        if (seen[c].end > at) end = std::min(end, seen[c].end);
      }
      c0 = c0 / O::kLaneVectors * O::kLaneVectors;
      c1 = (c1 + O::kLaneVectors - 1) / O::kLaneVectors * O::kLaneVectors;
      if (c0 < c1) runs[count++] = {at, end, c0, c1};
      at = end;
    }
    return count;
  }

  // Whether these parts leave nothing of a tile out.
  HWY_INLINE static bool IsWhole(const Tile& tile, const Run* runs, int num_runs) {
    return num_runs == 1 && runs[0].c0 == 0 && runs[0].c1 == C && runs[0].begin == tile.keys.begin &&
           runs[0].end == tile.keys.end;
  }

  // f(std::integral_constant<int, number of vectors>) for a run.
  template <class F>
  HWY_INLINE static void WithVectors(size_t count, const F& f) {
    if constexpr (O::kLaneVectors == C) {
      f(std::integral_constant<int, C>());
    } else {
      if constexpr (C >= 4) {
        if (count == 4) return f(std::integral_constant<int, 4>());
        if (count == 3) return f(std::integral_constant<int, 3>());
      }
      if (count == 2) return f(std::integral_constant<int, 2>());
      f(std::integral_constant<int, 1>());
    }
  }

  // Logits that are stored as they are. A type of its own and not a lambda: products that are finished in the same way
  // are compiled once.
  struct Identity {
    HWY_INLINE V operator()(V x, int64_t /*key*/, int /*c*/) const { return x; }
  };

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
      bool multiplied = raw_;
      if constexpr (O::kMatrixTiles) {
        if (raw_) {
          TileProducts(w_.queries, head_.keys, run, p_.depth, At(run, origin),
                       queries_finite_ && w_.keys_finite);
        }
      }
      // x = f(x, key, vector): while the logits are in registers, if they have not left them.
      const auto finish = [&](const auto& f) HWY_ATTR {
        if (multiplied) return Rewrite<W, kVectors>(d_, run, origin, tile, m, f);
        LogitProducts<kVectors>(run, origin, m, f);
        multiplied = true;
      };
      const auto multiply = [&]() HWY_ATTR {
        if (!multiplied) finish(Identity());
      };
      if (p_.softcap > 0) {
        multiply();
        ApplySoftcap<W, kVectors>(d_, run, origin, p_.softcap, tile, w_.slopes, m);
      }
      if (!p_.slopes.empty()) {
        finish(Alibi<kVectors, D>(d_, run, visited.grid, lanes_));
      }
      if (p_.forgets && decays_.BeforeRows()) {
        finish([&](V x, int64_t key, int c) HWY_ATTR {
          const size_t vector = run.c0 + static_cast<size_t>(c);
          return decays_.template Added<kFlagMasked>(x, decays_.OfKey(p_, key, vector), vector);
        });
      } else if (p_.forgets) {
        multiply();
        decays_.template AddNear<kVectors, kFlagMasked>(p_, run, origin, tile, m);
      }
      multiply();
      if (p_.bias.data != nullptr) {
        ApplyBias<W, kVectors, kFlagMasked>(d_, run, origin, p_.bias, lanes_, tile, m);
      }
      if (partly_kept_ && !kept_.KeepsAll(run, origin)) {
        ApplyPattern<W, kVectors>(d_, run, origin, kept_.bits[0], tile, m);
      }
      if (masked_ && p_.mask.data != nullptr) {
        ApplyMask<W, kVectors>(d_, run, origin, p_.mask, lanes_, tile, m);
      }
      if (masked_ && !p_.segments_q.empty()) {
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

  // To be called before a tile's logits are computed.
  HWY_INLINE void BeginLogits(const Tile& tile) {
    if (p_.forgets) decays_.BeginTile(p_, s_, tile, raw_ ? 1 / factor_.of_logits : 1);
  }

  // Logits lack what their rows have forgotten as a whole since the tile: their maximum with it,
  // and what is to be subtracted from logits without it.
  HWY_INLINE V WithRow(V max, size_t c) const {
    if (!p_.forgets) return max;
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    return hn::IfThenElse(hn::Eq(max, none), none, hn::Add(max, decays_.OfRow(c)));
  }
  HWY_INLINE V WithoutRow(V shift, size_t c) const {
    return p_.forgets ? hn::Sub(shift, decays_.OfRow(c)) : shift;
  }

  // What is subtracted from logits: the maximum, or 0 where there is none yet.
  HWY_INLINE V Shift(V max) const {
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    return hn::IfThenElse(hn::Eq(max, none), hn::Zero(d_), max);
  }

  T* At(const Run& run, int64_t origin) const {
    return w_.logits + static_cast<size_t>(run.begin - origin) * W + run.c0 * N;
  }

 private:
  static const void* PairRow(const Pairs& pairs, size_t element, const Sequence& s,
                             int64_t head, int64_t query) {
    if (pairs.data == nullptr) return nullptr;
    return static_cast<const char*>(pairs.data) +
           (s.batch * pairs.batch_stride + head * pairs.head_stride +
            (s.first_q + query) * pairs.query_stride) *
               static_cast<int64_t>(element);
  }

  // Asks for the biases of lanes [begin, end) and the next tile's keys. Rows of a
  // bias lie far apart, where no hardware prefetcher follows, and there are more of
  // them than a core can wait for at once: hence a few at a time, between products.
  HWY_INLINE void PrefetchBias(size_t begin, size_t end, int64_t key) const {
    if (p_.bias.data == nullptr || p_.bias.key_stride != 1) return;
    const int64_t element = static_cast<int64_t>(SizeOf(p_.bias.dtype));
    for (size_t lane = begin; lane < std::min(end, num_rows_); ++lane) {
      const char* row = static_cast<const char*>(lanes_.bias[lane]) + key * element;
      for (int64_t at = 0; at < O::kGrid.tile * element; at += 64) {
        hs::PrefetchToL2(row + at);
      }
    }
  }

  // K Q^T of a run, each logit finished by f(logit, key, vector).
  template <int kVectors, class F>
  HWY_INLINE void LogitProducts(const Run& run, int64_t origin, V* max, const F& f) {
    const auto products = [&](const auto& finish) HWY_ATTR {
      const auto before = [&](size_t j, size_t count) HWY_ATTR {
        PrefetchBias(j, j + count, run.end);
      };
      Products<kVectors>(run, w_.queries, head_.keys, p_.depth, At(run, origin), max,
                         before, finish);
    };
    if constexpr (O::kFinishesLogits) {
      if (factor_.of_logits != 1) {
        const V factor = hn::Set(d_, static_cast<T>(factor_.of_logits));
        return products([&](V x, int64_t key, int c) HWY_ATTR {
          return f(hn::Mul(x, factor), key, c);
        });
      }
    }
    products(f);
  }

 protected:
  // out[key][lane] = f(sum_e rows[key][e] lanes[e][lane], key, vector) for a run, and
  // before(j, count) before the rows [j, j + count) of it.
  template <int kVectors, class Before, class F>
  HWY_INLINE void Products(const Run& run, const typename O::Query* lanes,
                           const Operand<typename O::Key>& rows, int64_t depth, T* out,
                           V* max, const Before& before, const F& f) {
    if constexpr (O::kMatrixTiles) {
      before(0, static_cast<size_t>(run.end - run.begin));
      TileProducts(lanes, rows, run, depth, out, queries_finite_ && w_.keys_finite);
      Rewrite<W, kVectors>(d_, run, run.begin, out, max, f);
    } else if constexpr (O::kKeysInLanes) {
      O::KeyProducts(lanes, num_rows_, head_, run.begin, run.end, keys_until_,
                     static_cast<size_t>(depth), out);
      Rewrite<W, kVectors>(d_, run, run.begin, out, max, f);
    } else {
      hs::ForTiles<hs::TileRows<kVectors>()>(
          0, static_cast<size_t>(run.end - run.begin),
          [&](auto count, size_t j) HWY_ATTR {
            const int64_t key = run.begin + static_cast<int64_t>(j);
            before(j, size_t{count.value});
            O::template Logits<count.value, kVectors>(
                lanes + run.c0 * N, W, rows, key, static_cast<size_t>(depth),
                out + j * W, max,
                [&](V x, int r, int c) HWY_ATTR { return f(x, key + r, c); });
          });
    }
  }

  HWY_INLINE void TileProducts(const typename O::Query* lanes,
                               const Operand<typename O::Key>& rows, const Run& run,
                               int64_t depth, T* out, bool finite) {
    O::LogitTiles(lanes, W, rows, run.begin, run.end, depth, out);
    if (!O::kInfinite && !finite) {
      O::RepeatNaN(lanes, W, rows, run.begin, run.end, depth, W, out);
    }
  }

  static constexpr D d_{};
  const Problem& p_;
  const Sequence& s_;
  const BlockGrid& grid_;
  const int64_t key_head_, block_;
  Head<O> head_;
  Workspace<O>& w_;
  const size_t num_rows_;
  Lanes<T, W> lanes_;
  Decays<O, C> decays_;
  BlockGrid::Row rows_[W];
  const Sequence* of_[W];  // that each row is of
  KeyRuns runs_[W];
  int64_t keys_until_ = 0;  // keys from the current tile on that some row may see
  LinesBetween between_;    // of O::kQuantized
  // Where tiles are multiplied and nothing comes between that and the masks, logits stay as
  // they are: factor_.of_logits meets them in the exponent.
  bool raw_ = false;
  bool queries_finite_ = true;
  bool partial_ = false;  // the mask, segments or a pattern cut into the current tile
  LogitFactor factor_;

 private:
  const Sequence* members_ = nullptr;  // of which the rows are, if not of s_
  int64_t queries_each_ = 0;
  Interval hull_[C];
  bool masked_ = false, partly_kept_ = false;  // what it is that cuts
  KeptTile<T, C, N, O::kGrid.tile> kept_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_INL_H_

// The functions that all passes over a block of rows share: the terms of a tile's logits, and the outputs.
//
// Compiled once per SIMD target, operand type and number of vectors, in the block and decode units. All other files
// call what is defined here and do not include it, because it would be half of their compile time.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_PARTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_PARTS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_PARTS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_PARTS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "heed/engines/softmax/block/block-inl.h"
#include "heed/engines/softmax/block/decay_logits-inl.h"
#include "heed/engines/softmax/forward/forward-inl.h"
#include "heed/engines/softmax/block/head-inl.h"
#include "heed/engines/softmax/block/logits-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/forward/segment_pass-inl.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/simd/convert-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

template <class O>
Head<O> HeadOf(const Problem& p, const Plan& plan, int64_t sequence, int64_t key_head, Workspace<O>& w) {
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
  const int64_t bytes_of_key = p.depth * static_cast<int64_t>(sizeof(typename O::Key)) +
                               p.value_depth * static_cast<int64_t>(sizeof(typename O::Value));
  head.is_long = plan.keys_at != Place::kTile && plan.values_at != Place::kTile &&
                 (s.key_end - s.key_begin) * bytes_of_key > int64_t{hs::kShapes.prefetch_mib} << 20;
  if constexpr (O::kKeysInLanes) return head;  // the products read the sources
  if (plan.keys_at == Place::kCaller) {
    head.keys = {head.key_source.template At<typename O::Key>(0), head.key_source.stride, 0};
  }
  if (plan.values_at == Place::kCaller) {
    head.values = {head.value_source.template At<typename O::Value>(0), head.value_source.stride, 0};
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
void BlockRows<O, C>::SetLanes(const void** q) {
  // Hoisted out of the loop over lanes.
  const bool dropout = p_.dropout > 0, slopes = !p_.slopes.empty(), segments = !p_.segments_q.empty();
  const bool relative = p_.relative_bias.present();
  const bool biased = p_.bias.data != nullptr, masked = p_.mask.data != nullptr, forgets = p_.forgets;
  const auto* const queries = static_cast<const char*>(p_.q.data);
  const Rows rows = p_.q;
  const auto element = static_cast<int64_t>(SizeOf(p_.dtype));
  for (size_t lane = 0; lane < W; ++lane) {
    const bool present = lane < num_rows_;
    const BlockGrid::Row row = present ? rows_[lane] : BlockGrid::Row{0, 0};
    const Sequence& s = present ? *of_[lane] : s_;
    const int64_t head = key_head_ * grid_.heads + row.head;
    if (present) {
      q[lane] = queries +
                (s.batch * rows.batch_stride + (s.first_q + row.query) * rows.token_stride + head * rows.head_stride) *
                    element;
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
      lanes_.head_row[lane] = static_cast<uint32_t>(s.batch * p_.query_heads + head);
    }
    if (slopes) {
      lanes_.slope[lane] = static_cast<T>(p_.slopes[static_cast<size_t>(s.batch * p_.slopes_stride + head)]);
    }
    if (relative) {
      lanes_.relative_head[lane] = static_cast<TI>(head * p_.relative_bias.head_stride());
      const bool follows =
          lane % N == 0 || !present ||
          (lanes_.relative_head[lane] == lanes_.relative_head[lane - 1] && position == lanes_.position[lane - 1] + 1);
      if (lane == 0) lanes_.in_order = ~uint64_t{0};
      if (!follows) lanes_.in_order &= ~(uint64_t{1} << (lane / N));
    }
    if (segments) {
      const int32_t id = p_.segments_q[static_cast<size_t>(s.batch * p_.segments_q_stride + s.first_q + row.query)];
      lanes_.segment[lane] = static_cast<TI>(id < 0 ? -1 : id);
    }
    if (forgets && present) decays_.SetLane(p_, s, lane, head, position);
    lanes_.bias[lane] = biased ? PairRow(p_.bias, SizeOf(p_.bias.dtype), s, head, row.query) : nullptr;
    lanes_.mask[lane] = masked ? PairRow(p_.mask, 1, s, head, row.query) : nullptr;
  }
  if (forgets) decays_.EndLanes();
  // The hull of the keys that each vector of lanes sees: runs of a tile leave out vectors that see none of its keys.
  for (size_t c = 0; c < C; ++c) {
    Interval& hull = hull_[c] = {};
    for (size_t lane = c * N; lane < std::min(num_rows_, (c + 1) * N); ++lane) {
      for (const Interval& run : {runs_[lane].first, runs_[lane].second}) {
        if (run.empty()) continue;
        hull = hull.empty() ? run : Interval{std::min(hull.begin, run.begin), std::max(hull.end, run.end)};
      }
    }
  }
}

template <class O, int C>
void BlockRows<O, C>::PackQueries(DType dtype, const void* const* rows) {
  const double factor =
      p_.softcap > 0 && SoftcapRidesOnQueries(p_.softcap) ? p_.scale * SoftcapFactor(p_.softcap) : p_.scale;
  factor_ = O::Split(factor);
  const auto depth = static_cast<size_t>(p_.depth);
  if constexpr (O::kUsesAmx) {
    queries_finite_ = O::PackQueries(dtype, rows, num_rows_, depth, factor_.of_queries, W, w_.queries);
  } else {
    O::PackQueries(dtype, rows, num_rows_, depth, factor_.of_queries, W, w_.queries);
  }
  raw_ = O::kUsesAmx && factor_.of_logits > 0 && p_.softcap == 0 && p_.slopes.empty() && p_.biases() == 0;
  // Log decays can be added in units of the raw logits unless the factor is so extreme that they would over- or
  // underflow.
  if (p_.forgets) raw_ = raw_ && factor_.of_logits > 0x1p-32 && factor_.of_logits < 0x1p32;
}

template <class O, int C>
bool BlockRows<O, C>::BeginTile(const Tile& tile, Cover kept) {
  const bool by_data = p_.mask.data != nullptr || !p_.segments_q.empty();
  const Cover cover = by_data ? CoverOf(p_, s_, grid_, block_, key_head_, tile.keys) : Cover::kAll;
  if (cover == Cover::kNone || kept == Cover::kNone) return false;
  masked_ = cover == Cover::kSome;
  partly_kept_ = kept == Cover::kSome;
  partial_ = masked_ || partly_kept_;
  keys_until_ = tile.until;
  if constexpr (O::kQuantized) between_ = O::Between(p_, head_, tile);
  if (head_.keys_at == Place::kTile) {
    CopyKeys<O>(head_.key_source, tile.keys, p_.depth, w_);
    head_.keys.first = tile.keys.begin;
  }
  return true;
}

// A type instead of a lambda, so that all products with the same finish are one instantiation.
struct Identity {
  template <class V>
  HWY_INLINE V operator()(V x, int64_t /*key*/, int /*c*/) const {
    return x;
  }
};

// Prefetches the biases of lanes [begin, end) for the next tile's keys. Rows of a bias are too far apart for a hardware
// prefetcher, and there are more lines than a core has miss buffers, so a few are prefetched at a time, between
// products.
template <class O, int C>
HWY_INLINE void Block<O, C>::PrefetchBias(size_t begin, size_t end, int64_t key) const {
  if (p_.bias.data == nullptr || p_.bias.key_stride != 1) return;
  const int64_t element = static_cast<int64_t>(SizeOf(p_.bias.dtype));
  for (size_t lane = begin; lane < std::min(end, num_rows_); ++lane) {
    const char* row = static_cast<const char*>(lanes_.bias[lane]) + key * element;
    for (int64_t at = 0; at < O::kGrid.tile * element; at += 64) {
      hs::PrefetchToL2(row + at);
    }
  }
}

// Computes K Q^T of a run; each logit is finished by f(logit, key, vector).
template <class O, int C>
template <int kVectors, class F>
HWY_INLINE void Block<O, C>::LogitProducts(const Run& run, int64_t origin, V* max, const F& f) {
  T* out = At(run, origin);
  const auto products = [&](const auto& finish) HWY_ATTR {
    if constexpr (O::kUsesAmx) {
      PrefetchBias(0, static_cast<size_t>(run.end - run.begin), run.end);
      AmxProducts(w_.queries, head_.keys, run, p_.depth, out, queries_finite_ && w_.keys_finite);
      Rewrite<W, kVectors>(d_, run, run.begin, out, max, finish);
    } else if constexpr (O::kKeysInLanes) {
      O::KeyProducts(w_.queries, num_rows_, head_, run.begin, run.end, keys_until_, static_cast<size_t>(p_.depth), out);
      Rewrite<W, kVectors>(d_, run, run.begin, out, max, finish);
    } else {
      const auto before = [&](size_t j, size_t count) HWY_ATTR {
        const size_t lane = run.c0 * N + j;
        PrefetchBias(lane, std::min(lane + count, run.c1 * N), run.end);
        w_.ahead.Some();
        if (!head_.PrefetchesTiles() || run.c0 != 0) return;
        const int64_t next = run.begin + static_cast<int64_t>(j) + O::kGrid.tile;
        PrefetchRows(head_.keys, next, std::min(next + static_cast<int64_t>(count), keys_until_), p_.depth);
      };
      this->template Products<kVectors>(run, w_.queries, head_.keys, p_.depth, out, max, before, finish);
    }
  };
  if constexpr (O::kFinishesLogits) {
    if (factor_.of_logits != 1) {
      const V factor = hn::Set(d_, static_cast<T>(factor_.of_logits));
      return products([&](V x, int64_t key, int c) HWY_ATTR { return f(hn::Mul(x, factor), key, c); });
    }
  }
  products(f);
}

// Applies the terms that come after the products, to logits in memory.
template <class O, int C>
template <int kVectors>
HWY_INLINE void Block<O, C>::AddBiasAndMasks(const Run& run, const Tile& visited, bool flag_masked, V* m) {
  const int64_t origin = visited.keys.begin;
  T* tile = w_.logits;
  if (p_.bias.data != nullptr && flag_masked) {
    ApplyBias<W, kVectors, true>(d_, run, origin, p_.bias, lanes_, tile, m);
  } else if (p_.bias.data != nullptr) {
    ApplyBias<W, kVectors, false>(d_, run, origin, p_.bias, lanes_, tile, m);
  }
  if (partly_kept_ && !kept_.KeepsAll(run, origin)) {
    ApplyPattern<W, kVectors>(d_, run, origin, kept_.bits[0], tile, m);
  }
  if (masked_ && p_.mask.data != nullptr) {
    ApplyMask<W, kVectors>(d_, run, origin, p_.mask, lanes_, tile, m);
  }
  if (masked_ && !p_.segments_q.empty()) {
    ApplySegments<W, kVectors>(d_, run, origin, p_.segments_k.data() + s_.batch * p_.segments_k_stride, lanes_, tile,
                               m);
  }
  if (!visited.full && p_.windowed()) {
    ApplyRuns<W, kVectors, 2>(d_, run, origin, lanes_, tile, m);
  } else if (!visited.full) {
    ApplyRuns<W, kVectors, 1>(d_, run, origin, lanes_, tile, m);
  }
}

// Computes Logits() for kVectors vectors. Each step overwrites m with the maximum of what it wrote, so the last step
// leaves the final maximum.
template <class O, int C>
template <int kVectors>
HWY_INLINE void Block<O, C>::VectorLogits(const Run& run, const Tile& visited, bool flag_masked, V* m) {
  const int64_t origin = visited.keys.begin;
  T* tile = w_.logits;
  bool multiplied = raw_;
  if constexpr (O::kUsesAmx) {
    if (raw_) {
      AmxProducts(w_.queries, head_.keys, run, p_.depth, At(run, origin), queries_finite_ && w_.keys_finite);
    }
  }
  // Applies x = f(x, key, vector): in registers if the logits have not been stored yet, else in memory.
  const auto finish = [&](const auto& f) HWY_ATTR {
    if (multiplied) return Rewrite<W, kVectors>(d_, run, origin, tile, m, f);
    LogitProducts<kVectors>(run, origin, m, f);
    multiplied = true;
  };
  const auto multiply = [&]() HWY_ATTR {
    if (!multiplied) LogitProducts<kVectors>(run, origin, m, Identity());
    multiplied = true;
  };
  if (p_.softcap > 0) {
    multiply();
    ApplySoftcap<W, kVectors>(d_, run, origin, p_.softcap, tile, w_.slopes, m);
  }
  if (!p_.slopes.empty()) {
    finish(Alibi<kVectors, D>(d_, run, visited.grid, lanes_));
  }
  if (p_.relative_bias.present() && InRelativeSpan<kVectors, N>(run, p_.relative_bias.span, lanes_, num_rows_)) {
    if (flag_masked) {
      finish(Relative<kVectors, true, D>(d_, run, visited.grid, p_.relative_bias, lanes_));
    } else {
      finish(Relative<kVectors, false, D>(d_, run, visited.grid, p_.relative_bias, lanes_));
    }
  }
  if (p_.forgets) {
    const auto add = [&](auto flags) HWY_ATTR {
      if (decays_.BeforeRows() && decays_.OfOneHead()) {
        finish([&](V x, int64_t key, int c) HWY_ATTR {
          return decays_.template Added<flags.value>(x, decays_.OfKey(key), run.c0 + static_cast<size_t>(c));
        });
      } else {
        multiply();
        decays_.template AddByRow<kVectors, flags.value>(p_, run, origin, tile, m);
      }
    };
    if (flag_masked) {
      add(std::true_type());
    } else {
      add(std::false_type());
    }
  }
  multiply();
  AddBiasAndMasks<kVectors>(run, visited, flag_masked, m);
}

template <class O, int C>
void Block<O, C>::Logits(const Run& run, const Tile& visited, bool flag_masked, V* max) {
  ForParts(run, [&](auto vectors, const Run& part) HWY_ATTR {
    V m[vectors.value];
    for (int c = 0; c < vectors.value; ++c) m[c] = hn::Set(d_, -std::numeric_limits<T>::infinity());
    VectorLogits<vectors.value>(part, visited, flag_masked, m);
    for (int c = 0; c < vectors.value; ++c) {
      V& of_tile = max[part.c0 + static_cast<size_t>(c)];
      of_tile = hn::Max(m[c], of_tile);
    }
  });
}

template <class O, int C, class Outputs>
template <bool kFlagMasked>
void SegmentPass<O, C, Outputs>::RescaledTile(const Tile& tile, bool first, V* m, V* l) {
  Run runs[2 * C + 1];
  const int num_runs = this->SplitTile(tile, runs);
  V max[C];
  TileLogits<kFlagMasked>(tile, runs, num_runs, max);
  AddTile<kFlagMasked>(tile, runs, num_runs, max, first, m, l);
}

template <class O, int C, class Outputs>
void SegmentPass<O, C, Outputs>::StreamedTiles(const Tile& tiles, bool first, V* m, V* l) {
  constexpr int64_t kTile = O::kGrid.tile;
  V max[O::kGrid.segment / kTile][C];
  T* const logits = w_.logits;
  const auto for_tiles = [&](const auto& f) HWY_ATTR {
    Tile tile = tiles;
    for (int64_t i = 0; tile.keys.begin < tiles.keys.end; ++i, tile.grid += kTile) {
      tile.keys.end = std::min(tile.grid + kTile, tiles.keys.end);
      w_.logits = logits + static_cast<size_t>(i * kTile) * W;
      f(tile, Run{tile.keys.begin, tile.keys.end, 0, C}, max[i], i == 0);
      tile.keys.begin = tile.keys.end;
    }
    w_.logits = logits;
  };
  // The prefetch of keys needs the end of the keys that follow these tiles, but keys_until_ is that of the current tile
  // of ForTiles(), which comes after them.
  const int64_t until = std::exchange(this->keys_until_, tiles.until);
  for_tiles([&](const Tile& tile, const Run& run, V* of_tile, bool)
                HWY_ATTR { TileLogits<false>(tile, &run, 1, of_tile); });
  for_tiles([&](const Tile& tile, const Run& run, V* of_tile, bool is_first)
                HWY_ATTR { AddTile<false>(tile, &run, 1, of_tile, first && is_first, m, l); });
  this->keys_until_ = until;
}

template <class O, int C, class Outputs>
template <bool kFlagMasked>
void SegmentPass<O, C, Outputs>::TileLogits(const Tile& tile, const Run* runs, int num_runs, V* max) {
  for (int c = 0; c < C; ++c) {
    max[c] = hn::Set(d_, -std::numeric_limits<T>::infinity());
  }
  this->BeginLogits(tile);
  for (int r = 0; r < num_runs; ++r) {
    this->Logits(runs[r], tile, kFlagMasked, max);
  }
}

template <class O, int C, class Outputs>
template <bool kFlagMasked>
void SegmentPass<O, C, Outputs>::AddTile(const Tile& tile, const Run* runs, int num_runs, const V* of_tile, bool first,
                                         V* m, V* l) {
  const int64_t origin = tile.keys.begin;
  V shift[C], rescale[C];
  for (int c = 0; c < C; ++c) {
    const auto vector = static_cast<size_t>(c);
    const V max = hn::Max(this->WithRow(of_tile[c], vector), m[c]);
    shift[c] = this->Shift(max);
    rescale[c] = Weight(d_, hn::Sub(m[c], shift[c]));
    shift[c] = this->WithoutRow(shift[c], vector);
    m[c] = max;
    l[c] = hn::Mul(l[c], rescale[c]);
  }
  for (int r = 0; r < num_runs; ++r) {
    Weights<kFlagMasked>(runs[r], origin, shift, l);
  }

  // A tile that is split into runs has its outputs rescaled once, beforehand.
  const bool whole = num_runs == 1 && runs[0].c0 == 0 && runs[0].c1 == this->vectors_;
  if (!whole) {
    const V one = hn::Set(d_, T{1});
    auto same = hn::Eq(rescale[0], one);
    for (int c = 1; c < C; ++c) same = hn::And(same, hn::Eq(rescale[c], one));
    if (first || !hn::AllTrue(d_, same)) layout_.Scale(first, rescale, outputs_);
    for (int c = 0; c < C; ++c) rescale[c] = one;
  }
  if (head_.values_at == Place::kTile) {
    O::CopyValues(head_.value_source, tile.keys.begin, tile.keys.end, p_.value_depth, w_.values);
    head_.values.first = tile.keys.begin;
  }
  for (int r = 0; r < num_runs; ++r) {
    Values<kFlagMasked>(runs[r], origin, whole && first, rescale);
  }
}

template <class O, int C, class Outputs>
void ForwardBlock<O, C, Outputs>::Finish() {
  void* o[W];
  HWY_ALIGN T factor[W];
  HWY_ALIGN T lse[W];
  const DType dtype = p_.wide_outputs ? DTypeOf<T>::value : p_.dtype;
  const V undropped = hn::Set(d_, static_cast<T>(1 / (1 - p_.dropout)));
  for (size_t lane = 0; lane < W; lane += N) {
    const V sum = hn::Load(d_, sum_ + lane);
    const auto empty = hn::Eq(sum, hn::Zero(d_));
    hn::Store(hn::IfThenZeroElse(empty, hn::Div(undropped, sum)), d_, factor + lane);
    hn::Store(LseOf(lane), d_, lse + lane);
  }
  for (size_t lane = 0; lane < num_rows_; ++lane) {
    const BlockGrid::Row row = grid_.At(block_, static_cast<int64_t>(lane));
    const int64_t head = key_head_ * grid_.heads + row.head;
    const int64_t token = s_.first_q + row.query;
    o[lane] = const_cast<char*>(static_cast<const char*>(p_.o.data)) +
              (s_.batch * p_.o.batch_stride + token * p_.o.token_stride + head * p_.o.head_stride) *
                  static_cast<int64_t>(SizeOf(dtype));
    if (p_.lse.data != nullptr) {
      const_cast<T*>(static_cast<const T*>(
          p_.lse.data))[s_.batch * p_.lse.batch_stride + token * p_.lse.token_stride + head * p_.lse.head_stride] =
          lse[lane];
    }
    if (!p_.sinks.empty() && factor[lane] != 0) {
      const double sink = p_.sinks[static_cast<size_t>(head)];
      factor[lane] =
          static_cast<T>(static_cast<double>(factor[lane]) / (1 + std::exp(sink - static_cast<double>(lse[lane]))));
    }
  }
  hs::WithStorage<T>(dtype, [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    layout_.Write(totals_, factor, reinterpret_cast<S* const*>(o), num_rows_);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

// Explicit instantiations of what is defined above. HEED_COMPILE_HEAD is for all blocks of an operand type,
// HEED_COMPILE_LOGITS for the logits of blocks of C vectors, HEED_COMPILE_OUTPUTS for their outputs in the layout that
// is the last argument, and HEED_COMPILE_PASS for all of these and the pass over a tile with products in vectors.
#ifndef HEED_COMPILE_LOGITS
#define HEED_COMPILE_HEAD(O) template Head<O> HeadOf(const Problem&, const Plan&, int64_t, int64_t, Workspace<O>&);
#define HEED_COMPILE_LOGITS(O, C)                                                              \
  template void BlockRows<O, C>::SetLanes(const void**);                                       \
  template void BlockRows<O, C>::PackQueries(DType, const void* const*);                       \
  template bool BlockRows<O, C>::BeginTile(const Tile&, Cover);                                \
  template void Decays<O, C>::BeginTile(const Problem&, const Sequence&, const Tile&, double); \
  template void Block<O, C>::Logits(const Run&, const Tile&, bool, hn::Vec<O::D>*);
#define HEED_COMPILE_OUTPUTS(O, C, ...) template void ForwardBlock<O, C, __VA_ARGS__>::Finish();
#define HEED_COMPILE_PASS(O, C, ...)                                                                                   \
  HEED_COMPILE_LOGITS(O, C)                                                                                            \
  template void SegmentPass<O, C, __VA_ARGS__>::RescaledTile<false>(const Tile&, bool, hn::Vec<O::D>*,                 \
                                                                    hn::Vec<O::D>*);                                   \
  template void SegmentPass<O, C, __VA_ARGS__>::RescaledTile<true>(const Tile&, bool, hn::Vec<O::D>*, hn::Vec<O::D>*); \
  HEED_COMPILE_OUTPUTS(O, C, __VA_ARGS__)
#endif  // HEED_COMPILE_LOGITS

// HEED_COMPILE_BLOCKS is for the blocks of all numbers of vectors from 2 on: with 16 registers, only whole blocks.
// HEED_COMPILE_ONE_VECTOR is for blocks of one vector, which are used where a vector has more lanes than decoding takes
// rows.
#undef HEED_COMPILE_BLOCKS
#undef HEED_COMPILE_ONE_VECTOR
#if HEED_VECTOR_REGISTERS == 32
#define HEED_COMPILE_BLOCKS(O)               \
  HEED_COMPILE_HEAD(O)                       \
  HEED_COMPILE_PASS(O, 2, LaneOutputs<O, 2>) \
  HEED_COMPILE_PASS(O, hs::kShapes.block_vectors, LaneOutputs<O, hs::kShapes.block_vectors>)
#else
#define HEED_COMPILE_BLOCKS(O) \
  HEED_COMPILE_HEAD(O)         \
  HEED_COMPILE_PASS(O, hs::kShapes.block_vectors, LaneOutputs<O, hs::kShapes.block_vectors>)
#endif
#if HWY_TARGET <= HWY_AVX3
#define HEED_COMPILE_ONE_VECTOR(O) HEED_COMPILE_PASS(O, 1, LaneOutputs<O, 1>)
#else
#define HEED_COMPILE_ONE_VECTOR(O)
#endif

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_PARTS_INL_H_

// Attention forward that skips P V for tiles whose probabilities are negligible (block-sparse attention decided at run
// time, with a certificate).
//
// Compiled once per SIMD target and dtype. The pass is that of forward-inl.h over each block of rows. After the
// exponentials of a tile, skip_certificate-inl.h decides for each row whether the row can skip the tile. A row that
// skips it keeps its state (maximum, sum, outputs) unchanged, with the same bits as if the block mask of the call had
// excluded the tile. A vector of which every row skips is left out of the second product, and a tile that all rows skip
// has no value read.
//
// The keys of a block stay with one thread, because each decision depends on all keys before. At most the second
// product is saved. The added cost is two exponentials per row and tile, the logits of the last tile a second time, and
// a pass over the keys of each head for the norms of its tiles.
//
// Where a window, a mask or a pattern may hide part of a tile, each row looks up which keys it sees and what norm these
// have. Keys that a row does not see must not influence what it skips.
#if defined(HEED_ENGINES_SOFTMAX_CERTIFIED_SKIPPING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_CERTIFIED_SKIPPING_INL_H_
#undef HEED_ENGINES_SOFTMAX_CERTIFIED_SKIPPING_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_CERTIFIED_SKIPPING_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/softmax/decode/decode-inl.h"
#include "heed/engines/softmax/block/exponentials-inl.h"
#include "heed/engines/softmax/forward/forward-inl.h"
#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/seen_keys.h"
#include "heed/engines/softmax/certified/skip_certificate-inl.h"
#include "heed/engines/softmax/certified/skipping_internal.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// The key norms of the tiles of the head that a thread computes, found on first use.
struct TileNorms {
  int64_t sequence, key_head;
  float* of_tile;  // [tile]; below 0: not computed yet

  static int64_t MostTiles(const Problem& p, int64_t tile) {
    int64_t most = 0;
    for (const Sequence& s : p.sequences) most = std::max(most, (s.key_end - s.key_begin + tile - 1) / tile);
    return most;
  }
  static int64_t Bytes(const Problem& p, int64_t tile) { return TileNorms().LayOut(p, tile, nullptr); }
  int64_t LayOut(const Problem& p, int64_t tile, char* base) {
    Carver carver(base, sizeof(TileNorms));
    carver.Next(of_tile, MostTiles(p, tile));
    return carver.bytes();
  }
  void Begin(const Problem& p, int64_t tile, int64_t of_sequence, int64_t of_head) {
    if (sequence == of_sequence && key_head == of_head) return;
    std::fill_n(of_tile, MostTiles(p, tile), -1.0f);
    sequence = of_sequence;
    key_head = of_head;
  }
};

template <class O, int C, class Outputs>
class SkippingBlock : ForwardBlock<O, C, Outputs> {
  using Base = ForwardBlock<O, C, Outputs>;
  using Base::d_, Base::N, Base::W, Base::p_, Base::s_, Base::grid_, Base::block_, Base::key_head_, Base::num_rows_,
      Base::lanes_, Base::w_, Base::head_, Base::layout_, Base::outputs_, Base::totals_, Base::any_tile_, Base::max_,
      Base::sum_;
  using typename Base::T;
  using typename Base::V;
  using M = hn::Mask<hn::ScalableTag<T>>;
  static constexpr int64_t kTile = O::kGrid.tile;
  static constexpr size_t kWords = kTile / BlockSparseMask::kKeys;

 public:
  SkippingBlock(const Problem& problem, const Sequence& sequence, const BlockGrid& grid, int64_t key_head,
                int64_t block, Workspace<O>& workspace, const Head<O>& head, const Skips& skips, float* norms)
      : Base(problem, sequence, grid, key_head, block, workspace, head), skips_(skips), norms_(norms) {
    seen_by_row_ = p_.windowed() || p_.chunk > 0 || p_.mask.data != nullptr || !p_.segments_q.empty() ||
                   p_.has_pattern || p_.biases() > 0 || !p_.slopes.empty();
  }

  HWY_ATTR void Compute() {
    const void* q[W];
    this->FindKeys();
    this->SetLanes(q);
    this->PackQueries(p_.dtype, q);
    BeginRows(q);
    if (p_.biases() > 0) {
      SoftmaxLastTiles</*kFlagMasked=*/true>();
    } else {
      SoftmaxLastTiles</*kFlagMasked=*/false>();
    }
    PassAndMerge</*kFlagMasked=*/false>();
    // If a masked value has leaked, the pass is repeated with masked pairs flagged, as in ForwardBlock. The decisions
    // stay the same.
    if (any_tile_ && this->MaskedLeaked()) PassAgain();
    if (!any_tile_) this->ClearTotals();
    this->Finish();
    WriteBounds();
  }

 private:
  // Gives each row's terms to the certificate.
  void BeginRows(const void* const* q) {
    for (size_t lane = 0; lane < W; ++lane) certificate_.SetNoRow(lane);
    const typename SkipCertificate<W>::Terms terms = {skips_.epsilon, p_.scale, p_.depth, p_.softcap > 0, p_.biases()};
    ForRows([&](size_t lane, int64_t, int64_t head) HWY_ATTR {
      const Interval keys = KeysOfRow(lane);
      double squares = 0;
      hs::WithStorage<T>(p_.dtype, [&](auto stored) HWY_ATTR {
        using S = decltype(stored);
        const auto* row = static_cast<const S*>(q[lane]);
        squares = hn::ReduceSum(d_, AddSquares(d_, row, static_cast<size_t>(p_.depth), hn::Zero(d_)));
      });
      const double sink =
          p_.sinks.empty() ? -std::numeric_limits<double>::infinity() : p_.sinks[static_cast<size_t>(head)];
      const int64_t tiles = (keys.end + kTile - 1) / kTile;
      const int64_t last = keys.empty() ? -1 : s_.key_begin + (tiles - 1) * kTile;
      certificate_.SetRow(lane, terms, squares, {keys.begin, keys.size(), tiles, last}, sink);
    });
  }

  // Returns the keys of the row's last run, counted from the sequence's first key.
  Interval KeysOfRow(size_t lane) const {
    const KeyRuns& runs = this->runs_[lane];
    const Interval& run = runs.second.empty() ? runs.first : runs.second;
    return run.empty() ? Interval() : Interval{run.begin - s_.key_begin, run.end - s_.key_begin};
  }

  // Computes the logits and probabilities of the tile in which the keys of each row end, and gives them to the
  // certificate.
  template <bool kFlagMasked>
  HWY_NOINLINE void SoftmaxLastTiles() {
    const void* q[W];
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      KeyRuns& runs = this->runs_[lane];
      const Interval keys = KeysOfRow(lane);
      const int64_t begin = s_.key_begin + (keys.end - 1) / kTile * kTile;
      if (!keys.empty()) runs = {{}, {std::max(s_.key_begin + keys.begin, begin), s_.key_begin + keys.end}};
    }
    this->SetLanes(q);
    this->ForTiles([&](const Tile& tile) HWY_ATTR {
      V max[C], shift[C], sum[C], weight[C];
      Run runs[2 * C + 1];
      const int num_runs = this->SplitTile(tile, runs);
      SoftmaxTile<kFlagMasked>(tile, runs, num_runs, nullptr, max, shift, sum, weight);
      HWY_ALIGN T largest[W], weights[W], squares[kTile];
      for (int c = 0; c < C; ++c) {
        hn::Store(max[c], d_, largest + static_cast<size_t>(c) * N);
        hn::Store(weight[c], d_, weights + static_cast<size_t>(c) * N);
      }
      // The rows see different keys of the tile, so each needs its own norm.
      if (seen_by_row_) {
        LookAt(tile, /*knows_norm=*/false);
      } else {
        SquaresOf(tile.keys, squares);
        for (int64_t j = 1; j < tile.keys.size(); ++j) squares[j] += squares[j - 1];
      }
      for (size_t lane = 0; lane < num_rows_; ++lane) {
        const Interval& run = this->runs_[lane].second;
        const int64_t last = run.end - 1 - tile.keys.begin;
        if (run.empty() || last < 0 || last >= tile.keys.size()) continue;
        const double norm =
            seen_by_row_ ? static_cast<double>(seen_norm_[lane]) : NormAbove(static_cast<double>(squares[last]));
        const double more =
            seen_by_row_ ? static_cast<double>(more_[lane]) + BiasUnit() * std::abs(static_cast<double>(largest[lane]))
                         : 0;
        certificate_.AddLastTile(lane, largest[lane], weights[lane], norm, more);
      }
    });
    this->FindKeys();
    this->SetLanes(q);
  }

  // Computes all tiles into totals_. A segment of which no row keeps a tile changes nothing.
  template <bool kFlagMasked>
  HWY_INLINE void PassAndMerge() {
    V m[C], l[C];  // of the current segment
    certificate_.Begin();
    outputs_ = w_.outputs;
    totals_ = w_.totals;
    any_tile_ = false;
    int64_t segment = -1;
    bool first_tile = true;
    const auto finish = [&]() HWY_ATTR {
      if (first_tile) return;
      if (any_tile_) {
        this->Merge(m, l, outputs_);
      } else {
        std::swap(outputs_, totals_);
        this->Store(m, l, max_, sum_);
      }
      any_tile_ = true;
    };
    this->ForTiles([&](const Tile& tile) HWY_ATTR {
      if (tile.segment != segment) {
        finish();
        segment = tile.segment;
        first_tile = true;
        for (int c = 0; c < C; ++c) {
          m[c] = hn::Set(d_, -std::numeric_limits<T>::infinity());
          l[c] = hn::Zero(d_);
        }
      }
      if (AddTile<kFlagMasked>(tile, first_tile, m, l)) first_tile = false;
    });
    finish();
  }

  HWY_NOINLINE void PassAgain() { PassAndMerge</*kFlagMasked=*/true>(); }

  // Adds a tile to the state of its segment for the rows that keep it. Returns false if every row skips it.
  template <bool kFlagMasked>
  HWY_NOINLINE bool AddTile(const Tile& tile, bool first, V* m, V* l) {
    V max[C], shift[C], sum[C], weight[C];
    Run runs[2 * C + 1];
    const int num_runs = this->SplitTile(tile, runs);
    const int64_t origin = tile.keys.begin;
    V rescale[C];
    for (int c = 0; c < C; ++c) max[c] = m[c], sum[c] = l[c];
    SoftmaxTile<kFlagMasked>(tile, runs, num_runs, rescale, max, shift, sum, weight);

    const V one = hn::Set(d_, T{1});
    V norm = hn::Zero(d_);
    if (seen_by_row_) {
      LookAt(tile, /*knows_norm=*/true);
    } else {
      norm = hn::Set(d_, NormOf(tile));
    }
    M out[C], keeps[C];
    bool adds[C], any = false, all = true;
    for (int c = 0; c < C; ++c) {
      const size_t lane = static_cast<size_t>(c) * N;
      M sees = certificate_.Sees(lane, tile.grid);
      V gamma = certificate_.Gamma(lane, norm);
      if (seen_by_row_) {
        sees = hn::Ge(hn::Load(d_, seen_norm_ + lane), hn::Zero(d_));
        gamma = hn::Add(certificate_.Gamma(lane, hn::Load(d_, seen_norm_ + lane)), hn::Load(d_, more_ + lane));
        gamma = hn::MulAdd(hn::Abs(shift[c]), hn::Set(d_, static_cast<T>(BiasUnit())), gamma);
      }
      const int64_t end = tile.grid + kTile - s_.key_begin;
      out[c] = certificate_.Decide(lane, tile.grid, end, gamma, sees, of_tile_[c], shift[c], weight[c]);
      keeps[c] = hn::AndNot(out[c], sees);
      adds[c] = !hn::AllFalse(d_, keeps[c]);
      any = any || adds[c];
      all = all && (adds[c] || hn::AllFalse(d_, sees));
      // A row that sees nothing of the tile stays as it was, too.
      if (seen_by_row_) out[c] = hn::Not(keeps[c]);
    }
    if (skips_.kept.data != nullptr) WriteKept(tile, keeps);
    if (!any) return false;
    for (int c = 0; c < C; ++c) {
      m[c] = hn::IfThenElse(out[c], m[c], max[c]);
      l[c] = hn::IfThenElse(out[c], l[c], sum[c]);
      rescale[c] = hn::IfThenElse(out[c], one, rescale[c]);
      if (adds[c] && !hn::AllFalse(d_, out[c])) Mask(runs, num_runs, origin, static_cast<size_t>(c), out[c]);
    }
    if (head_.values_at == Place::kTile) {
      O::CopyValues(head_.value_source, tile.keys.begin, tile.keys.end, p_.value_depth, w_.values);
      head_.values.first = tile.keys.begin;
    }
    if (all && num_runs == 1 && runs[0].c0 == 0 && runs[0].c1 == this->vectors_) {
      this->template Values<kFlagMasked>(runs[0], origin, first, rescale);
      return true;
    }
    // If only some vectors or keys are added, the outputs are rescaled once beforehand.
    auto same = hn::Eq(rescale[0], one);
    for (int c = 1; c < C; ++c) same = hn::And(same, hn::Eq(rescale[c], one));
    if (first || !hn::AllTrue(d_, same)) layout_.Scale(first, rescale, outputs_);
    for (int c = 0; c < C; ++c) rescale[c] = one;
    for (int r = 0; r < num_runs; ++r) {
      for (size_t c0 = runs[r].c0; c0 < runs[r].c1; ++c0) {
        size_t c1 = c0;
        while (c1 < runs[r].c1 && adds[c1]) ++c1;
        if (c1 == c0) continue;
        const Run part = {runs[r].begin, runs[r].end, c0, c1};
        this->template Values<kFlagMasked>(part, origin, /*first=*/false, rescale);
        c0 = c1;
      }
    }
    return true;
  }

  // Computes the logits and probabilities of a tile. With a `rescale`, which receives the factor for the outputs so
  // far, `max` and `sum` begin with the state so far and include the tile afterwards. `weight` is the tile's own part
  // of the sum.
  template <bool kFlagMasked>
  HWY_INLINE void SoftmaxTile(const Tile& tile, const Run* runs, int num_runs, V* rescale, V* max, V* shift, V* sum,
                              V* weight) {
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    for (int c = 0; c < C; ++c) of_tile_[c] = none;
    this->BeginLogits(tile);
    for (int r = 0; r < num_runs; ++r) this->Logits(runs[r], tile, kFlagMasked, of_tile_);
    for (int c = 0; c < C; ++c) {
      const V old = rescale == nullptr ? none : max[c];
      max[c] = hn::Max(of_tile_[c], old);
      shift[c] = this->Shift(max[c]);
      weight[c] = hn::Zero(d_);
      if (rescale == nullptr) {
        sum[c] = hn::Zero(d_);
      } else {
        rescale[c] = Weight(d_, hn::Sub(old, shift[c]));
        sum[c] = hn::Mul(sum[c], rescale[c]);
      }
    }
    for (int r = 0; r < num_runs; ++r) Weights<kFlagMasked>(runs[r], tile.keys.begin, shift, sum, weight);
  }

  template <bool kFlagMasked>
  HWY_INLINE void Weights(const Run& run, int64_t origin, const V* shift, V* sum, V* weight) {
    this->ForParts(run, [&](auto vectors, const Run& part) HWY_ATTR {
      constexpr int kVectors = vectors.value;
      const T* s = this->At(part, origin);
      T* p = this->WeightsAt(part, origin);
      V own[kVectors];
      for (int c = 0; c < kVectors; ++c) own[c] = weight[part.c0 + static_cast<size_t>(c)];
      Exponentials<W, kVectors, O::kKeyStep, kFlagMasked>(
          d_, static_cast<size_t>(run.end - run.begin), s, shift + part.c0, sum + part.c0,
          [&](const V* weights, size_t j, int c) HWY_ATTR {
            for (int i = 0; i < O::kKeyStep; ++i) own[c] = hn::Add(own[c], weights[i]);
            O::PutWeights(weights, p + j / O::kKeyStep * W + static_cast<size_t>(c) * N);
          });
      for (int c = 0; c < kVectors; ++c) weight[part.c0 + static_cast<size_t>(c)] = own[c];
    });
  }

  // Masks the probabilities of the rows of vector c that skip the tile.
  HWY_NOINLINE void Mask(const Run* runs, int num_runs, int64_t origin, size_t c, M out) const {
    const V nothing[2] = {hn::Set(d_, T{-0.0}), hn::Set(d_, T{-0.0})};
    HWY_ALIGN T masked[N];
    O::PutWeights(nothing, masked);
    for (int r = 0; r < num_runs; ++r) {
      if (c < runs[r].c0 || c >= runs[r].c1) continue;
      Run own = runs[r];
      own.c0 = c;
      T* p = this->WeightsAt(own, origin);
      for (int64_t j = own.begin; j < own.end; j += O::kKeyStep, p += W) {
        hn::Store(hn::IfThenElse(out, hn::Load(d_, masked), hn::Load(d_, p)), d_, p);
      }
    }
  }

  // Calls f(pointers to the keys of an interval, their number); the keys are of their storage type.
  template <class F>
  HWY_INLINE void WithKeys(const Interval& keys, const F& f) const {
    hs::WithStorage<T>(head_.key_source.dtype, [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      const auto rows = Stored<S>(head_.key_source, keys.begin, keys.end, 0);
      const S* at[hs::kMostRows];
      auto cursor = rows.cursor;
      if (cursor.chosen != nullptr) {
        cursor.TakeChosen(rows.count, at);
      } else {
        cursor.Take(rows.count, at);
      }
      f(at, rows.count);
    });
  }

  // Returns an upper bound of the norm of a tile's keys. It is infinite if no row sees a key behind the tile: all rows
  // that see the tile then keep it.
  HWY_INLINE float NormOf(const Tile& tile) const {
    if (!certificate_.AnyGoesOnAfter(tile.grid)) return std::numeric_limits<float>::infinity();
    float& norm = norms_[(tile.grid - s_.key_begin) / kTile];
    if (!(norm >= 0)) norm = FindNorm(tile.keys);
    return norm;
  }
  HWY_NOINLINE float FindNorm(const Interval& keys) const {
    const auto depth = static_cast<size_t>(p_.depth);
    V sums[4];
    for (V& sum : sums) sum = hn::Zero(d_);
    WithKeys(keys, [&](const auto* at, size_t count) HWY_ATTR {
      size_t j = 0;
      for (; j + 4 <= count; j += 4) {
        HWY_UNROLL(4)
        for (size_t i = 0; i < 4; ++i) sums[i] = AddSquares(d_, at[j + i], depth, sums[i]);
      }
      for (; j < count; ++j) sums[0] = AddSquares(d_, at[j], depth, sums[0]);
    });
    const V sum = hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]));
    return static_cast<float>(1.001 * NormAbove(static_cast<double>(hn::ReduceSum(d_, sum))));
  }

  // Computes the square of the norm of each key.
  HWY_NOINLINE void SquaresOf(const Interval& keys, T* squares) const {
    WithKeys(keys, [&](const auto* at, size_t count) HWY_ATTR {
      for (size_t j = 0; j < count; ++j) {
        squares[j] = hn::ReduceSum(d_, AddSquares(d_, at[j], static_cast<size_t>(p_.depth), hn::Zero(d_)));
      }
    });
  }

  // Twice the relative f32 rounding of a logit to which biases are added.
  double BiasUnit() const { return p_.biases() * 2.02 * 0x1p-24; }

  // Finds which rows see any key of a tile, and the norm of the keys that each row sees; nothing else may influence the
  // decision. A row that sees the whole tile takes the tile's norm or, unless `knows_norm`, a norm summed in the same
  // order as for any other row.
  HWY_NOINLINE void LookAt(const Tile& tile, bool knows_norm) {
    HWY_ALIGN T squares[kTile];
    HWY_ALIGN uint32_t words[2 * kWords][W] = {};
    HWY_ALIGN T of_all[W];  // -1: the row sees no key; 0: some keys; 1: all keys, so that it takes the tile's norm
    bool some = false;
    ForRows([&](size_t lane, int64_t query, int64_t head) {
      bool all = true, any = false;
      for (size_t word = 0; word < kWords; ++word) {
        const int64_t begin = tile.grid + static_cast<int64_t>(word) * BlockSparseMask::kKeys;
        const int64_t exist = std::clamp<int64_t>(s_.key_end - begin, 0, BlockSparseMask::kKeys);
        const uint64_t bits = exist == 0 ? 0 : SeenBits(p_, s_, head, query, this->runs_[lane], begin);
        const uint64_t valid = exist == 0 ? 0 : ~uint64_t{0} >> (BlockSparseMask::kKeys - exist);
        words[2 * word][lane] = static_cast<uint32_t>(bits);
        words[2 * word + 1][lane] = static_cast<uint32_t>(bits >> 32);
        all = all && bits == valid;
        any = any || bits != 0;
      }
      of_all[lane] = any ? 0 : -1;
      if (all && knows_norm) of_all[lane] = 1;
      some = some || (any && of_all[lane] == 0);
      const int64_t from = tile.grid - lanes_.position[lane];
      const auto farthest = static_cast<double>(std::max(std::abs(from), std::abs(from + kTile)));
      more_[lane] = p_.slopes.empty()
                        ? 0
                        : static_cast<T>(4.02 * 0x1p-24 * std::abs(static_cast<double>(lanes_.slope[lane])) * farthest);
    });
    for (size_t lane = num_rows_; lane < W; ++lane) of_all[lane] = -1, more_[lane] = 0;
    HWY_ALIGN T sums[W] = {};
    if (some) {
      SquaresOf(tile.keys, squares);
      for (int64_t key = tile.keys.begin; key < tile.keys.end; ++key) {
        const hn::RebindToUnsigned<hn::ScalableTag<T>> du;
        const auto at = static_cast<size_t>(key - tile.grid);
        const auto bit = hn::Set(du, uint32_t{1} << (at % 32));
        const V square = hn::Set(d_, squares[key - tile.keys.begin]);
        for (size_t lane = 0; lane < W; lane += N) {
          const auto sees = hn::RebindMask(d_, hn::TestBit(hn::Load(du, words[at / 32] + lane), bit));
          hn::Store(hn::Add(hn::Load(d_, sums + lane), hn::IfThenElseZero(sees, square)), d_, sums + lane);
        }
      }
    }
    for (size_t lane = 0; lane < W; ++lane) {
      seen_norm_[lane] = of_all[lane] < 0    ? T{-1}
                         : of_all[lane] == 0 ? static_cast<T>(1.001 * NormAbove(static_cast<double>(sums[lane])))
                                             : NormOf(tile);
      // A NaN norm would read as "sees nothing"; infinity keeps the tile.
      if (std::isnan(seen_norm_[lane])) seen_norm_[lane] = std::numeric_limits<T>::infinity();
    }
  }

  // Calls f(lane, query, query head) for each row of the block.
  template <class F>
  void ForRows(const F& f) const {
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      const BlockGrid::Row row = grid_.At(block_, static_cast<int64_t>(lane));
      f(lane, row.query, key_head_ * grid_.heads + row.head);
    }
  }

  HWY_NOINLINE void WriteKept(const Tile& tile, const M* keeps) const {
    HWY_ALIGN T kept_by[W];
    for (int c = 0; c < C; ++c) {
      hn::Store(hn::IfThenElseZero(keeps[c], hn::Set(d_, T{1})), d_, kept_by + static_cast<size_t>(c) * N);
    }
    const Pairs& kept = skips_.kept;
    ForRows([&](size_t lane, int64_t query, int64_t head) {
      auto* const blocks = static_cast<bool*>(const_cast<void*>(kept.data)) + s_.batch * kept.batch_stride +
                           head * kept.head_stride + (s_.first_q + query) * kept.query_stride;
      const int64_t end = std::min(tile.grid + kTile - s_.key_begin, KeysOfRow(lane).end);
      for (int64_t key = tile.grid - s_.key_begin; key < end; key += kTileKeys) {
        blocks[key / kTileKeys * kept.key_stride] = kept_by[lane] != 0;
      }
    });
  }

  void WriteBounds() const {
    if (skips_.bound.data == nullptr) return;
    const Rows& bound = skips_.bound;
    ForRows([&](size_t lane, int64_t query, int64_t head) {
      const float left_out = certificate_.BoundOf(lane);
      static_cast<float*>(const_cast<void*>(bound.data))[s_.batch * bound.batch_stride + head * bound.head_stride +
                                                         (s_.first_q + query) * bound.token_stride] =
          left_out > 0 && std::isnan(sum_[lane]) ? sum_[lane] : left_out;
    });
  }

  const Skips& skips_;
  float* const norms_;  // [tile], of the head
  SkipCertificate<W> certificate_;
  V of_tile_[C];              // the largest logits of the current tile
  bool seen_by_row_ = false;  // rows may see any subset of a tile's keys, or logits have terms added
  HWY_ALIGN T seen_norm_[W];  // norm of the keys that a row sees of the current tile; below 0: it sees none
  HWY_ALIGN T more_[W];       // ALiBi's part of gamma
};

template <class O, int C, class Outputs>
void RunSkipping(Context& ctx, const Problem& p, const Plan& plan, const Skips& skips) {
  constexpr int64_t kTile = O::kGrid.tile;
  ReserveWorkspaces<O>(ctx, plan, TileNorms::Bytes(p, kTile));
  const auto norms_of = [&](int worker) -> TileNorms& {
    return *reinterpret_cast<TileNorms*>(static_cast<char*>(ctx.Scratch(worker)) + Workspace<O>::Bytes(plan));
  };
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    TileNorms& norms = norms_of(worker);
    norms.sequence = norms.key_head = -1;
    norms.LayOut(p, kTile, reinterpret_cast<char*>(&norms));
  }
  const BlockQueue queue(p, plan.rows);
  ctx.ParallelFor(queue.size(), [&](int64_t index, int worker) HWY_ATTR {
    const BlockQueue::Task task = queue.At(index);
    const Sequence& s = p.sequences[static_cast<size_t>(task.sequence)];
    Workspace<O>& w = WorkspaceOf<O>(ctx, worker);
    const Head<O> head = HeadOf(p, plan, task.sequence, task.key_head, w);
    const BlockGrid grid(p, s, plan.rows);
    TileNorms& norms = norms_of(worker);
    norms.Begin(p, kTile, task.sequence, task.key_head);
    SkippingBlock<O, C, Outputs>(p, s, grid, task.key_head, task.block, w, head, skips, norms.of_tile).Compute();
  });
}

template <class O>
int64_t SkippingBytes(const Problem& p, const Plan& plan) {
  return Workspace<O>::Bytes(plan) + TileNorms::Bytes(p, O::kGrid.tile);
}

// Passes vectorised over queries, with as many vectors per block as Forward() takes.
template <class O>
void RunLanes(Context& ctx, const Problem& p, const Skips& skips) {
  const Plan plan = MakePlan<O>(p);
  if constexpr (kFewestVectors<O> == 1) {
    if (plan.vectors == 1) return RunSkipping<O, 1, LaneOutputs<O, 1>>(ctx, p, plan, skips);
  }
  if constexpr (kFewestVectors<O> <= 2 && O::kMostVectors > 2) {
    if (plan.vectors == 2) return RunSkipping<O, 2, LaneOutputs<O, 2>>(ctx, p, plan, skips);
  }
  constexpr int C = O::kMostVectors;
  RunSkipping<O, C, LaneOutputs<O, C>>(ctx, p, plan, skips);
}

template <class O>
SkippingPasses LanePasses() {
  return {.forward = &RunLanes<O>,
          .workspace = [](const Problem& p) { return SkippingBytes<O>(p, MakePlan<O>(p)); },
          .lanes = [](const Problem& p) { return MakePlan<O>(p).lanes; }};
}

// Small-M passes, with as many rows per block as decoding takes.
template <class O>
SkippingPasses RowPasses() {
  return {.forward = [](Context& ctx, const Problem& p,
                        const Skips& skips) { RunSkipping<O, 1, RowOutputs<O>>(ctx, p, DecodePlan<O>(p), skips); },
          .workspace = [](const Problem& p) { return SkippingBytes<O>(p, DecodePlan<O>(p)); },
          .lanes = [](const Problem&) { return DecodeRows<O>(); }};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_CERTIFIED_SKIPPING_INL_H_

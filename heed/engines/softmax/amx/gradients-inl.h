// The last three products of the backward pass with AMX.
//
// Compiled once per SIMD target that has AMX or emulates it.
//
// P and dS [key][lane] are rows of 32 lanes of bf16, and dS also pairs of keys:
//
//   dv[key][dim]  += P dO     a: P,   b: pairs of rows of dO
//   dk[key][dim]  += dS Q     a: dS,  b: pairs of rows of Q
//   dq[dim][lane] =  K^T dS   a: keys by channel, b: pairs of keys of dS
//
// A sum of 16 by 16 is loaded and stored for each block's products, which for dv and dk is one product per block of 32
// rows. Therefore P and dS of kBlocks blocks of a group are kept and added up together: the same chains in fewer steps.
// Keys that no row of a block sees have P of zero, which products pass over.
#if defined(HEED_ENGINES_SOFTMAX_AMX_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_AMX_GRADIENTS_INL_H_
#undef HEED_ENGINES_SOFTMAX_AMX_GRADIENTS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_AMX_GRADIENTS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heed/engines/softmax/backward/gradient_buffers-inl.h"
#include "heed/engines/softmax/backward/gradient_rows-inl.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/amx/row_pairs-inl.h"
#include "heed/engines/softmax/amx/operands-inl.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/simd/amx_products-inl.h"
#include "heed/simd/amx.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

template <class O>
class AmxGradients {
  using D = typename O::D;
  using V = typename O::V;
  using D16 = hn::Repartition<uint16_t, D>;
  using Tiles = typename O::Tiles;
  static constexpr int kProducts = O::kKeyProducts, kTerms = O::kTerms;
  static_assert(O::kValueProducts == kProducts && O::kWeightTerms == kTerms);
  static constexpr int C = O::kLaneVectors;
  static constexpr size_t N = hn::MaxLanes(D()), W = C * N;
  static_assert(W == kTileDepth);
  static constexpr D d_{};
  static constexpr D16 d16_{};

 public:
  using Operands = O;
  static constexpr int kVectors = C;
  // Rows are added up 32 at a time, and heads that share lanes would change these sums.
  static constexpr bool kFuseHeads = false;
  // Rows are packed once per group; with more keys, splits of f32 would leave L2.
  static constexpr int64_t kGroupKeys = kTerms == 1 ? 512 : 256;
  static constexpr int64_t kBlocks = 4;  // blocks whose P and dS are kept

  static int64_t Row(int64_t depth) { return O::OutputRows(depth); }

  // For bf16 one rounding of the shift does not matter; otherwise small differences are exact.
  static float Shift(float lse) { return kTerms == 1 ? lse * static_cast<float>(hs::kLog2E) : lse; }
  static HWY_INLINE V RowPart(V of_row, V factor) { return kTerms == 1 ? hn::Mul(of_row, factor) : of_row; }
  // For rows whose biases stand for masks the rounding would matter, so the difference comes first. No exponent is
  // above 0.
  static constexpr bool kScalesShift = kTerms == 1;
  struct Weight {
    typename O::Probabilities p;
    HWY_INLINE Weight() {}  // a defaulted constructor would not be compiled for this target
    HWY_INLINE V operator()(V s, V shift, V factor) const {
      return kTerms == 1 ? p.Exp2(hn::MulSub(s, factor, shift)) : O::Weight(p, s, shift, factor);
    }
    HWY_INLINE V Far(V s, V lse, V factor) const {
      return p.Exp2(hn::Min(hn::Mul(hn::Sub(s, lse), factor), hn::Zero(d_)));
    }
  };

  struct Buffers {
    BF16 *keys, *values, *key_channels;  // of the group, in tiles; key_channels: keys by channel
    uint32_t *q_rows, *d_o_rows;         // [block][term][16 channels][pair of rows][channel]
    uint16_t *p, *ds;                    // [block][term][key][lane]
    uint32_t* ds_pairs;                  // [term][pair of keys][column]
    float *dq_lanes, *dq;                // [dim][column], [lane][dim]
    float *dk, *dv;                      // [key][dim]

    void LayOut(Carver& carver, const Problem& p_of, const Plan&) {
      const int64_t row = Row(p_of.depth), value_row = Row(p_of.value_depth);
      carver.Next(keys, O::KeySize(kGroupKeys, p_of.depth));
      carver.Next(values, O::KeySize(kGroupKeys, p_of.value_depth));
      carver.Next(key_channels, O::ValueSize(kGroupKeys, p_of.depth));
      carver.Next(q_rows, kBlocks * RowWords(p_of.depth));
      carver.Next(d_o_rows, kBlocks * RowWords(p_of.value_depth));
      carver.Next(p, kBlocks * kWeightHalves);
      carver.Next(ds, kBlocks * kWeightHalves);
      carver.Next(ds_pairs, kWeightHalves / 2);
      carver.Next(dq_lanes, row * kTileDepth);
      carver.Next(dq, kTileDepth * row);
      carver.Next(dk, kGroupKeys * row);
      carver.Next(dv, kGroupKeys * value_row);
    }
  };

  AmxGradients(const Problem& p, const Wants& wants, const Interval& keys, const SourceRows& key_source,
               const SourceRows& value_source, Buffers& b)
      : p_(p), wants_(wants), keys_(keys), b_(b) {
    keys_finite_ = O::CopyKeys(key_source, keys.begin, keys.end, p.depth, b.keys);
    values_finite_ = O::CopyKeys(value_source, keys.begin, keys.end, p.value_depth, b.values);
    O::CopyValues(key_source, keys.begin, keys.end, p.depth, b.key_channels);
    std::fill(b.dk, b.dk + kGroupKeys * row_, 0.0f);
    std::fill(b.dv, b.dv + kGroupKeys * value_row_, 0.0f);
  }

  Operand<BF16> Keys() const { return {b_.keys, 0, keys_.begin}; }
  Operand<BF16> Values() const { return {b_.values, 0, keys_.begin}; }
  bool KeysAreFinite() const { return keys_finite_; }
  bool ValuesAreFinite() const { return values_finite_; }

  HWY_INLINE DType BeginBlock(size_t num_rows, const void** q, const void** d_o) {
    num_rows_ = num_rows;
    seen_ = {};
    for (size_t lane = 0; lane < num_rows; ++lane) {
      q_[lane] = q[lane];
      d_o_[lane] = d_o[lane];
    }
    const RowPairs<O> pairs(p_.dtype, num_rows);
    rows_finite_ = pairs.Pack(q, p_.depth, b_.q_rows + block_ * RowWords(p_.depth));
    rows_finite_ = pairs.Pack(d_o, p_.value_depth, b_.d_o_rows + block_ * RowWords(p_.value_depth)) && rows_finite_;
    return p_.dtype;
  }

  // Adds P and dS of a run, in both of which masked pairs are -0.
  HWY_INLINE void Add(const Run& run, int64_t origin, const float* p, const float* ds, RowPrefetch&) {
    const Interval of_group = See({run.begin, run.end});
    const auto row = [&](const float* of, int64_t key, V* x) HWY_ATTR HEED_INLINE_LAMBDA {
      for (int c = 0; c < C; ++c) {
        x[c] = key < run.end ? hn::Load(d_, of + static_cast<size_t>(key - origin) * W + static_cast<size_t>(c) * N)
                             : hn::Set(d_, -0.0f);
      }
    };
    for (int64_t key = of_group.begin; key < of_group.end; key += 2) {
      V of_p[C], of_ds[C];
      Halves first[kTerms][C / 2], second[kTerms][C / 2];
      row(p, keys_.begin + key, of_p);
      row(ds, keys_.begin + key, of_ds);
      PutKey(key, of_p, of_ds, first);
      row(p, keys_.begin + key + 1, of_p);
      row(ds, keys_.begin + key + 1, of_ds);
      PutKey(key + 1, of_p, of_ds, second);
      PutPair(key, first, second);
    }
  }

  // Terms of each lane from which P and dS are computed.
  struct Rows {
    const float *shift, *delta, *gain;
  };

  // With decay, each tile of keys has a shift of its own and numbers that are added to logits, and dS is summed over
  // it.
  struct TileTerms {
    V shift[C];
    const float* of_key = nullptr;                // per key of the tile
    V row_sums[C];                                // sums of dS
    HWY_ALIGN float key_sums[O::kGrid.tile * N];  // per key, N partial sums
  };

  // Adds P and dS of keys, in whole steps, whose pairs are all kept and finite, from the operands of their logits and
  // of dP. Products of some keys overlap P and dS of the keys before. `logits` and `d_logits` hold two units of 32
  // keys. `tiles` is null, or tiles.Begin(key) sets tiles.terms for the tile of this key and tiles.End() takes its
  // sums.
  template <class TilesTerms>
  HWY_INLINE void AddPlain(const Interval& keys, const uint32_t* q, const uint32_t* d_o, float factor, const Rows& rows,
                           float* logits, float* d_logits, RowPrefetch& prefetch, TilesTerms&& tiles) {
    const auto pipe = [&](auto each)
                          HWY_ATTR { Pipe<each.value>(keys, q, d_o, factor, rows, logits, d_logits, prefetch, tiles); };
    const int64_t products = (O::Chunks(p_.depth) + O::Chunks(p_.value_depth)) * kProducts;
    if constexpr (kProducts == 1) {
      if (products <= 6) return pipe(std::integral_constant<int, 4>());
    }
    if constexpr (2 * kProducts <= 10) {  // for the fewest channels
      if (products <= 10) return pipe(std::integral_constant<int, 2>());
    }
    pipe(std::integral_constant<int, 1>());
  }

  HWY_INLINE void EndBlock() {
    if (wants_.dq) QueryGradients();
    if (seen_.empty()) return;
    if (!rows_finite_) AddRowsThatAreNotFinite();
    seen_of_[block_] = seen_;
    all_seen_ = all_seen_.empty()
                    ? seen_
                    : Interval{std::min(all_seen_.begin, seen_.begin), std::max(all_seen_.end, seen_.end)};
    if (++block_ == kBlocks) KeyGradients();
  }

  HWY_INLINE void EndGroup() {
    if (block_ > 0) KeyGradients();
  }

  const float* Dq(size_t lane) const { return b_.dq + static_cast<int64_t>(lane) * row_; }

 private:
  using Halves = hn::Vec<D16>;
  using Block = hs::TileBlock<Tiles, kProducts>;
  static constexpr int kPrefetches = 6;                      // of rows of the next block, per step of keys
  static constexpr int64_t kUnit = kTileDepth * int64_t{W};  // logits of a step of keys

  // Announces P of these keys, and returns their positions in the group, in whole steps.
  HWY_INLINE Interval See(const Interval& keys) {
    const Interval of_group = {keys.begin - keys_.begin, O::Up(keys.end - keys_.begin, kTileDepth)};
    if (seen_.empty()) {
      seen_ = of_group;
    } else {
      Mask(block_, {seen_.end, of_group.begin}, /*pairs=*/true);
      seen_.end = of_group.end;
    }
    return of_group;
  }

  HWY_INLINE void PutKey(int64_t key, const V* p, const V* ds, Halves (&ds_split)[kTerms][C / 2]) {
    Halves p_split[kTerms][C / 2];
    PutRow(p, WeightsAt(b_.p, block_, key), p_split);
    PutRow(ds, WeightsAt(b_.ds, block_, key), ds_split);
  }
  HWY_INLINE void PutPair(int64_t key, const Halves (&first)[kTerms][C / 2], const Halves (&second)[kTerms][C / 2]) {
    uint32_t* to = b_.ds_pairs + key / 2 * int64_t{W};
    HWY_UNROLL(3)
    for (int i = 0; i < kTerms; ++i) {
      HWY_UNROLL(2)
      for (int v = 0; v < C / 2; ++v) {
        auto* at = reinterpret_cast<uint16_t*>(to + i * kPairs * int64_t{W} + static_cast<size_t>(v) * 2 * N);
        hn::Store(hn::InterleaveLower(d16_, first[i][v], second[i][v]), d16_, at);
        hn::Store(hn::InterleaveUpper(d16_, first[i][v], second[i][v]), d16_, at + 2 * N);
      }
    }
  }

  // P and dS of a unit, kEach pairs of keys in four calls of Do().
  template <int kEach, bool kDecays>
  class Terms {
   public:
    HWY_INLINE Terms(AmxGradients& to, float f, const Rows& rows) : to_(to), factor_(hn::Set(d_, f)) {
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) {
        const size_t lane = static_cast<size_t>(c) * N;
        shift_[c] = hn::Load(d_, rows.shift + lane);
        delta_[c] = hn::Load(d_, rows.delta + lane);
        gain_[c] = hn::Load(d_, rows.gain + lane);
      }
    }
    HWY_INLINE void Begin(const float* s, const float* dp, int64_t key) {
      s_ = s;
      dp_ = dp;
      key_ = key;
      left_ = kTileDepth / 2;
      begun_ = false;
    }
    HWY_INLINE void BeginTile(TileTerms& tile) {
      tile_ = &tile;
      of_tile_ = 0;
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) {
        shift_[c] = tile.shift[c];
        row_sums_[c] = hn::Zero(d_);
      }
    }
    HWY_INLINE void EndTile() {
      for (int c = 0; c < C; ++c) tile_->row_sums[c] = row_sums_[c];
    }
    HWY_INLINE void End() {
      while (left_ > 0) Pair();
    }

    template <int m, int n>
    HWY_INLINE void Do() {
      if (left_ == 0) return;
      if constexpr (kEach == 4) {
        Pair();
      } else if constexpr (kEach == 2) {
        begun_ = begun_ || n == 0;  // does not begin with the second key of a pair
        if (begun_) Key<n>();
      } else if constexpr (n == 0) {
        Key<m>();
      }
    }

   private:
    HWY_INLINE void Pair() {
      Key<0>();
      Key<1>();
    }
    // The first or the second key of a pair.
    template <int kSecond>
    HEED_BETWEEN_PRODUCTS void Key() {
      V p[C], ds[C];
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) {
        const size_t i = kSecond * W + static_cast<size_t>(c) * N;
        V s = hn::Load(d_, s_ + i);
        if constexpr (kDecays) s = hn::Add(s, hn::Set(d_, tile_->of_key[of_tile_]));
        const V weight = weight_(s, shift_[c], factor_);
        ds[c] = hn::Mul(weight, hn::MulSub(gain_[c], hn::Load(d_, dp_ + i), delta_[c]));
        p[c] = hn::Mul(weight, gain_[c]);
      }
      if constexpr (kDecays) {
        V of_key = hn::Zero(d_);
        HWY_UNROLL(4)
        for (int c = 0; c < C; ++c) {
          row_sums_[c] = hn::Add(row_sums_[c], ds[c]);
          of_key = c == 0 ? ds[c] : hn::Add(of_key, ds[c]);
        }
        hn::Store(of_key, d_, tile_->key_sums + of_tile_++ * int64_t{N});
      }
      if constexpr (kSecond == 0) {
        to_.PutKey(key_, p, ds, first_);
      } else {
        Halves second[kTerms][C / 2];
        to_.PutKey(key_ + 1, p, ds, second);
        to_.PutPair(key_, first_, second);
        s_ += 2 * W;
        dp_ += 2 * W;
        key_ += 2;
        --left_;
      }
    }

    AmxGradients& to_;
    const Weight weight_;
    V factor_, shift_[C], delta_[C], gain_[C], row_sums_[C];
    TileTerms* tile_ = nullptr;
    int64_t of_tile_ = 0;  // keys of the tile so far
    Halves first_[kTerms][C / 2];
    const float *s_ = nullptr, *dp_ = nullptr;
    int64_t key_ = 0;
    int left_ = 0;  // remaining pairs
    bool begun_ = false;
  };

  template <int kEach, class TilesTerms>
  HWY_NOINLINE void Pipe(const Interval& keys, const uint32_t* q, const uint32_t* d_o, float factor, const Rows& rows,
                         float* logits, float* d_logits, RowPrefetch& prefetch, TilesTerms& tiles) {
    constexpr bool kDecays = !std::is_null_pointer_v<TilesTerms>;
    constexpr int64_t kTileUnits = O::kGrid.tile / kTileDepth;
    const hs::TileFactor k = O::KeyTiles(Keys(), keys.begin, p_.depth),
                         v = O::KeyTiles(Values(), keys.begin, p_.value_depth), of_q = O::QueryTiles(q, W, p_.depth),
                         of_d_o = O::QueryTiles(d_o, W, p_.value_depth);
    const Interval of_group = See(keys);
    const int64_t units = keys.size() / kTileDepth;
    Terms<kEach, kDecays> terms(*this, factor, rows);
    float* before = nullptr;
    // Stores each sum just before its register is needed again, then calls `stored`.
    const auto product = [&](const hs::TileFactor& a, int64_t unit, const hs::TileFactor& b, int64_t depth, float* out,
                             const auto& stored) HWY_ATTR HEED_INLINE_LAMBDA {
      Block::Step(
          a, 2 * unit, b, 0, 0,
          [&]<int m, int n>() HWY_ATTR HEED_INLINE_LAMBDA {
            if (before != nullptr) Block::template StoreSum<m, n>(before, W);
            Tiles::template Zero<Block::Sum(m, n)>();
            if constexpr (m == 1 && n == 1) stored();
          },
          terms);
      const int64_t chunks = O::Chunks(depth);
      typename Block::Nothing nothing;
      for (int64_t e = 1; e < chunks; ++e) Block::Step(a, 2 * unit, b, 0, e, nothing, terms);
      before = out;
    };
    const auto begin = [&](int64_t unit) HWY_ATTR HEED_INLINE_LAMBDA {
      if constexpr (kDecays) {
        if (unit % kTileUnits == 0) {
          tiles.Begin(keys.begin + unit * kTileDepth);
          terms.BeginTile(tiles.terms);
        }
      }
      terms.Begin(logits + unit % 2 * kUnit, d_logits + unit % 2 * kUnit, of_group.begin + unit * kTileDepth);
    };
    const auto end = [&](int64_t unit) HWY_ATTR HEED_INLINE_LAMBDA {
      terms.End();
      if constexpr (kDecays) {
        if (unit < 0 || unit % kTileUnits != kTileUnits - 1) return;
        terms.EndTile();
        tiles.End();
      }
    };
    for (int64_t unit = 0; unit < units; ++unit) {
      product(k, unit, of_q, p_.depth, logits + unit % 2 * kUnit, [&]() HWY_ATTR HEED_INLINE_LAMBDA {
        if (unit > 0) begin(unit - 1);
      });
      product(v, unit, of_d_o, p_.value_depth, d_logits + unit % 2 * kUnit, []() HWY_ATTR HEED_INLINE_LAMBDA {});
      end(unit - 1);
      for (int i = 0; i < kPrefetches; ++i) prefetch.Some();
    }
    Block::StoreAll(before, W);
    begin(units - 1);
    end(units - 1);
  }

  static constexpr int64_t kPairs = kGroupKeys / 2;
  static constexpr int64_t kWeightHalves = kTerms * kGroupKeys * kTileDepth;  // of P or dS of a block

  static constexpr int64_t RowWords(int64_t depth) { return kTerms * kTileDepth / 2 * O::OutputRows(depth); }
  static uint16_t* WeightsAt(uint16_t* weights, int64_t block, int64_t key) {
    return weights + block * kWeightHalves + key * kTileDepth;
  }

  // The lane of a column of ds_pairs: halves of keys are interleaved within 128 bits.
  static constexpr size_t LaneOf(size_t column) {
    const size_t vector = column / (2 * N), upper = column / N % 2, word = column % N;
    return vector * 2 * N + word / 4 * 8 + upper * 4 + word % 4;
  }

  // Stores the terms of a row of P or dS, with lanes in order.
  static HWY_INLINE void PutRow(const V* x, uint16_t* to, Halves (&split)[kTerms][C / 2]) {
    for (int v = 0; v < C / 2; ++v) {
      V low = x[2 * v], high = x[2 * v + 1];
      for (int i = 0; i < kTerms; ++i) {
        const Halves both = split[i][v] = RoundBoth(low, high);
        hn::Store(both, d16_, to + static_cast<size_t>(i) * kGroupKeys * W + static_cast<size_t>(v) * 2 * N);
        if (i + 1 == kTerms) break;
        const hn::Half<D16> half;
        const V of_low = hs::Widen(d_, BF16(), hn::LowerHalf(half, both));
        const V of_high = hs::Widen(d_, BF16(), hn::UpperHalf(half, both));
        low = hn::IfThenElseZero(hn::IsFinite(of_low), hn::Sub(low, of_low));
        high = hn::IfThenElseZero(hn::IsFinite(of_high), hn::Sub(high, of_high));
      }
    }
  }
  static HWY_INLINE Halves RoundBoth(V low, V high) {
#if HWY_TARGET == HWY_AVX3_SPR
    const hn::Repartition<hwy::bfloat16_t, D> rounded;
    return hn::BitCast(d16_, hn::OrderedDemote2To(rounded, low, high));
#else
    return hn::Combine(d16_, hs::Round(d_, BF16(), high), hs::Round(d_, BF16(), low));
#endif
  }

  // Sets P and dS to zero for keys of the group that no row of a block sees.
  HWY_NOINLINE void Mask(int64_t block, const Interval& keys, bool pairs) {
    if (keys.empty()) return;
    for (int i = 0; i < kTerms; ++i) {
      const uint16_t zero = i == 0 ? O::kMaskedBits : 0;
      for (uint16_t* weights : {b_.p, b_.ds}) {
        uint16_t* at = WeightsAt(weights, block, keys.begin) + i * kGroupKeys * kTileDepth;
        std::fill(at, at + keys.size() * kTileDepth, zero);
      }
      if (!pairs) continue;
      auto* at = reinterpret_cast<uint16_t*>(b_.ds_pairs + i * kPairs * int64_t{W}) + keys.begin * kTileDepth;
      std::fill(at, at + keys.size() * kTileDepth, zero);
    }
  }

  HWY_NOINLINE void QueryGradients() {
    if (seen_.empty()) {
      std::fill(b_.dq, b_.dq + static_cast<int64_t>(num_rows_) * row_, 0.0f);
      return;
    }
    constexpr ptrdiff_t kRow = W * sizeof(uint32_t);
    const Operand<BF16> channels = {b_.key_channels, 0, 0};
    const hs::TileFactor keys = O::ValueTiles(channels, seen_.begin, p_.depth);
    const hs::TileFactor ds = {reinterpret_cast<const char*>(b_.ds_pairs + seen_.begin / 2 * int64_t{W}), 64,
                               kTileRows * kRow, kPairs * kRow, kRow};
    const int64_t tiles = row_ / kTileRows, steps = seen_.size() / kTileDepth;
    if (keys_finite_) {
      hs::MultiplyTiles<Tiles, kProducts, false>(keys, tiles, ds, 2, steps, b_.dq_lanes, W);
    } else {
      O::AddFiniteValues(keys, tiles, ds, steps, /*first=*/true, b_.dq_lanes, W);
    }
    for (int64_t e = 0; e < row_; e += N) {
      for (size_t column = 0; column < W; column += N) {
        V v[N];
        HWY_UNROLL(16)
        for (size_t i = 0; i < N; ++i) {
          v[i] = hn::Load(d_, b_.dq_lanes + (static_cast<size_t>(e) + i) * W + column);
        }
        hs::Transpose(d_, v);
        HWY_UNROLL(16)
        for (size_t i = 0; i < N; ++i) {
          hn::Store(v[i], d_, b_.dq + static_cast<int64_t>(LaneOf(column + i)) * row_ + e);
        }
      }
    }
  }

  // Adds the blocks to the gradients of the group's keys.
  HWY_NOINLINE void KeyGradients() {
    for (int64_t i = 0; i < block_; ++i) {
      Mask(i, {all_seen_.begin, seen_of_[i].begin}, /*pairs=*/false);
      Mask(i, {seen_of_[i].end, all_seen_.end}, /*pairs=*/false);
    }
    const auto add = [&](const uint16_t* weights, const uint32_t* rows, int64_t depth, float* sums) HWY_ATTR {
      const int64_t row = O::OutputRows(depth);
      const hs::TileFactor a = {reinterpret_cast<const char*>(weights + all_seen_.begin * kTileDepth), kTileBytes,
                                kWeightHalves * 2, kGroupKeys * kTileDepth * 2, 64};
      const int64_t term = row / kTileWords * kTileBytes;
      const hs::TileFactor b = {reinterpret_cast<const char*>(rows), kTileBytes, kTerms * term, term, 64};
      hs::MultiplyTiles<Tiles, kProducts, true>(a, all_seen_.size() / kTileRows, b, row / kTileWords, block_,
                                                sums + all_seen_.begin * row, row);
    };
    if (wants_.dv) add(b_.p, b_.d_o_rows, p_.value_depth, b_.dv);
    if (wants_.dk) add(b_.ds, b_.q_rows, p_.depth, b_.dk);
    block_ = 0;
    all_seen_ = {};
  }

  // Adds the elements that RowPairs left out, for the keys that see them.
  HWY_NOINLINE void AddRowsThatAreNotFinite() {
    const auto add = [&](const uint16_t* weights, const void* const* rows, int64_t depth, float* sums) {
      for (size_t lane = 0; lane < num_rows_; ++lane) {
        for (int64_t e = 0; e < depth; ++e) {
          const double x = LoadAsDouble(p_.dtype, rows[lane], e);
          if (std::isfinite(x)) continue;
          for (int64_t key = seen_.begin; key < seen_.end; ++key) {
            const uint16_t bits = weights[key * kTileDepth + static_cast<int64_t>(lane)];
            if (bits == O::kMaskedBits) continue;
            sums[key * O::OutputRows(depth) + e] += O::WidenBits(bits) * static_cast<float>(x);
          }
        }
      }
    };
    if (wants_.dv) add(WeightsAt(b_.p, block_, 0), d_o_, p_.value_depth, b_.dv);
    if (wants_.dk) add(WeightsAt(b_.ds, block_, 0), q_, p_.depth, b_.dk);
  }

  const Problem& p_;
  const Wants& wants_;
  const Interval keys_;
  Buffers& b_;
  const int64_t row_ = Row(p_.depth), value_row_ = Row(p_.value_depth);
  bool keys_finite_ = true, values_finite_ = true, rows_finite_ = true;
  size_t num_rows_ = 0;
  const void *q_[W], *d_o_[W];
  int64_t block_ = 0;   // among the kept blocks
  Interval seen_ = {};  // keys of the group for which this block has P
  Interval seen_of_[kBlocks];
  Interval all_seen_ = {};
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_AMX_GRADIENTS_INL_H_

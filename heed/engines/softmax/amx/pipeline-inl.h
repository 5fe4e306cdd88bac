// A software pipeline over whole tiles of keys: products of some keys overlap the softmax of others.
//
// Compiled once per SIMD target that has AMX or emulates it.
//
// AMX takes 16 cycles per product, in which vector code runs. The softmax takes about as long as all products together,
// so that each would wait for the other if they ran one after the other. A step therefore has
//
//   the logits of unit u (32 keys)                 S = K Q^T
//   the probabilities of unit u - 1                P = 2^(S - m)
//   32 channels of the outputs of keys before it   O += V^T P
//
// with the probabilities of a few pairs of keys between any two products. Outputs are summed over `kUnits` units at a
// time, whose probabilities are in L1 twice: those that are multiplied and those that are computed. A sum is stored
// just before its register is needed again.
//
// Each logit, probability and sum is that of operands-inl.h, bit for bit: the order in time differs, the chains do
// not.
#if defined(HEED_ENGINES_SOFTMAX_AMX_PIPELINE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_AMX_PIPELINE_INL_H_
#undef HEED_ENGINES_SOFTMAX_AMX_PIPELINE_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_AMX_PIPELINE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heed/engines/softmax/block/block-inl.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/simd/amx_products-inl.h"
#include "heed/simd/amx.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

template <class O>
class AmxPipeline {
  using V = typename O::V;
  using Tiles = typename O::Tiles;
  static constexpr int C = O::kMostVectors;
  static constexpr size_t N = hn::MaxLanes(typename O::D()), W = C * N;
  static_assert(W == 2 * kTileWords);
  static constexpr int kKeyProducts = O::kKeyProducts, kValueProducts = O::kValueProducts;
  static constexpr int kPairs = kTileDepth / 2;  // pairs of keys of a unit
  static constexpr size_t kUnitLogits = kTileDepth * W;
  static constexpr size_t kUnitWeights = O::kWeightTerms * kPairs * W;
  static constexpr ptrdiff_t kRow = W * sizeof(float);  // in bytes

 public:
  AmxPipeline(const Workspace<O>& w, const Head<O>& head, int64_t depth, int64_t value_depth, float* outputs)
      : w_(w), head_(head), depth_(depth), value_depth_(value_depth), outputs_(outputs) {}

  // Computes O and `sum` of these keys, a multiple of 32, with shifts m. If begin_tile is not null, begin_tile(key,
  // shift) sets the shifts at the first key of each tile, and returns numbers that are added to the logits, one per key
  // of the tile.
  template <class F>
  HWY_INLINE void Run(const Interval& keys, const V* m, float factor, V* sum, F&& begin_tile) {
    const int64_t products =
        O::Chunks(depth_) * kKeyProducts + O::OutputRows(value_depth_) / kTileDepth * kValueProducts;
    if constexpr (kKeyProducts == 1) {
      if (products <= 4) return RunWith<4>(keys, m, factor, sum, begin_tile);
    }
    if constexpr (kKeyProducts + kValueProducts <= 10) {  // for the fewest channels
      if (products <= 10) return RunWith<2>(keys, m, factor, sum, begin_tile);
    }
    RunWith<1>(keys, m, factor, sum, begin_tile);
  }

 private:
  using KeyBlock = hs::TileBlock<Tiles, kKeyProducts>;
  using ValueBlock = hs::TileBlock<Tiles, kValueProducts>;

  // Calls f(c) for the vectors of the first or the second tile of lanes. c is a constant, so that arrays it indexes
  // stay in registers.
  template <int kHalf, class F>
  static HWY_INLINE void ForVectors(const F& f) {
    f(std::integral_constant<int, kHalf * C / 2>());
    if constexpr (C == 4) f(std::integral_constant<int, kHalf * C / 2 + 1>());
  }

  // The probabilities of a unit, computed in parts: kEach pairs of keys in four calls of Do().
  template <int kEach, bool kOfKeys>
  struct Weights {
    V factor, shift[C], sum[C];
    typename O::Probabilities probabilities;
    const float* of_key = nullptr;  // added to the unit's logits
    const float* s = nullptr;
    uint32_t* p = nullptr;
    int left = 0;  // remaining pairs

    HWY_INLINE Weights(const V* m, float f, const V* sums) : factor(hn::Set(typename O::D(), f)) {
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) {
        shift[c] = m[c];
        sum[c] = sums[c];
      }
    }

    HWY_INLINE void Begin(const float* logits, uint32_t* weights) {
      s = logits;
      p = weights;
      left = kPairs;
    }
    HWY_INLINE void End() {
      while (left > 0) Pair();
    }

    template <int m, int n>
    HWY_INLINE void Do() {
      if (left == 0) return;
      if constexpr (kEach == 4) {
        Pair();
      } else if constexpr (kEach == 2) {
        Half<n>();
        if constexpr (n == 1) Next();
      } else if constexpr (n == 0) {
        Half<m>();
        if constexpr (m == 1) Next();
      }
    }

   private:
    HWY_INLINE void Pair() {
      Half<0>();
      Half<1>();
      Next();
    }
    HWY_INLINE void Next() {
      s += 2 * W;
      p += W;
      if constexpr (kOfKeys) of_key += 2;
      --left;
    }
    // The probability of a pair's first or second key.
    template <int kKey>
    HWY_INLINE V Weight(int c) const {
      const typename O::D d;
      V x = hn::Load(d, s + kKey * W + static_cast<size_t>(c) * N);
      if constexpr (kOfKeys) x = hn::Add(x, hn::Set(d, of_key[kKey]));
      return O::Weight(probabilities, x, shift[c], factor);
    }
    // Computes a pair for the first or the second tile of lanes.
    template <int kHalf>
    HEED_BETWEEN_PRODUCTS void Half() {
      ForVectors<kHalf>([&](auto c) HWY_ATTR HEED_INLINE_LAMBDA {
        const V first = Weight<0>(c.value), second = Weight<1>(c.value);
        sum[c.value] = hn::Add(sum[c.value], hn::Add(first, second));
        O::template StoreTerms<W, kPairs>(probabilities, first, second, p + static_cast<size_t>(c.value) * N);
      });
    }
  };

  // The destination of the sums in registers.
  struct Pending {
    float* out = nullptr;
    template <int m, int n>
    HWY_INLINE void Store() const {
      if (out == nullptr) return;
      Tiles::template Store<KeyBlock::Sum(m, n)>(out + m * kTileRows * W + n * kTileWords, kRow);
    }
    HWY_INLINE void StoreAll() {
      KeyBlock::ForSums([&]<int m, int n>() HWY_ATTR HEED_INLINE_LAMBDA { Store<m, n>(); });
      out = nullptr;
    }
  };

  template <int kEach, class F>
  HWY_NOINLINE void RunWith(const Interval& keys, const V* m, float factor, V* sum, const F& begin_tile) {
    constexpr bool kOfKeys = !std::is_null_pointer_v<F>;
    constexpr int64_t kTileUnits = O::kGrid.tile / kTileDepth;
    const int64_t units = keys.size() / kTileDepth;
    const int64_t groups = O::OutputRows(value_depth_) / kTileDepth;
    // One group of channels per step; several if the probabilities of so many units would not fit.
    const int64_t together = std::clamp<int64_t>(groups, 1, O::kMostUnits / O::kWeightTerms);
    const hs::TileFactor k = O::KeyTiles(head_.keys, keys.begin, depth_), q = O::QueryTiles(w_.queries, W, depth_),
                         v = O::ValueTiles(head_.values, keys.begin, value_depth_);
    Weights<kEach, kOfKeys> weights(m, factor, sum);
    Pending pending;
    const auto weights_of = [&](int64_t unit) HWY_ATTR {
      return w_.weights + static_cast<size_t>(unit % (2 * together)) * kUnitWeights;
    };
    const int64_t blocks = (units + together - 1) / together;
    for (int64_t step = 0; step <= (blocks + 1) * together; ++step) {
      if (step > 0 && step <= units) {
        if constexpr (kOfKeys) {
          if ((step - 1) % kTileUnits == 0) {
            weights.of_key = begin_tile(keys.begin + (step - 1) * kTileDepth, weights.shift);
          }
        }
        weights.Begin(w_.logits + static_cast<size_t>((step - 1) % 2) * kUnitLogits, weights_of(step - 1));
      }
      if (step < units) Logits(k, q, step, weights, pending);
      // Channels of the last units whose probabilities are complete.
      const int64_t place = (step - 1 + together) % together;
      const int64_t first = step - 1 - place - together;
      if (step >= 1 && first >= 0 && first < units) {
        const hs::TileFactor p = {reinterpret_cast<const char*>(weights_of(first)), 64,
                                  static_cast<ptrdiff_t>(kUnitWeights * sizeof(uint32_t)), kPairs * kRow, kRow};
        hs::TileFactor values = v;
        values.data += first * v.step;
        const int64_t count = std::min(together, units - first);
        for (int64_t g = groups * place / together; g < groups * (place + 1) / together; ++g) {
          Values(values, p, 2 * g, count, weights, pending);
        }
      } else {
        pending.StoreAll();
      }
      weights.End();
    }
    pending.StoreAll();
    for (int c = 0; c < C; ++c) sum[c] = weights.sum[c];
  }

  template <class Between>
  HWY_INLINE void Logits(const hs::TileFactor& k, const hs::TileFactor& q, int64_t unit, Between& between,
                         Pending& pending) {
    KeyBlock::Step(
        k, 2 * unit, q, 0, 0,
        [&]<int m, int n>() HWY_ATTR HEED_INLINE_LAMBDA {
          pending.template Store<m, n>();
          Tiles::template Zero<KeyBlock::Sum(m, n)>();
        },
        between);
    const int64_t chunks = O::Chunks(depth_);
    typename KeyBlock::Nothing nothing;
    for (int64_t e = 1; e < chunks; ++e) KeyBlock::Step(k, 2 * unit, q, 0, e, nothing, between);
    pending.out = w_.logits + static_cast<size_t>(unit % 2) * kUnitLogits;
  }

  template <class Between>
  HWY_INLINE void Values(const hs::TileFactor& v, const hs::TileFactor& p, int64_t row, int64_t units, Between& between,
                         Pending& pending) {
    float* out = outputs_ + static_cast<size_t>(row * kTileRows) * W;
    ValueBlock::Step(
        v, row, p, 0, 0,
        [&]<int m, int n>() HWY_ATTR HEED_INLINE_LAMBDA {
          pending.template Store<m, n>();
          Tiles::template Load<ValueBlock::Sum(m, n)>(out + m * kTileRows * W + n * kTileWords, kRow);
        },
        between);
    typename ValueBlock::Nothing nothing;
    for (int64_t u = 1; u < units; ++u) ValueBlock::Step(v, row, p, 0, u, nothing, between);
    pending.out = out;
  }

  const Workspace<O>& w_;
  const Head<O>& head_;
  const int64_t depth_, value_depth_;
  float* const outputs_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_AMX_PIPELINE_INL_H_

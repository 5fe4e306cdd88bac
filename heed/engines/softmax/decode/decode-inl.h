// Exact attention for small M (few query rows, as in decoding): one pass over K and V as they are stored.
//
// Compiled once per SIMD target and dtype. The pass is that of forward-inl.h with other products:
//
//   S[key][row]  = K Q^T    N keys in the lanes of a vector, K transposed in registers
//   O[row][dim]  = O exp(m - m') + P^T V    N channels in the lanes of a vector
//
// All query rows of a key head, up to O::kRows, share each load of K and V. The bound is memory bandwidth: K and V are
// read once. Between the two products the code is vectorised over queries, as in forward-inl.h; at 64 keys it takes a
// tenth of the time of reading them.
//
// Each sum of products is the same chain as in forward-inl.h, so both kernels have the same bits.
#if defined(HEED_ENGINES_SOFTMAX_DECODE_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_DECODE_DECODE_INL_H_
#undef HEED_ENGINES_SOFTMAX_DECODE_DECODE_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_DECODE_DECODE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/forward/tasks-inl.h"
#include "heed/simd/row_tile-inl.h"
#include "hwy/highway.h"
#ifdef HEED_BYTE_PRODUCTS
#include "heed/simd/byte_tile-inl.h"
#endif
#ifdef HEED_AMX
#include "heed/simd/byte_products-inl.h"
#include "heed/simd/emulated_amx-inl.h"
#endif
#if HWY_TARGET == HEED_PAIR_TARGET
#include "heed/simd/pair_row_tile-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// Calls f(std::integral_constant<int, R>) with the smallest R >= num_rows that products are compiled for. Lanes beyond
// the last row are zero.
template <class T, class F>
HWY_INLINE void WithRows(size_t num_rows, const F& f) {
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  if (num_rows <= 1) return f(std::integral_constant<int, 1>());
  if constexpr (N > 2) {
    if (num_rows > 2) {
      if constexpr (N > 4) {
        if (num_rows > 4) return f(std::integral_constant<int, kDecodeRows>());
      }
      return f(std::integral_constant<int, 4>());
    }
  }
  f(std::integral_constant<int, 2>());
}

// Returns rows [begin, end), and the rows up to `until` as the ones to prefetch.
template <class S>
hs::StoredRows<S> Stored(const SourceRows& rows, int64_t begin, int64_t end, int64_t until) {
  const hs::RowCursor<S> cursor = rows.From<S>(begin);
  if (cursor.chosen != nullptr) until = end;
  return {cursor, static_cast<size_t>(end - begin), static_cast<size_t>(std::max<int64_t>(until - end, 0))};
}

// K and V in place, of any storage type, widened to T in registers.
template <class T>
struct DecodeOperands : FmaOperands<T> {
  static constexpr bool kKeysInLanes = true;
  static constexpr size_t kRows = kDecodeRows;

  // Computes s[key][lane] for keys [begin, end).
  static HWY_INLINE void KeyProducts(const T* q, size_t num_rows, const Head<DecodeOperands>& head, int64_t begin,
                                     int64_t end, int64_t until, size_t depth, T* s) {
    hs::WithStorage<T>(head.key_source.dtype, [&](auto stored) HWY_ATTR {
      const auto rows = Stored<decltype(stored)>(head.key_source, begin, end, until);
      WithRows<T>(num_rows, [&](auto r) HWY_ATTR { hs::DotRows<r.value>(hn::ScalableTag<T>(), rows, depth, q, s); });
    });
  }

  // Calls f(the values of keys [begin, end)), whose probabilities are p[key][lane].
  template <class F>
  static HWY_INLINE void WithValues(const Head<DecodeOperands>& head, int64_t begin, int64_t end, int64_t until,
                                    T* /*p*/, const F& f) {
    hs::WithStorage<T>(head.value_source.dtype, [&](auto stored) HWY_ATTR {
      f(Stored<decltype(stored)>(head.value_source, begin, end, until));
    });
  }

  template <bool kSkipMasked, class S>
  static HWY_INLINE void Sum(const hs::StoredRows<S>& rows, size_t channels, const T* p, bool first, const T* factor,
                             size_t num_rows, T* o, ptrdiff_t row) {
    WithRows<T>(num_rows, [&](auto r) HWY_ATTR {
      hs::SumRows<r.value, kSkipMasked>(hn::ScalableTag<T>(), rows, channels, p, first, factor, o, row);
    });
  }
};

#if HWY_TARGET == HEED_PAIR_TARGET
// K and V in place, multiplied by the bf16 dot product.
struct PairDecodeOperands : PairOperands {
  static constexpr bool kKeysInLanes = true;
  static constexpr size_t kRows = kDecodeRows;

  static HWY_INLINE void PackQueries(DType, const void* const* rows, size_t num_rows, size_t depth, double factor,
                                     size_t lanes, uint32_t* HWY_RESTRICT to) {
    PackPairs(rows, num_rows, depth, factor, lanes, to);
  }

  static HWY_INLINE void KeyProducts(const uint32_t* q, size_t num_rows, const Head<PairDecodeOperands>& head,
                                     int64_t begin, int64_t end, int64_t until, size_t depth, float* s) {
    const auto rows = Stored<BF16>(head.key_source, begin, end, until);
    WithRows<float>(num_rows, [&](auto r) HWY_ATTR { hs::DotPairRows<r.value>(D(), rows, depth, q, s); });
  }

  template <class F>
  static HWY_INLINE void WithValues(const Head<PairDecodeOperands>& head, int64_t begin, int64_t end, int64_t until,
                                    float* /*p*/, const F& f) {
    f(Stored<BF16>(head.value_source, begin, end, until));
  }

  template <bool kSkipMasked>
  static HWY_INLINE void Sum(const hs::StoredRows<BF16>& rows, size_t channels, const float* p, bool first,
                             const float* factor, size_t num_rows, float* o, ptrdiff_t row) {
    WithRows<float>(num_rows, [&](auto r) HWY_ATTR {
      hs::SumPairRows<r.value, kSkipMasked>(D(), rows, channels, reinterpret_cast<const uint32_t*>(p), first, factor, o,
                                            row);
    });
  }
};
#endif  // HWY_TARGET == HEED_PAIR_TARGET

// Quantised K and V in place. The scale of a key row multiplies its logits after the product over channels, and the
// scale of a value row multiplies its probabilities before the product over keys. The products have the same size as
// without scales.
struct QuantizedOperands : FmaOperands<float> {
  static constexpr bool kKeysInLanes = true;
  static constexpr size_t kRows = kDecodeRows;
  static constexpr bool kQuantized = true;

  // Returns the lines that the products do not prefetch: those of the last quarter of the next keys, and of the first
  // quarter of their values.
  template <class H>
  static HWY_INLINE LinesBetween Between(const Problem& p, const H& head, const Tile& tile) {
    const int64_t next = std::min(tile.until - tile.keys.end, tile.keys.end - tile.keys.begin);
    if (next < 4) return {};
    const auto keys = Stored<int8_t>(head.key_source, tile.keys.end + next - next / 4, tile.keys.end + next, 0);
    const auto values = Stored<int8_t>(head.value_source, tile.keys.end, tile.keys.end + next / 4, 0);
    if (keys.cursor.chosen != nullptr) return {};
    return {{keys.cursor, keys.count, static_cast<size_t>(p.depth)},
            {values.cursor, values.count, static_cast<size_t>(p.value_depth)},
            static_cast<size_t>(p.depth + p.value_depth + 255) / 256};
  }

  template <class H>
  static HWY_INLINE void KeyProducts(const float* q, size_t num_rows, const H& head, int64_t begin, int64_t end,
                                     int64_t until, size_t depth, float* s) {
    const auto rows = Stored<int8_t>(head.key_source, begin, end, until);
    WithRows<float>(num_rows, [&](auto r) HWY_ATTR { hs::DotRows<r.value>(D(), rows, depth, q, s); });
    ScaleRows(Factors(head.key_scale, begin, end, until), rows.count, s);
  }

  template <class H, class F>
  static HWY_INLINE void WithValues(const H& head, int64_t begin, int64_t end, int64_t until, float* p, const F& f) {
    auto rows = Stored<int8_t>(head.value_source, begin, end, until);
    rows.prefetched = std::min(rows.count, rows.ahead) / 4;
    ScaleRows(Factors(head.value_scale, begin, end, until), rows.count, p);
    f(rows);
  }

  template <bool kSkipMasked>
  static HWY_INLINE void Sum(const hs::StoredRows<int8_t>& rows, size_t channels, const float* p, bool first,
                             const float* factor, size_t num_rows, float* o, ptrdiff_t row) {
    WithRows<float>(num_rows, [&](auto r) HWY_ATTR {
      hs::SumRows<r.value, kSkipMasked>(D(), rows, channels, p, first, factor, o, row);
    });
  }

 protected:
  // Points to the scales of keys [begin, end), and prefetches those of as many keys after them.
  class Factors {
   public:
    HWY_INLINE Factors(const SourceRows& factors, int64_t begin, int64_t end, int64_t until) {
      constexpr size_t kLine = 64 / sizeof(float);
      const auto rows = Stored<float>(factors, begin, end, until);
      const size_t all = rows.count + std::min(rows.count, rows.ahead);
      auto cursor = rows.cursor;
      if (cursor.chosen != nullptr) {
        cursor.TakeChosen(all, at_);
      } else {
        cursor.Take(all, at_);
      }
      for (size_t j = rows.count; j < all; j += kLine) hs::PrefetchToL2(at_[j]);
    }
    HWY_INLINE const float* const* at() const { return at_; }

   private:
    const float* at_[2 * hs::kMostRows];
  };

 private:
  // Multiplies x[key][lane] by the key's scale.
  static HWY_INLINE void ScaleRows(const Factors& factors, size_t count, float* HWY_RESTRICT x) {
    constexpr size_t N = hn::MaxLanes(D());
    for (size_t j = 0; j < count; ++j, x += N) {
      hn::Store(hn::Mul(hn::Load(D(), x), hn::Set(D(), *factors.at()[j])), D(), x);
    }
  }
};

#if defined(HEED_BYTE_PRODUCTS) || defined(HEED_AMX)
// K in place, multiplied as bytes: queries are in fixed point, and the products of keys are exact integers, computed by
// AMX tiles or by vectors.
struct ByteOperands : QuantizedOperands {
  using Query = int32_t;
  static constexpr size_t kLanes = hn::MaxLanes(D());
#ifdef HEED_AMX
  using Tiles = hs::AmxTilesOfTarget;
  static constexpr size_t kRows = kLanes;
  static constexpr hs::DigitLayout Layout(size_t depth, size_t num_rows) { return hs::TileLayout(depth, num_rows); }
#else
  static constexpr hs::DigitLayout Layout(size_t depth, size_t /*num_rows*/) { return hs::ByteLayout(D(), depth); }
#endif

  // Packed queries are the floats of FmaOperands (query per lane), followed by their digits.
  static constexpr int64_t QueryRows(int64_t depth) {
    const hs::DigitLayout layout = Layout(static_cast<size_t>(depth), kLanes);
    return depth + static_cast<int64_t>(layout.Tail() / kLanes + layout.kTailVectors);
  }

  static HWY_INLINE void PackQueries(DType dtype, const void* const* rows, size_t num_rows, size_t depth, double factor,
                                     size_t lanes, int32_t* HWY_RESTRICT to) {
    auto* packed = reinterpret_cast<float*>(to);
    QuantizedOperands::PackQueries(dtype, rows, num_rows, depth, factor, lanes, packed);
    hs::ToDigits(D(), packed, depth, Layout(depth, num_rows), to + depth * lanes);
  }

  template <class H>
  static HWY_INLINE void KeyProducts(const int32_t* q, size_t num_rows, const H& head, int64_t begin, int64_t end,
                                     int64_t until, size_t depth, float* s) {
    const int32_t* digits = q + depth * kLanes;
    const auto rows = Stored<int8_t>(head.key_source, begin, end, until);
    const Factors factors(head.key_scale, begin, end, until);
#ifdef HEED_AMX
    hs::AmxDotRows<Tiles>(D(), rows, depth, num_rows, digits, factors.at(), s);
#else
    WithRows<float>(num_rows,
                    [&](auto r) HWY_ATTR { hs::DotByteRows<r.value>(D(), rows, depth, digits, factors.at(), s); });
#endif
  }

#ifdef HEED_AMX
  template <bool kSkipMasked>
  static HWY_INLINE void Sum(const hs::StoredRows<int8_t>& rows, size_t channels, float* p, bool first,
                             const float* factor, size_t num_rows, float* o, ptrdiff_t row) {
    static_assert(kGrid.tile == 4 * kTileWords);
    if constexpr (kSkipMasked) {
      for (size_t i = 0; i < rows.count * kLanes; i += kLanes) {
        const auto weights = hn::Load(D(), p + i);
        hn::Store(hn::IfNegativeThenElse(weights, hn::Zero(D()), weights), D(), p + i);
      }
    }
    hs::AmxSumRows<Tiles>(D(), rows, channels, p, first, factor, num_rows, o, row);
  }
#endif
};
#endif

// The outputs o[row][channel], each row padded to whole vectors. Factors are given by lane, and lane r is row r.
template <class O>
class RowOutputs {
  using T = typename O::Compute;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr size_t N = hn::MaxLanes(D());

 public:
  RowOutputs(size_t channels, size_t num_rows)
      : channels_(channels), row_((channels + N - 1) / N * N), num_rows_(num_rows) {}

  static int64_t Size(int64_t channels, int64_t num_rows) {
    constexpr auto kLanes = static_cast<int64_t>(N);
    return (channels + kLanes - 1) / kLanes * kLanes * num_rows;
  }

  void Clear(T* o) const { std::fill(o, o + num_rows_ * row_, T{0}); }

  void Copy(const T* from, T* to) const { std::copy(from, from + num_rows_ * row_, to); }

  void CopyRow(const T* from, size_t from_row, T* to, size_t to_row) const {
    T* at = to + to_row * row_;
    if (from == nullptr) {
      std::fill(at, at + row_, T{0});
    } else {
      std::copy(from + from_row * row_, from + (from_row + 1) * row_, at);
    }
  }

  HWY_INLINE void Scale(bool clear, const V* HWY_RESTRICT factor, T* HWY_RESTRICT o) const {
    HWY_ALIGN T f[N];
    hn::Store(factor[0], d_, f);
    for (size_t r = 0; r < num_rows_; ++r) {
      for (size_t e = 0; e < row_; e += N) {
        T* at = o + r * row_ + e;
        hn::Store(clear ? hn::Zero(d_) : hn::Mul(hn::Load(d_, at), hn::Set(d_, f[r])), d_, at);
      }
    }
  }

  HWY_INLINE void Merge(const V* HWY_RESTRICT keep, const V* HWY_RESTRICT add, const T* HWY_RESTRICT o,
                        T* HWY_RESTRICT total) const {
    HWY_ALIGN T keep_row[N], add_row[N];
    hn::Store(keep[0], d_, keep_row);
    hn::Store(add[0], d_, add_row);
    for (size_t r = 0; r < num_rows_; ++r) {
      const V k = hn::Set(d_, keep_row[r]), a = hn::Set(d_, add_row[r]);
      for (size_t e = r * row_; e < (r + 1) * row_; e += N) {
        const V kept = hn::Mul(hn::Load(d_, total + e), k);
        hn::Store(hn::MulAdd(hn::Load(d_, o + e), a, kept), d_, total + e);
      }
    }
  }

  // Does the same as LaneOutputs::AddValues. Defined in decode_parts-inl.h.
  template <int kVectors, bool kSkipMasked>
  HWY_NOINLINE void AddValues(T* p, const Head<O>& head, int64_t begin, int64_t end, int64_t until, bool first,
                              const V* rescale, T* o, RowPrefetch& ahead) const;

  HWY_INLINE V NotFinite(const T* HWY_RESTRICT o, size_t /*lane*/) const {
    HWY_ALIGN T marks[N] = {};
    for (size_t r = 0; r < num_rows_; ++r) {
      V mark = hn::Zero(d_);
      for (size_t e = r * row_; e < (r + 1) * row_; e += N) {
        mark = hn::MulAdd(hn::Load(d_, o + e), hn::Zero(d_), mark);
      }
      marks[r] = hn::ReduceSum(d_, mark);
    }
    return hn::Load(d_, marks);
  }

  template <class S>
  HWY_INLINE void Write(const T* o, const T* factor, S* const* rows, size_t num_rows) const {
    for (size_t r = 0; r < num_rows; ++r) {
      const V scale = hn::Set(d_, factor[r]);
      for (size_t e = 0; e < channels_; e += N) {
        const V x = hn::Mul(hn::Load(d_, o + r * row_ + e), scale);
        hs::StoreRounded(d_, hn::Add(x, hn::Zero(d_)), rows[r] + e, std::min(N, channels_ - e));
      }
    }
  }

 private:
  static constexpr D d_{};
  const size_t channels_, row_, num_rows_;
};

// Query rows of one block.
template <class O>
int64_t DecodeRows() {
  return HWY_MIN(hn::MaxLanes(hn::ScalableTag<typename O::Compute>()), O::kRows);
}

template <class O>
Plan DecodePlan(const Problem& p) {
  Plan plan = MakePlan<O>(p, /*vectors=*/1);
  plan.rows = DecodeRows<O>();
  plan.outputs = RowOutputs<O>::Size(p.value_depth, plan.rows);
  // StreamedTiles() keeps the logits of a whole segment
  if (!O::kQuantized) plan.logits *= O::kGrid.segment / O::kGrid.tile;
  return plan;
}

template <class O>
void Decode(Context& ctx, const Problem& p) {
  const Plan plan = DecodePlan<O>(p);
  ReserveWorkspaces<O>(ctx, plan);
  RunBlocks<O, 1, RowOutputs<O>>(ctx, p, plan);
}

template <class O>
int64_t DecodeWorkspace(const Context& ctx, const Problem& p) {
  return ScratchBytes<O>(p, DecodePlan<O>(p), ctx.num_threads());
}

template <class O>
Passes DecodePasses() {
  return {
      .forward = &Decode<O>, .workspace = &DecodeWorkspace<O>, .lanes = [](const Problem&) { return DecodeRows<O>(); }};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_DECODE_DECODE_INL_H_

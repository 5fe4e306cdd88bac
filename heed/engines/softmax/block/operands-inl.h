// The operand types of the two products of a tile: how they store queries, keys, P and values, and how they multiply.
//
// Compiled once per SIMD target. There is one kernel; operand types are all that differs:
//
//   FmaOperands<T>  queries, keys, values and P in T; one FMA per element and lane. 16-bit tensors are widened
//                   when they are packed or copied.
//   PairOperands    the bf16 dot product: two bf16 per 32-bit word and instruction. Queries and keys are paired
//                   along the depth, so that keys need no copy; P and values are paired along the keys. Tiles of ARM
//                   multiply two words at a time.
//   AmxOperands     bf16 splits of any dtype in AMX tiles; in amx/operands-inl.h.
//
// Sums, maxima and outputs are in T, or f32. Pairs of keys are (2i, 2i + 1), counted from the sequence's first valid
// key; the second is 0 where that key does not exist.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_OPERANDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_OPERANDS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_OPERANDS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_OPERANDS_INL_H_
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/dtype.h"
#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/block/rows-inl.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/row_tile-inl.h"
#include "heed/simd/tile-inl.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"
#if HWY_TARGET == HEED_PAIR_TARGET
#include "heed/simd/pair_tile-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// K or V of one key head as the products read it: rows from key `first` on.
template <class E>
struct Operand {
  const E* data;
  ptrdiff_t stride;
  int64_t first;
};

// Prefetches rows [begin, end) of K or V into L2: those of a long head come from L3 or memory, where hardware
// prefetchers start anew with each page.
template <class E>
HWY_INLINE void PrefetchRows(const Operand<E>& rows, int64_t begin, int64_t end, int64_t depth) {
  for (int64_t i = begin; i < end; ++i) {
    const char* row = reinterpret_cast<const char*>(rows.data + (i - rows.first) * rows.stride);
    for (int64_t at = 0; at < depth * static_cast<int64_t>(sizeof(E)); at += 64) hs::PrefetchToL2(row + at);
  }
}

// K or V of one key head as the caller has it. Row 0 is key 0, at `data` or in page 0.
struct SourceRows {
  const char* data;
  ptrdiff_t stride;  // in elements
  DType dtype;
  const std::byte* const* pages = nullptr;
  int64_t page_tokens = 0, page_offset = 0;  // the offset is in bytes
  const int64_t* tail = nullptr;             // as Sequence::tail
  int64_t tail_begin = 0;

  template <class S>
  const S* At(int64_t key) const {
    if (tail != nullptr && key >= tail_begin) key = tail[key - tail_begin];
    if (pages == nullptr) return reinterpret_cast<const S*>(data) + key * stride;
    return reinterpret_cast<const S*>(pages[key / page_tokens] + page_offset) + key % page_tokens * stride;
  }

  // Returns a cursor over the rows from `key` on.
  template <class S>
  hs::RowCursor<S> From(int64_t key) const {
    if (tail != nullptr && key >= tail_begin) {
      return {reinterpret_cast<const S*>(data),
              stride,
              0,
              pages,
              static_cast<ptrdiff_t>(page_offset),
              static_cast<size_t>(page_tokens),
              tail + (key - tail_begin)};
    }
    if (pages == nullptr) return {At<S>(key), stride, SIZE_MAX};
    return {At<S>(key),
            stride,
            static_cast<size_t>(page_tokens - key % page_tokens),
            pages + key / page_tokens + 1,
            static_cast<ptrdiff_t>(page_offset),
            static_cast<size_t>(page_tokens)};
  }
};

// Lines of the next tile that the products do not prefetch. They are prefetched between the products.
struct LinesBetween {
  hs::LinesAhead<int8_t> keys, values;
  size_t per_key = 0;

  HWY_INLINE void Prefetch() {
    for (size_t i = 0; i < per_key; ++i) {
      if (!keys.PrefetchLine()) values.PrefetchLine();
    }
  }
};

// A factor of the logits, split in two: of_queries is multiplied into the queries as far as that is exact enough,
// of_logits into the logits.
struct LogitFactor {
  double of_queries = 1, of_logits = 1;
};

template <class T>
struct FmaOperands {
  using Compute = T;
  using Query = T;
  using Key = T;
  using Value = T;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;

  static constexpr KeyGrid kGrid = {};
  static constexpr int kKeyStep = 1;              // keys per step of the sum of outputs
  static constexpr bool kFinishesLogits = false;  // LogitFactor::of_logits may differ from 1
  static constexpr bool kKeysInLanes = false;     // N keys per vector in both products, instead of N queries
  static constexpr bool kQuantized = false;       // K and V are int8
  static constexpr bool kUsesAmx = false;         // products use AMX, see amx/operands-inl.h
  static constexpr int kLaneVectors = 1;          // vectors of lanes that a product takes at once
  static constexpr int kMostVectors = hs::kShapes.block_vectors;
  static bool KeysInPlace(DType dtype) { return dtype == DTypeOf<T>::value; }
  static bool ValuesInPlace(DType dtype) { return KeysInPlace(dtype); }
  static constexpr int64_t QueryRows(int64_t depth) { return depth; }
  static constexpr int64_t KeySize(int64_t keys, int64_t depth) { return keys * depth; }
  static constexpr int64_t ValueSize(int64_t keys, int64_t depth) { return keys * depth; }
  static constexpr int64_t OutputRows(int64_t depth) { return depth; }
  static LogitFactor Split(double factor) { return {factor, 1}; }

  static HWY_INLINE void PackQueries(DType dtype, const void* const* rows, size_t num_rows, size_t depth, double factor,
                                     size_t lanes, T* HWY_RESTRICT to) {
    hs::WithStorage<T>(dtype, [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      RowsToLanes(D(), reinterpret_cast<const S* const*>(rows), num_rows, depth, static_cast<T>(factor), lanes, to);
    });
  }

  // Copies keys [begin, end), one row after the other.
  static HWY_INLINE void CopyKeys(const SourceRows& from, int64_t begin, int64_t end, int64_t depth,
                                  T* HWY_RESTRICT to) {
    constexpr size_t N = hn::MaxLanes(D());
    const size_t channels = static_cast<size_t>(depth);
    hs::WithStorage<T>(from.dtype, [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      for (int64_t j = begin; j < end; ++j) {
        const S* HWY_RESTRICT row = from.At<S>(j);
        T* HWY_RESTRICT at = to + (j - begin) * depth;
        if constexpr (sizeof(S) == sizeof(T)) {
          std::memcpy(at, row, channels * sizeof(T));
        } else {
          size_t e = 0;
          for (; e + N <= channels; e += N) {
            hn::StoreU(hs::LoadWide(D(), row + e), D(), at + e);
          }
          if (e < channels) {
            hn::StoreN(hs::LoadWideN(D(), row + e, channels - e), D(), at + e, channels - e);
          }
        }
      }
    });
  }
  static HWY_INLINE void CopyValues(const SourceRows& from, int64_t begin, int64_t end, int64_t depth,
                                    T* HWY_RESTRICT to) {
    CopyKeys(from, begin, end, depth, to);
  }

  template <int R, int C, class F>
  static HWY_INLINE void Logits(const T* HWY_RESTRICT q, size_t lanes, const Operand<T>& k, int64_t key, size_t depth,
                                T* HWY_RESTRICT s, V* HWY_RESTRICT max, const F& f) {
    hs::LogitTile<R, C>(D(), q, lanes, k.data + (key - k.first) * k.stride, k.stride, depth, s, max, f);
  }

  // Stores P of kKeyStep keys as one row of the second product's operand.
  static HWY_INLINE void PutWeights(const V* HWY_RESTRICT p, T* HWY_RESTRICT to) { hn::Store(p[0], D(), to); }

  // Arranges P of kVectors vectors of lanes as Outputs() without kSkipMasked takes it.
  template <int kVectors>
  static HWY_INLINE void ArrangeWeights(T*, size_t, int64_t) {}

  // Adds values times P to channels e to e + R of the outputs `o`, for keys from `key` on.
  template <int R, int C, bool kSkipMasked>
  static HWY_INLINE void Outputs(const T* HWY_RESTRICT p, size_t lanes, const Operand<T>& v, int64_t key,
                                 int64_t num_keys, size_t e, bool first, const V* HWY_RESTRICT rescale,
                                 T* HWY_RESTRICT o) {
    hs::ValueTile<R, C, kSkipMasked>(D(), p, lanes, v.data + (key - v.first) * v.stride + e, v.stride,
                                     static_cast<size_t>(num_keys), first, rescale, o);
  }
};

#if HWY_TARGET == HEED_PAIR_TARGET

struct PairOperands {
  using Compute = float;
  using Query = uint32_t;
  using Key = BF16;
  using Value = uint32_t;
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;

  static constexpr KeyGrid kGrid = kPairGrid;
  static constexpr int kKeyStep = 2;
  static constexpr bool kFinishesLogits = true;
  static constexpr bool kKeysInLanes = false;
  static constexpr bool kQuantized = false;
  static constexpr bool kUsesAmx = false;
  static constexpr int kLaneVectors = 1;
  static constexpr int kMostVectors = hs::kShapes.block_vectors;
  static bool KeysInPlace(DType) { return true; }
  static bool ValuesInPlace(DType) { return false; }
  static constexpr int64_t QueryRows(int64_t depth) { return (depth + 1) / 2; }
  static constexpr int64_t KeySize(int64_t keys, int64_t depth) { return keys * depth; }
  static constexpr int64_t ValueSize(int64_t keys, int64_t depth) { return (keys + 1) / 2 * depth; }
  static constexpr int64_t OutputRows(int64_t depth) { return depth; }

  // Multiplying by a power of two is exact; any other factor would round the bf16 queries a second time.
  static LogitFactor Split(double factor) {
    if (factor == 0 || !std::isfinite(factor)) return {factor, 1};
    const double power = std::exp2(std::floor(std::log2(std::abs(factor))));
    return {power, factor / power};
  }

  static HWY_INLINE void PackQueries(DType, const void* const* rows, size_t num_rows, size_t depth, double factor,
                                     size_t lanes, uint32_t* HWY_RESTRICT to) {
    PackPairs(rows, num_rows, depth, factor, lanes, to);
    hs::ArrangeLanes(D(), to, lanes, (depth + 1) / 2, lanes);
  }
  static HWY_INLINE void PackPairs(const void* const* rows, size_t num_rows, size_t depth, double factor, size_t lanes,
                                   uint32_t* HWY_RESTRICT to) {
    constexpr size_t N = hn::MaxLanes(D());
    const D d;
    const hn::RebindToUnsigned<D> words;
    const hn::Repartition<uint16_t, D> halves;
    const V scale = hn::Set(d, static_cast<float>(factor));
    const auto upper = hn::Set(words, 0xFFFF0000u);
    for (size_t lane = 0; lane < lanes; lane += N) {
      const size_t present = num_rows > lane ? std::min(N, num_rows - lane) : 0;
      for (size_t e = 0; e < depth; e += 2 * N) {
        const size_t channels = std::min(2 * N, depth - e);
        V v[N];
        for (size_t i = 0; i < N; ++i) {
          v[i] = hn::Zero(d);
          if (i >= present) continue;
          const auto* at = static_cast<const uint16_t*>(rows[lane + i]) + e;
          const auto pairs =
              hn::BitCast(words, channels == 2 * N ? hn::LoadU(halves, at) : hn::LoadN(halves, at, channels));
          const auto first = hn::Mul(hn::BitCast(d, hn::ShiftLeft<16>(pairs)), scale);
          const auto second = hn::Mul(hn::BitCast(d, hn::And(pairs, upper)), scale);
          v[i] = hn::BitCast(
              d, hn::Or(hn::ShiftRight<16>(hn::BitCast(words, first)), hn::And(hn::BitCast(words, second), upper)));
        }
        hs::Transpose(d, v);
        for (size_t i = 0; i < (channels + 1) / 2; ++i) {
          hn::Store(hn::BitCast(words, v[i]), words, to + (e / 2 + i) * lanes + lane);
        }
      }
    }
  }

  static HWY_INLINE void CopyKeys(const SourceRows& from, int64_t begin, int64_t end, int64_t depth,
                                  BF16* HWY_RESTRICT to) {
    for (int64_t j = begin; j < end; ++j) {
      std::memcpy(to + (j - begin) * depth, from.At<BF16>(j), static_cast<size_t>(depth) * sizeof(BF16));
    }
  }

  // Copies keys [begin, end) in pairs; `begin` must be the first of a pair.
  static HWY_INLINE void CopyValues(const SourceRows& from, int64_t begin, int64_t end, int64_t depth,
                                    uint32_t* HWY_RESTRICT to) {
    constexpr size_t N = hn::MaxLanes(D());
    const hn::RebindToUnsigned<D> words;
    const hn::Rebind<uint16_t, D> halves;
    const size_t channels = static_cast<size_t>(depth);
    for (int64_t j = begin; j < end; j += 2, to += depth) {
      const auto* first = from.At<uint16_t>(j);
      const auto* second = j + 1 < end ? from.At<uint16_t>(j + 1) : nullptr;
      size_t e = 0;
      for (; second != nullptr && e + N <= channels; e += N) {
        const auto a = hn::PromoteTo(words, hn::LoadU(halves, first + e));
        const auto b = hn::PromoteTo(words, hn::LoadU(halves, second + e));
        hn::StoreU(hn::Or(a, hn::ShiftLeft<16>(b)), words, to + e);
      }
      for (; e < channels; ++e) {
        const uint32_t b = second == nullptr ? 0 : second[e];
        to[e] = first[e] | b << 16;
      }
    }
  }

  template <int R, int C, class F>
  static HWY_INLINE void Logits(const uint32_t* HWY_RESTRICT q, size_t lanes, const Operand<BF16>& k, int64_t key,
                                size_t depth, float* HWY_RESTRICT s, V* HWY_RESTRICT max, const F& f) {
    hs::LogitPairTile<R, C>(D(), q, lanes, k.data + (key - k.first) * k.stride, k.stride, depth, s, max, f);
  }

  static HWY_INLINE void PutWeights(const V* HWY_RESTRICT p, float* HWY_RESTRICT to) {
    hn::Store(hn::BitCast(D(), hs::ToPairs(D(), p[0], p[1])), D(), to);
  }

  template <int kVectors>
  static HWY_INLINE void ArrangeWeights(float* p, size_t lanes, int64_t num_keys) {
    hs::ArrangeLanes(D(), reinterpret_cast<uint32_t*>(p), lanes, static_cast<size_t>((num_keys + 1) / 2),
                     size_t{kVectors} * hn::MaxLanes(D()));
  }

  template <int R, int C, bool kSkipMasked>
  static HWY_INLINE void Outputs(const float* HWY_RESTRICT p, size_t lanes, const Operand<uint32_t>& v, int64_t key,
                                 int64_t num_keys, size_t e, bool first, const V* HWY_RESTRICT rescale,
                                 float* HWY_RESTRICT o) {
    hs::ValuePairTile<R, C, kSkipMasked>(D(), reinterpret_cast<const uint32_t*>(p), lanes,
                                         v.data + (key - v.first) / 2 * v.stride + e, v.stride,
                                         static_cast<size_t>((num_keys + 1) / 2), first, rescale, o);
  }
};

#endif  // HWY_TARGET == HEED_PAIR_TARGET

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_OPERANDS_INL_H_

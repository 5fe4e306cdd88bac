// Packs queries, keys and values into AMX tiles, as bf16 splits.
//
// Compiled in block.cc, once per SIMD target that has AMX or emulates it.
#if defined(HEED_ENGINES_SOFTMAX_AMX_PACKING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_AMX_PACKING_INL_H_
#undef HEED_ENGINES_SOFTMAX_AMX_PACKING_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_AMX_PACKING_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/engines/softmax/block/operands-inl.h"
#include "heed/engines/softmax/amx/operands-inl.h"
#include "heed/simd/amx.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// Prefetches a row that is copied soon, if it is before `end`: rows are too far apart for a hardware prefetcher.
template <class S>
HWY_INLINE void PrefetchSource(const SourceRows& from, int64_t row, int64_t end, int64_t depth) {
  if (row >= end) return;
  const auto* line = reinterpret_cast<const char*>(from.At<S>(row));
  for (const char* last = line + depth * static_cast<int64_t>(sizeof(S)); line < last; line += 64) hwy::Prefetch(line);
}

template <int kOfKeys, int kOfValues, class AmxUnit>
bool AmxOperands<kOfKeys, kOfValues, AmxUnit>::PackQueries(DType dtype, const void* const* rows, size_t num_rows,
                                                           size_t depth, double factor, size_t lanes,
                                                           uint32_t* HWY_RESTRICT to) {
  constexpr size_t N = hn::MaxLanes(D());
  const hn::RebindToUnsigned<D> words;
  const hn::Repartition<uint16_t, D> halves;
  const size_t padded = static_cast<size_t>(Up(static_cast<int64_t>(depth), kTileDepth));
  typename RowSplit::Largest largest;
  RowSplit::WithStorage(dtype, [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    const auto pack = [&]<bool kWhole>(size_t lane, size_t present, size_t e) HWY_ATTR HEED_INLINE_LAMBDA {
      hn::Vec<decltype(words)> v[kTerms][N];
      HWY_UNROLL(16)
      for (size_t i = 0; i < N; ++i) {
        HWY_UNROLL(3)
        for (int p = 0; p < kTerms; ++p) v[p][i] = hn::Zero(words);
        if (!kWhole && i >= present) continue;
        typename RowSplit::Half low[kTerms], high[kTerms];
        const S* row = static_cast<const S*>(rows[lane + i]) + e;
        const size_t left = kWhole ? 2 * N : depth - e, lower = std::min(N, left);
        RowSplit::Load(row, lower, static_cast<float>(factor), low);
        RowSplit::Load(row + lower, std::min(N, left - lower), static_cast<float>(factor), high);
        largest.Add(low[0]);
        largest.Add(high[0]);
        HWY_UNROLL(3)
        for (int p = 0; p < kTerms; ++p) {
          v[p][i] = hn::BitCast(words, hn::Combine(halves, high[p], low[p]));
        }
      }
      HWY_UNROLL(3)
      for (int p = 0; p < kTerms; ++p) {
        hs::Transpose(words, v[p]);
        const size_t first = static_cast<size_t>(p) * padded / 2 + e / 2;
        HWY_UNROLL(16)
        for (size_t i = 0; i < N; ++i) {
          hn::Store(v[p][i], words, to + (first + i) * lanes + lane);
        }
      }
    };
    for (size_t lane = 0; lane < lanes; lane += N) {
      const size_t present = num_rows > lane ? std::min(N, num_rows - lane) : 0;
      for (size_t e = 0; e < padded; e += 2 * N) {
        if (present == N && e + 2 * N <= depth) {
          pack.template operator()<true>(lane, present, e);
        } else {
          pack.template operator()<false>(lane, e < depth ? present : 0, e);
        }
      }
    }
  });
  return largest.IsFinite();
}

template <int kOfKeys, int kOfValues, class AmxUnit>
bool AmxOperands<kOfKeys, kOfValues, AmxUnit>::CopyKeys(const SourceRows& from, int64_t begin, int64_t end,
                                                        int64_t depth, BF16* HWY_RESTRICT to) {
  constexpr int64_t N = hn::MaxLanes(D());
  const hn::Rebind<uint16_t, D> halves;
  const int64_t chunks = Chunks(depth);
  typename RowSplit::Largest largest;
  RowSplit::WithStorage(from.dtype, [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    for (int64_t j = 0; j < Up(end - begin, kTileDepth); ++j) {
      auto* tile = reinterpret_cast<uint16_t*>(to) + j / kTileRows * kTerms * chunks * kTileElements +
                   j % kTileRows * kTileDepth;
      const bool present = begin + j < end;
      const S* row = present ? from.At<S>(begin + j) : nullptr;
      PrefetchSource<S>(from, begin + j + kTileRows, end, depth);
      for (int64_t e = 0; e < chunks * kTileDepth; e += N) {
        typename RowSplit::Half split[kTerms];
        for (int p = 0; p < kTerms; ++p) split[p] = hn::Zero(halves);
        if (present && e < depth) {
          RowSplit::Load(row + e, static_cast<size_t>(std::min(N, depth - e)), 1, split);
          largest.Add(split[0]);
        }
        for (int p = 0; p < kTerms; ++p) {
          hn::Store(split[p], halves, tile + (p * chunks + e / kTileDepth) * kTileElements + e % kTileDepth);
        }
      }
    }
  });
  return largest.IsFinite();
}

template <int kOfKeys, int kOfValues, class AmxUnit>
void AmxOperands<kOfKeys, kOfValues, AmxUnit>::CopyValues(const SourceRows& from, int64_t begin, int64_t end,
                                                          int64_t depth, BF16* HWY_RESTRICT to) {
  constexpr int64_t N = hn::MaxLanes(D());
  const hn::RebindToUnsigned<D> words;
  const hn::Rebind<uint16_t, D> halves;
  const int64_t channels = OutputRows(depth);
  RowSplit::WithStorage(from.dtype, [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    for (int64_t j = begin; j < end; j += 2 * N) {
      auto* tiles = reinterpret_cast<uint32_t*>(to) + (j - begin) / kTileDepth * kTerms * channels * kTileWords +
                    (j - begin) % kTileDepth / 2;
      const S* rows[2 * N];
      for (int64_t i = 0; i < 2 * N; ++i) {
        rows[i] = j + i < end ? from.At<S>(j + i) : nullptr;
        PrefetchSource<S>(from, j + 2 * N + i, end, depth);
      }
      for (int64_t e = 0; e < channels; e += N) {
        hn::Vec<decltype(words)> v[kTerms][N];
        const size_t n = static_cast<size_t>(std::clamp<int64_t>(depth - e, 0, N));
        const auto load = [&](const S* row, typename RowSplit::Half* split) HWY_ATTR {
          for (int p = 0; p < kTerms; ++p) split[p] = hn::Zero(halves);
          if (row != nullptr && n > 0) RowSplit::Load(row + e, n, 1, split);
        };
        for (int64_t i = 0; i < N; ++i) {
          typename RowSplit::Half first[kTerms], second[kTerms];
          load(rows[2 * i], first);
          load(rows[2 * i + 1], second);
          for (int p = 0; p < kTerms; ++p) {
            v[p][i] = hn::Or(hn::PromoteTo(words, first[p]), hn::ShiftLeft<16>(hn::PromoteTo(words, second[p])));
          }
        }
        for (int p = 0; p < kTerms; ++p) {
          hs::Transpose(words, v[p]);
          auto* tile = tiles + (e / kTileRows * kTerms + p) * kTileElements / 2 + e % kTileRows * kTileWords;
          for (int64_t i = 0; i < N; ++i) hn::Store(v[p][i], words, tile + i * kTileWords);
        }
      }
      if constexpr (2 * N < kTileDepth) {  // the rest of a unit, which has no keys
        if (j + 2 * N >= end && (j + 2 * N - begin) % kTileDepth != 0) {
          for (int64_t row = 0; row < kTerms * channels; ++row) {
            hn::StoreU(hn::Zero(words), words, tiles + N + row * kTileWords);
          }
        }
      }
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_AMX_PACKING_INL_H_

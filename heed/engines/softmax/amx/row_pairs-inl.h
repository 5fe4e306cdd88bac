// Rows of queries and output gradients as pairs of bf16, for products that sum over rows.
//
// Compiled once per SIMD target that has AMX or emulates it.
#if defined(HEED_ENGINES_SOFTMAX_AMX_ROW_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_AMX_ROW_PAIRS_INL_H_
#undef HEED_ENGINES_SOFTMAX_AMX_ROW_PAIRS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_AMX_ROW_PAIRS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/engines/softmax/amx/operands-inl.h"
#include "heed/simd/amx.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class O>
class RowPairs {
  using D = typename O::D;
  static constexpr int kTerms = O::kTerms;
  static constexpr size_t N = hn::MaxLanes(D()), W = kTileDepth;

 public:
  RowPairs(DType dtype, size_t num_rows) : dtype_(dtype), num_rows_(num_rows) {}

  // Packs to[term][channel / 16][pair of rows][channel % 16], with zeros for missing rows and for elements that are not
  // finite. Returns whether all are finite.
  HWY_INLINE bool Pack(const void* const* rows, int64_t depth, uint32_t* to) const {
    bool finite = true;
    O::RowSplit::WithStorage(dtype_, [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      finite = PackOf<S, false>(rows, depth, to);
      if (!finite) PackOf<S, true>(rows, depth, to);
    });
    return finite;
  }

 private:
  template <class S, bool kLeaveOut>
  HWY_NOINLINE bool PackOf(const void* const* rows, int64_t depth, uint32_t* to) const {
    const hn::RebindToUnsigned<D> words;
    const hn::Rebind<uint16_t, D> halves;
    const auto exponent = hn::Set(halves, uint16_t{0x7F80});
    const int64_t channels = O::OutputRows(depth);
    typename O::RowSplit::Largest largest;
    const auto load = [&](const S* row, size_t n, typename O::RowSplit::Half* split) HWY_ATTR HEED_INLINE_LAMBDA {
      O::RowSplit::Load(row, n, 1, split);
      largest.Add(split[0]);
      if constexpr (kLeaveOut) {
        const auto finite = hn::Ne(hn::And(split[0], exponent), exponent);
        split[0] = hn::IfThenElseZero(finite, split[0]);
      }
    };
    const auto store = [&](const typename O::RowSplit::Half* first, const typename O::RowSplit::Half* second,
                           size_t lane, int64_t e) HWY_ATTR HEED_INLINE_LAMBDA {
      HWY_UNROLL(3)
      for (int p = 0; p < kTerms; ++p) {
        hn::Store(hn::Or(hn::PromoteTo(words, first[p]), hn::ShiftLeft<16>(hn::PromoteTo(words, second[p]))), words,
                  to + p * kTileRows * channels + e / kTileWords * kTileRows * kTileWords +
                      static_cast<int64_t>(lane) / 2 * kTileWords + e % kTileWords);
      }
    };
    typename O::RowSplit::Half first[kTerms], second[kTerms];
    for (size_t lane = 0; lane < W; lane += 2) {
      const S* row[2] = {};
      for (size_t i = 0; i < 2 && lane + i < num_rows_; ++i) {
        row[i] = static_cast<const S*>(rows[lane + i]);
      }
      int64_t e = 0;
      for (; row[1] != nullptr && e + int64_t{N} <= depth; e += N) {
        load(row[0] + e, N, first);
        load(row[1] + e, N, second);
        store(first, second, lane, e);
      }
      for (; e < channels; e += N) {
        const size_t n = static_cast<size_t>(std::clamp<int64_t>(depth - e, 0, N));
        for (int p = 0; p < kTerms; ++p) first[p] = second[p] = hn::Zero(halves);
        if (row[0] != nullptr && n > 0) load(row[0] + e, n, first);
        if (row[1] != nullptr && n > 0) load(row[1] + e, n, second);
        store(first, second, lane, e);
      }
    }
    return largest.IsFinite();
  }

  const DType dtype_;
  const size_t num_rows_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_AMX_ROW_PAIRS_INL_H_

// The un-normalised outputs of a block, with a query per lane.
//
// Compiled once per SIMD target, operand type and number of vectors.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_OUTPUTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_OUTPUTS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_OUTPUTS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_OUTPUTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/engines/softmax/block/block-inl.h"
#include "heed/engines/softmax/block/rows-inl.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// Outputs o[channel][lane] of C vectors of query rows. Factors are given by lane.
template <class O, int C>
class LaneOutputs {
  using T = typename O::Compute;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr size_t N = hn::MaxLanes(D());
  static constexpr size_t W = C * N;

 public:
  LaneOutputs(size_t channels, size_t /*num_rows*/) : channels_(channels) {}

  // Returns the number of elements of a block of `lanes` rows.
  static int64_t Size(int64_t channels, int64_t lanes) { return channels * lanes; }

  void Clear(T* o) const { std::fill(o, o + channels_ * W, T{0}); }

  void Copy(const T* from, T* to) const { std::copy(from, from + channels_ * W, to); }

  // Copies row `from_lane` of one block to row `to_lane` of another; with null `from`, zeros.
  void CopyRow(const T* from, size_t from_lane, T* to, size_t to_lane) const {
    for (size_t e = 0; e < channels_; ++e) {
      to[e * W + to_lane] = from == nullptr ? T{0} : from[e * W + from_lane];
    }
  }

  // Multiplies o by factor, or clears it.
  HWY_INLINE void Scale(bool clear, const V* HWY_RESTRICT factor, T* HWY_RESTRICT o) const {
    for (size_t e = 0; e < channels_; ++e) {
      for (int c = 0; c < C; ++c) {
        T* at = o + e * W + static_cast<size_t>(c) * N;
        hn::Store(clear ? hn::Zero(d_) : hn::Mul(hn::Load(d_, at), factor[c]), d_, at);
      }
    }
  }

  // Computes total = total keep + o add.
  HWY_INLINE void Merge(const V* HWY_RESTRICT keep, const V* HWY_RESTRICT add, const T* HWY_RESTRICT o,
                        T* HWY_RESTRICT total) const {
    for (size_t e = 0; e < channels_; ++e) {
      for (int c = 0; c < C; ++c) {
        const size_t at = e * W + static_cast<size_t>(c) * N;
        const V kept = hn::Mul(hn::Load(d_, total + at), keep[c]);
        hn::Store(hn::MulAdd(hn::Load(d_, o + at), add[c], kept), d_, total + at);
      }
    }
  }

  // Computes o = o rescale + sum_j p[j] v_j over keys [begin, end) for the kVectors vectors of rows that p and o point
  // to, starting from 0 if `first`, and may arrange p otherwise. Keys up to `until` come next and may be prefetched.
  template <int kVectors, bool kSkipMasked>
  HWY_INLINE void AddValues(T* p, const Head<O>& head, int64_t begin, int64_t end, int64_t until, bool first,
                            const V* rescale, T* o, RowPrefetch& ahead) const {
    if constexpr (!kSkipMasked) O::template ArrangeWeights<kVectors>(p, W, end - begin);
    hs::ForTiles<hs::TileRows<kVectors>()>(0, channels_, [&](auto rows, size_t e) HWY_ATTR {
      ahead.Some();
      if (head.PrefetchesTiles()) {  // a share of the next tile's rows
        const auto share = [&](size_t channel) {
          return end + (end - begin) * static_cast<int64_t>(channel) / static_cast<int64_t>(channels_);
        };
        PrefetchRows(head.values, share(e), std::min(share(e + size_t{rows.value}), until),
                     static_cast<int64_t>(channels_));
      }
      O::template Outputs<rows.value, kVectors, kSkipMasked>(p, W, head.values, begin, end - begin, e, first, rescale,
                                                             o + e * W);
    });
  }

  // Returns NaN in each of the N lanes from `lane` on whose row has an output that is not finite, else 0.
  HWY_INLINE V NotFinite(const T* HWY_RESTRICT o, size_t lane) const {
    constexpr size_t kChains = 4;
    V marks[kChains];
    for (V& chain : marks) chain = hn::Zero(d_);
    size_t e = 0;
    for (; e + kChains <= channels_; e += kChains) {
      HWY_UNROLL(4)
      for (size_t i = 0; i < kChains; ++i) {
        marks[i] = hn::MulAdd(hn::Load(d_, o + (e + i) * W + lane), hn::Zero(d_), marks[i]);
      }
    }
    for (; e < channels_; ++e) marks[0] = hn::MulAdd(hn::Load(d_, o + e * W + lane), hn::Zero(d_), marks[0]);
    return hn::Add(hn::Add(marks[0], marks[1]), hn::Add(marks[2], marks[3]));
  }

  // Stores rows[lane][e] = factor[lane] o, rounded.
  template <class S>
  HWY_INLINE void Write(const T* o, const T* factor, S* const* rows, size_t num_rows) const {
    LanesToRows(d_, o, W, channels_, factor, rows, num_rows);
  }

 private:
  static constexpr D d_{};
  const size_t channels_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_OUTPUTS_INL_H_

// The parts of small-M blocks (decode-inl.h) that all passes over them share.
//
// Compiled once per SIMD target and operand type, in the decode units, like block_parts-inl.h.
#if defined(HEED_ENGINES_SOFTMAX_DECODE_DECODE_PARTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_DECODE_DECODE_PARTS_INL_H_
#undef HEED_ENGINES_SOFTMAX_DECODE_DECODE_PARTS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_DECODE_DECODE_PARTS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "heed/engines/softmax/block/block_parts-inl.h"
#include "heed/engines/softmax/decode/decode-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class O>
template <int kVectors, bool kSkipMasked>
void RowOutputs<O>::AddValues(T* p, const Head<O>& head, int64_t begin, int64_t end, int64_t until, bool first,
                              const V* rescale, T* o, RowPrefetch& /*ahead*/) const {
  HWY_ALIGN T factor[N];
  hn::Store(rescale[0], d_, factor);
  O::WithValues(head, begin, end, until, p, [&](const auto& rows) HWY_ATTR {
    O::template Sum<kSkipMasked>(rows, channels_, p, first, factor, num_rows_, o, static_cast<ptrdiff_t>(row_));
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#ifndef HEED_COMPILE_ROWS
#define HEED_COMPILE_VALUES(O, SKIPS)                                                                            \
  template void RowOutputs<O>::AddValues<1, SKIPS>(O::Compute*, const Head<O>&, int64_t, int64_t, int64_t, bool, \
                                                   const hn::Vec<O::D>*, O::Compute*, RowPrefetch&) const;
#define HEED_COMPILE_ROWS(O)             \
  HEED_COMPILE_HEAD(O)                   \
  HEED_COMPILE_PASS(O, 1, RowOutputs<O>) \
  HEED_COMPILE_VALUES(O, false)          \
  HEED_COMPILE_VALUES(O, true)
#define HEED_COMPILE_STREAMED_ROWS(O) \
  HEED_COMPILE_ROWS(O)                \
  template void SegmentPass<O, 1, RowOutputs<O>>::StreamedTiles(const Tile&, bool, hn::Vec<O::D>*, hn::Vec<O::D>*);
#endif  // HEED_COMPILE_ROWS

#endif  // HEED_ENGINES_SOFTMAX_DECODE_DECODE_PARTS_INL_H_

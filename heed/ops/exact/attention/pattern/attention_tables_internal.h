// Tables of rows in the accumulation dtype, for calls that run in several parts.
#ifndef HEED_OPS_EXACT_ATTENTION_PATTERN_ATTENTION_TABLES_INTERNAL_H_
#define HEED_OPS_EXACT_ATTENTION_PATTERN_ATTENTION_TABLES_INTERNAL_H_

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "heed/core/carver.h"
#include "heed/core/dtype.h"
#include "heed/engines/softmax/problem.h"

namespace heed::attention {

// Tokens of a tensor over all sequences, and batch entries that hold as many each: one in a packed call.
struct Extent {
  int64_t batches = 0, tokens = 0;
};

inline Extent ExtentOf(const softmax::Problem& p, int64_t softmax::Sequence::* first,
                       int64_t softmax::Sequence::* count) {
  Extent extent = {1, 0};
  for (const softmax::Sequence& s : p.sequences) extent.tokens = std::max(extent.tokens, s.*first + s.*count);
  if (!p.packed) extent.batches = std::ssize(p.sequences);
  return extent;
}
inline Extent QueriesOf(const softmax::Problem& p) {
  return ExtentOf(p, &softmax::Sequence::first_q, &softmax::Sequence::num_queries);
}
inline Extent KeysOf(const softmax::Problem& p) {
  return ExtentOf(p, &softmax::Sequence::first_k, &softmax::Sequence::num_keys);
}

template <class T>
softmax::Rows Table(Carver& carver, const Extent& extent, int64_t heads, int64_t depth) {
  T* data;
  carver.Next(data, extent.batches * extent.tokens * heads * depth);
  return {data, extent.batches == 1 ? 0 : extent.tokens * heads * depth, heads * depth, depth};
}

template <class T>
T* At(const softmax::Rows& rows, int64_t batch, int64_t token, int64_t head) {
  return static_cast<T*>(const_cast<void*>(rows.data)) + batch * rows.batch_stride + token * rows.token_stride +
         head * rows.head_stride;
}

// Stores a row, rounded once.
template <class T>
void Store(DType dtype, const T* from, int64_t count, const softmax::Rows& rows, int64_t batch, int64_t token,
           int64_t head) {
  const auto put = [&](auto* to, const auto& convert) {
    for (int64_t e = 0; e < count; ++e) to[e] = convert(from[e]);
  };
  switch (dtype) {
    case DType::kBF16:
      return put(At<BF16>(rows, batch, token, head), [](T x) { return ToBF16(static_cast<float>(x)); });
    case DType::kF16: return put(At<F16>(rows, batch, token, head), [](T x) { return ToF16(static_cast<float>(x)); });
    default: return put(At<T>(rows, batch, token, head), [](T x) { return x; });
  }
}

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_PATTERN_ATTENTION_TABLES_INTERNAL_H_

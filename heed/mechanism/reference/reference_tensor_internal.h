// Element access for references, in double.
#ifndef HEED_MECHANISM_REFERENCE_REFERENCE_TENSOR_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_REFERENCE_TENSOR_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/core/tensor.h"

namespace heed::mechanism {

using Index = std::initializer_list<int64_t>;

// A reference assumes the shapes of its tensors by its indices, independent of a kernel's table, so it checks ranks
// itself.
inline void RequireRank(const ConstTensorView& t, size_t rank) {
  if (static_cast<size_t>(t.rank()) == rank) return;
  throw InvalidArgument("reference: a tensor " + (t.present() ? "has shape " + t.ShapeString() : "is absent") +
                        ", expected rank " + std::to_string(rank));
}

inline int64_t OffsetOf(const ConstTensorView& t, Index index) {
  RequireRank(t, index.size());
  int64_t at = 0;
  int axis = 0;
  for (const int64_t i : index) at += i * t.stride(axis++);
  return at;
}

inline double At(const ConstTensorView& t, Index index) {
  return LoadAsDouble(t.dtype(), t.data(), OffsetOf(t, index));
}

// The tokens begin <= t < end of one sequence.
struct ReferenceSequence {
  int64_t batch, begin, end;
};

// The sequences of a call of B times T tokens: each of `cu_seqlens`, or starts[b] <= t < lengths[b].
template <class Options>
std::vector<ReferenceSequence> SequencesOf(const Options& options, int64_t B, int64_t T) {
  const auto integer = [](const ConstTensorView& t, int64_t i) -> int64_t {
    const int64_t at = OffsetOf(t, {i});
    if (t.dtype() == DType::kI32) return static_cast<const int32_t*>(t.data())[at];
    return static_cast<const int64_t*>(t.data())[at];
  };
  std::vector<ReferenceSequence> sequences;
  if (options.cu_seqlens.present()) {
    for (int64_t i = 0; i + 1 < options.cu_seqlens.size(0); ++i) {
      sequences.push_back({0, integer(options.cu_seqlens, i), integer(options.cu_seqlens, i + 1)});
    }
    return sequences;
  }
  for (int64_t b = 0; b < B; ++b) {
    const int64_t end = options.lengths.present() ? integer(options.lengths, b) : T;
    const int64_t begin = options.starts.present() ? integer(options.starts, b) : 0;
    sequences.push_back({b, begin < end ? begin : end, end});
  }
  return sequences;
}

inline void Put(const TensorView& t, Index index, double value) {
  if (t.present()) StoreDouble(t.dtype(), t.data(), OffsetOf(t, index), value);
}

inline void Add(const TensorView& t, Index index, double value) {
  if (t.present()) Put(t, index, At(t, index) + value);
}

inline void Clear(const TensorView& t) {
  if (!t.present()) return;
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    int64_t rest = i, at = 0;
    for (int axis = t.rank() - 1; axis >= 0; --axis) {
      at += rest % t.size(axis) * t.stride(axis);
      rest /= t.size(axis);
    }
    StoreDouble(t.dtype(), t.data(), at, 0);
  }
}

// Row-major doubles with a shape, initially zero.
struct ReferenceTensor {
  std::vector<double> values;
  std::vector<int64_t> sizes;

  explicit ReferenceTensor(std::vector<int64_t> shape) : sizes(std::move(shape)) {
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    values.resize(static_cast<size_t>(count));
  }
  TensorView view() { return TensorView(values.data(), DType::kF64, sizes); }
  ConstTensorView view() const { return ConstTensorView(values.data(), DType::kF64, sizes); }
};

// The elements of a tensor rounded to the accumulation dtype, f64 or f32, to which rounding errors are relative.
struct RoundedTensor {
  std::vector<float> values;
  ConstTensorView view;

  RoundedTensor(const ReferenceTensor& t, DType dtype)
      : values(t.values.begin(), t.values.end()),
        view(dtype == DType::kF64 ? t.view() : ConstTensorView(values.data(), DType::kF32, t.sizes)) {}
};

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_REFERENCE_REFERENCE_TENSOR_INTERNAL_H_

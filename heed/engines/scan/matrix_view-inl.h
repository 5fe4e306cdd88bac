// Matrices in memory, and their copies with rows that are contiguous and widened.
//
// Compiled once per SIMD target. A copy has a row of `width` elements of the compute type per token (or per state, or
// per channel). If columns are contiguous in memory, rows are loaded; if rows are, squares of as many rows and columns
// as a vector has lanes are transposed in registers.
#if defined(HEED_ENGINES_SCAN_MATRIX_VIEW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_MATRIX_VIEW_INL_H_
#undef HEED_ENGINES_SCAN_MATRIX_VIEW_INL_H_
#else
#define HEED_ENGINES_SCAN_MATRIX_VIEW_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "heed/engines/scan/problem.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/strided-inl.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

template <class T>
constexpr size_t Lanes() {
  return hn::MaxLanes(hn::ScalableTag<T>());
}

// Channels per column block. More would not fit L1, and with fewer B and C would be prepared more often.
template <class T>
constexpr size_t BlockWidth() {
  return 4 * Lanes<T>();
}

template <class T>
constexpr size_t RoundedUp(size_t columns) {
  return (columns + Lanes<T>() - 1) / Lanes<T>() * Lanes<T>();
}

// A matrix in memory. Strides count elements.
struct MatrixView {
  const void* data;
  DType dtype;
  int64_t row_stride, column_stride;
  size_t rows, columns;

  int64_t At(size_t r, size_t c) const {
    return static_cast<int64_t>(r) * row_stride + static_cast<int64_t>(c) * column_stride;
  }
  // True if rows are contiguous and columns are not.
  bool is_transposed() const { return column_stride != 1 && columns > 1 && rows > 1 && std::abs(row_stride) == 1; }
};

// The view of tokens [begin, begin + rows) of a sequence, and of columns from `column` on.
inline MatrixView ViewOf(const Tokens& x, const Sequence& s, int64_t begin, size_t rows, int64_t group, int64_t column,
                         size_t columns) {
  const int64_t at = s.batch * x.batch + (s.first + begin) * x.token + group * x.group + column * x.column;
  const char* data = static_cast<const char*>(x.data);
  return {data + at * static_cast<int64_t>(SizeOf(x.dtype)), x.dtype, x.token, x.column, rows, columns};
}

// The view of all states of these channels, or of constants, whose `sequence` is 0.
inline MatrixView ViewOf(const Numbers& x, int64_t sequence, size_t states, int64_t channel, size_t channels) {
  const int64_t at = sequence * x.sequence + channel * x.channel;
  const char* data = static_cast<const char*>(x.data);
  return {data + at * static_cast<int64_t>(SizeOf(x.dtype)), x.dtype, x.state, x.channel, states, channels};
}

// True if kernels widen this dtype to T. Constants may have other dtypes too.
template <class T>
bool Widens(DType dtype) {
  return sizeof(T) == 8 ? dtype == DType::kF64 : dtype != DType::kF64;
}

// Loads the view's rows, widened, with zeros up to whole vectors.
template <class T>
HWY_NOINLINE HWY_ATTR void LoadRows(const MatrixView& view, T* HWY_RESTRICT to, size_t width) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = Lanes<T>();
  if (!Widens<T>(view.dtype)) {
    for (size_t i = 0; i < view.rows * RoundedUp<T>(view.columns); ++i) {
      const size_t r = i / RoundedUp<T>(view.columns), c = i % RoundedUp<T>(view.columns);
      to[r * width + c] = c < view.columns ? static_cast<T>(LoadAsDouble(view.dtype, view.data, view.At(r, c))) : T{0};
    }
    return;
  }
  hs::WithStorage<T>(view.dtype, [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    const S* from = static_cast<const S*>(view.data);
    if (view.column_stride == 1 && view.columns == BlockWidth<T>()) {
      for (size_t r = 0; r < view.rows; ++r, from += view.row_stride) {
        for (size_t c = 0; c < BlockWidth<T>(); c += N) {
          hn::StoreU(hs::LoadWide(d, from + c), d, to + r * width + c);
        }
      }
      return;
    }
    if (!view.is_transposed()) {
      for (size_t r = 0; r < view.rows; ++r) {
        for (size_t c = 0; c < view.columns; c += N) {
          hn::StoreU(hs::LoadStrided(d, from + view.At(r, c), view.column_stride, HWY_MIN(N, view.columns - c)), d,
                     to + r * width + c);
        }
      }
      return;
    }
    for (size_t c = 0; c < view.columns; c += N) {
      const size_t columns = HWY_MIN(N, view.columns - c);
      for (size_t r = 0; r < view.rows; r += N) {
        const size_t rows = HWY_MIN(N, view.rows - r);
        hn::Vec<decltype(d)> v[N];
        if (columns == N && rows == N && view.row_stride == 1) {
          const S* column = from + view.At(r, c);
          for (size_t i = 0; i < N; ++i, column += view.column_stride) {
            v[i] = hs::LoadWide(d, column);
          }
          hs::Transpose(d, v);
          for (size_t i = 0; i < N; ++i) hn::StoreU(v[i], d, to + (r + i) * width + c);
          continue;
        }
        for (size_t i = 0; i < N; ++i) {
          v[i] = i >= columns ? hn::Zero(d) : hs::LoadStrided(d, from + view.At(r, c + i), view.row_stride, rows);
        }
        hs::Transpose(d, v);
        for (size_t i = 0; i < rows; ++i) hn::StoreU(v[i], d, to + (r + i) * width + c);
      }
    }
  });
}

// Stores rows to the view, rounded.
template <class T>
HWY_NOINLINE HWY_ATTR void StoreRows(const T* HWY_RESTRICT from, size_t width, const MatrixView& view) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = Lanes<T>();
  hs::WithStorage<T>(view.dtype, [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    S* to = static_cast<S*>(const_cast<void*>(view.data));
    if (view.column_stride == 1 && view.columns == BlockWidth<T>()) {
      for (size_t r = 0; r < view.rows; ++r, to += view.row_stride) {
        for (size_t c = 0; c < BlockWidth<T>(); c += N) {
          hs::StoreRounded(d, hn::LoadU(d, from + r * width + c), to + c, N);
        }
      }
      return;
    }
    if (!view.is_transposed()) {
      for (size_t r = 0; r < view.rows; ++r) {
        for (size_t c = 0; c < view.columns; c += N) {
          hs::StoreStrided(d, hn::LoadU(d, from + r * width + c), to + view.At(r, c), view.column_stride,
                           HWY_MIN(N, view.columns - c));
        }
      }
      return;
    }
    for (size_t c = 0; c < view.columns; c += N) {
      const size_t columns = HWY_MIN(N, view.columns - c);
      for (size_t r = 0; r < view.rows; r += N) {
        const size_t rows = HWY_MIN(N, view.rows - r);
        hn::Vec<decltype(d)> v[N];
        if (columns == N && rows == N && view.row_stride == 1) {
          for (size_t i = 0; i < N; ++i) v[i] = hn::LoadU(d, from + (r + i) * width + c);
          hs::Transpose(d, v);
          S* column = to + view.At(r, c);
          for (size_t i = 0; i < N; ++i, column += view.column_stride) {
            hs::StoreRounded(d, v[i], column, N);
          }
          continue;
        }
        for (size_t i = 0; i < N; ++i) {
          v[i] = i < rows ? hn::LoadU(d, from + (r + i) * width + c) : hn::Zero(d);
        }
        hs::Transpose(d, v);
        for (size_t i = 0; i < columns; ++i) {
          hs::StoreStrided(d, v[i], to + view.At(r, c + i), view.row_stride, rows);
        }
      }
    }
  });
}

// elementwise.cc instantiates both, for all files of the engine.
#ifndef HEED_ROW_COPIES_OF
#define HEED_ROW_COPIES_OF(EXTERN, T)                           \
  EXTERN template void LoadRows(const MatrixView&, T*, size_t); \
  EXTERN template void StoreRows(const T*, size_t, const MatrixView&);
#endif
HEED_ROW_COPIES_OF(extern, float)
HEED_ROW_COPIES_OF(extern, double)

// Sets rows to zero, up to whole vectors.
template <class T>
HWY_INLINE void ClearRows(T* to, size_t width, size_t rows, size_t columns) {
  const hn::ScalableTag<T> d;
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < columns; c += Lanes<T>()) hn::Store(hn::Zero(d), d, to + r * width + c);
  }
}

// The cache lines of a tensor's next tile, which are prefetched one at a time during the computation of the current
// tile. The rows of a column block are kilobytes apart, which hardware prefetchers do not follow.
class NextLines {
 public:
  NextLines() = default;
  // The lines that LoadRows() will access; none for an absent tensor.
  NextLines(const MatrixView& view, size_t lanes) {
    if (view.data == nullptr) return;
    const auto size = static_cast<int64_t>(SizeOf(view.dtype));
    at_ = static_cast<const char*>(view.data);
    // There is a line per channel, or one per token and vector.
    step_ = (view.is_transposed() ? view.column_stride : view.row_stride) * size;
    vector_ = view.column_stride * size * static_cast<int64_t>(lanes);
    if (view.is_transposed() && view.row_stride < 0) {
      at_ += static_cast<int64_t>(view.rows - 1) * view.row_stride * size;
    }
  }
  // Prefetches line `i` of vector `v`.
  HWY_INLINE void Prefetch(size_t v, int64_t i) const {
    if (at_ != nullptr) hwy::Prefetch(at_ + static_cast<int64_t>(v) * vector_ + i * step_);
  }

 private:
  const char* at_ = nullptr;
  int64_t step_ = 0, vector_ = 0;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_MATRIX_VIEW_INL_H_

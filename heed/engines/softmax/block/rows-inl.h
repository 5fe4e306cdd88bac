// Transposes between rows and lanes: queries, biases and masks in, outputs out.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_ROWS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_ROWS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// Stores to[e][lane] = factor * rows[lane][e], widened. Lanes beyond num_rows become 0.
template <class D, class S, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void RowsToLanes(D d, const S* const* HWY_RESTRICT rows, size_t num_rows, size_t depth, T factor,
                            size_t stride, T* HWY_RESTRICT to) {
  constexpr size_t N = hn::MaxLanes(D());
  const V scale = hn::Set(d, factor);
  for (size_t lane = 0; lane < stride; lane += N) {
    const size_t present = num_rows > lane ? std::min(N, num_rows - lane) : 0;
    for (size_t e = 0; e < depth; e += N) {
      const size_t columns = std::min(N, depth - e);
      V v[N];
      if (present == N && columns == N) {  // in registers
        HWY_UNROLL(32)
        for (size_t i = 0; i < N; ++i) {
          v[i] = hn::Mul(hs::LoadWide(d, rows[lane + i] + e), scale);
        }
        hs::Transpose(d, v);
        HWY_UNROLL(32)
        for (size_t i = 0; i < N; ++i) {
          hn::Store(v[i], d, to + (e + i) * stride + lane);
        }
        continue;
      }
      for (size_t i = 0; i < N; ++i) {
        v[i] = i >= present ? hn::Zero(d) : hn::Mul(hs::LoadWideN(d, rows[lane + i] + e, columns), scale);
      }
      hs::Transpose(d, v);
      for (size_t i = 0; i < columns; ++i) {
        hn::Store(v[i], d, to + (e + i) * stride + lane);
      }
    }
  }
}

// Stores rows[lane][e] = factor[lane] * from[e][lane] + 0, rounded. Adding 0 turns -0 into +0, so that the sign of an
// underflowed sum does not depend on masked keys.
template <class D, class S, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void LanesToRows(D d, const T* HWY_RESTRICT from, size_t stride, size_t depth, const T* HWY_RESTRICT factor,
                            S* const* HWY_RESTRICT rows, size_t num_rows) {
  constexpr size_t N = hn::MaxLanes(D());
  for (size_t lane = 0; lane < num_rows; lane += N) {
    const size_t present = std::min(N, num_rows - lane);
    const V scale = hn::Load(d, factor + lane);
    for (size_t e = 0; e < depth; e += N) {
      const size_t columns = std::min(N, depth - e);
      V v[N];
      const auto scaled = [&](size_t i) HWY_ATTR {
        return hn::Add(hn::Mul(hn::Load(d, from + (e + i) * stride + lane), scale), hn::Zero(d));
      };
      if (present == N && columns == N) {  // in registers
        HWY_UNROLL(32)
        for (size_t i = 0; i < N; ++i) v[i] = scaled(i);
        hs::Transpose(d, v);
        HWY_UNROLL(32)
        for (size_t i = 0; i < N; ++i) hs::StoreRounded(d, v[i], rows[lane + i] + e, N);
        continue;
      }
      for (size_t i = 0; i < N; ++i) v[i] = i < columns ? scaled(i) : hn::Zero(d);
      hs::Transpose(d, v);
      for (size_t i = 0; i < present; ++i) {
        hs::StoreRounded(d, v[i], rows[lane + i] + e, columns);
      }
    }
  }
}

// Stores rows[lane][e] = from[e][lane] unchanged, in rows padded to whole vectors.
template <class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void LanesToWholeRows(D d, const T* HWY_RESTRICT from, size_t stride, size_t depth,
                                 T* const* HWY_RESTRICT rows, size_t num_rows) {
  constexpr size_t N = hn::MaxLanes(D());
  for (size_t lane = 0; lane < num_rows; lane += N) {
    const size_t present = std::min(N, num_rows - lane);
    for (size_t e = 0; e < depth; e += N) {
      const T* HWY_RESTRICT at = from + e * stride + lane;
      V v[N];
      if (present == N && e + N <= depth) {  // in registers
        HWY_UNROLL(32)
        for (size_t i = 0; i < N; ++i) v[i] = hn::Load(d, at + i * stride);
        hs::Transpose(d, v);
        HWY_UNROLL(32)
        for (size_t i = 0; i < N; ++i) hn::Store(v[i], d, rows[lane + i] + e);
        continue;
      }
      for (size_t i = 0; i < N; ++i) v[i] = e + i < depth ? hn::Load(d, at + i * stride) : hn::Zero(d);
      hs::Transpose(d, v);
      for (size_t i = 0; i < present; ++i) hn::Store(v[i], d, rows[lane + i] + e);
    }
  }
}

// Loads elements [j, j + n) of a row of a (batch, head, query, key) tensor, n <= N, which is contiguous and of the
// kernel's type or widened to it.
template <class D>
struct ContiguousPairs {
  using T = hn::TFromD<D>;
  DType dtype;

  static bool Loads(DType type) {
    bool loads = false;
    hs::WithStorage<T>(type, [&](auto stored) { loads = type == DTypeOf<decltype(stored)>::value; });
    return loads;
  }

  HWY_INLINE hn::Vec<D> operator()(D d, const void* row, int64_t j, size_t n) const {
    hn::Vec<D> v;
    hs::WithStorage<T>(dtype, [&](auto stored) HWY_ATTR {
      const auto* at = static_cast<const decltype(stored)*>(row) + j;
      v = n == hn::MaxLanes(D()) ? hs::LoadWide(d, at) : hs::LoadWideN(d, at, n);
    });
    return v;
  }
};

// Loads bytes of a contiguous boolean mask as 0 and 1.
template <class D>
struct ContiguousMask {
  HWY_INLINE hn::Vec<D> operator()(D d, const void* row, int64_t j, size_t n) const {
    const auto* at = static_cast<const uint8_t*>(row) + j;
    constexpr size_t N = hn::MaxLanes(D());
    HWY_ALIGN uint8_t padded[N] = {};
    if (n < N) {
      for (size_t i = 0; i < n; ++i) padded[i] = at[i];
      at = padded;
    }
    const hn::RebindToSigned<D> integers;
    const hn::Rebind<uint8_t, D> bytes;
    if constexpr (sizeof(hn::TFromD<D>) == 4) {
      return hn::ConvertTo(d, hn::PromoteTo(integers, hn::LoadU(bytes, at)));
    } else {
      const hn::Rebind<int32_t, D> half;
      return hn::PromoteTo(d, hn::PromoteTo(half, hn::LoadU(bytes, at)));
    }
  }
};

// Converts the elements of any other tensor one by one.
template <class D>
struct AnyPairs {
  DType dtype;
  int64_t stride;

  HWY_NOINLINE hn::Vec<D> operator()(D d, const void* row, int64_t j, size_t n) const {
    using T = hn::TFromD<D>;
    HWY_ALIGN T values[hn::MaxLanes(D())] = {};
    for (size_t i = 0; i < n; ++i) {
      const int64_t at = (j + static_cast<int64_t>(i)) * stride;
      values[i] = dtype == DType::kBool ? static_cast<T>(static_cast<const uint8_t*>(row)[at] != 0)
                                        : static_cast<T>(LoadAsDouble(dtype, row, at));
    }
    return hn::Load(d, values);
  }
};

// Calls update(key, vector of the N lanes' values, i) for the keys [begin, end), where i counts from 0 to N - 1
// repeatedly. The tensor's rows are rows[lane]; rows that are the same row are read once.
template <class D, class Load, class Update>
HWY_INLINE void ForPairs(D d, const void* const* HWY_RESTRICT rows, int64_t begin, int64_t end, const Load& load,
                         const Update& update) {
  using V = hn::Vec<D>;
  constexpr size_t N = hn::MaxLanes(D());
  bool same = true;
  for (size_t i = 1; i < N; ++i) same = same && rows[i] == rows[0];
  for (int64_t j = begin; j < end; j += static_cast<int64_t>(N)) {
    const size_t n = std::min(N, static_cast<size_t>(end - j));
    V v[N];
    if (same) {
      HWY_ALIGN hn::TFromD<D> one[N];
      hn::Store(load(d, rows[0], j, n), d, one);
      for (size_t i = 0; i < n; ++i) {
        update(j + static_cast<int64_t>(i), hn::Set(d, one[i]), i);
      }
      continue;
    }
    if (n == N) {
      HWY_UNROLL(32)
      for (size_t i = 0; i < N; ++i) v[i] = load(d, rows[i], j, N);
      hs::Transpose(d, v);
      HWY_UNROLL(32)
      for (size_t i = 0; i < N; ++i) {
        update(j + static_cast<int64_t>(i), v[i], i);
      }
    } else {
      for (size_t i = 0; i < N; ++i) v[i] = load(d, rows[i], j, n);
      hs::Transpose(d, v);
      for (size_t i = 0; i < n; ++i) update(j + static_cast<int64_t>(i), v[i], i);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_ROWS_INL_H_

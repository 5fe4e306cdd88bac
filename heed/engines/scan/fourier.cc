// Fourier transforms along rows of 16 lanes. As long as n numbers fit L2, arithmetic is the bound; so stages run depth
// first, and each quarter is finished while it is in cache.
#include "heed/engines/scan/fourier.h"

#include "heed/core/targets.h"
// After targets.h:
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <memory>
#include <numbers>

#include "heed/core/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/fourier.cc"  // this file
#include "hwy/foreach_target.h"                            // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kLanes = kFourierLanes;
constexpr size_t kRow = 2 * kLanes;  // elements of a row: 16 real parts, 16 imaginary ones

template <class T>
using Tag = hn::CappedTag<T, kLanes>;

template <class V>
struct Complex {
  V re, im;
};

template <class V>
HWY_INLINE Complex<V> Plus(Complex<V> a, Complex<V> b) {
  return {hn::Add(a.re, b.re), hn::Add(a.im, b.im)};
}

template <class V>
HWY_INLINE Complex<V> Minus(Complex<V> a, Complex<V> b) {
  return {hn::Sub(a.re, b.re), hn::Sub(a.im, b.im)};
}

template <class V>
HWY_INLINE Complex<V> Times(Complex<V> a, Complex<V> b) {
  return {hn::NegMulAdd(a.im, b.im, hn::Mul(a.re, b.re)), hn::MulAdd(a.re, b.im, hn::Mul(a.im, b.re))};
}

template <class V>
HWY_INLINE Complex<V> TimesConjugate(Complex<V> a, Complex<V> b) {
  return {hn::MulAdd(a.im, b.im, hn::Mul(a.re, b.re)), hn::NegMulAdd(a.re, b.im, hn::Mul(a.im, b.re))};
}

template <bool kInverse, class V>
HWY_INLINE Complex<V> Twiddled(Complex<V> a, Complex<V> root) {
  return kInverse ? TimesConjugate(a, root) : Times(a, root);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE Complex<V> LoadRow(D d, const hn::TFromD<D>* row) {
  return {hn::LoadU(d, row), hn::LoadU(d, row + kLanes)};
}

template <class D, class V>
HWY_INLINE void StoreRow(Complex<V> a, D d, hn::TFromD<D>* row) {
  hn::StoreU(a.re, d, row);
  hn::StoreU(a.im, d, row + kLanes);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE Complex<V> SetRoot(D d, const hn::TFromD<D>* root) {
  return {hn::Set(d, root[0]), hn::Set(d, root[1])};
}

// Two levels of butterflies (radix 4) over rows that are `quarter` rows apart. The forward transform decimates in
// frequency and the inverse in time, so that neither reverses bits.
template <bool kInverse, class T>
HWY_INLINE void Stage(const T* HWY_RESTRICT roots, size_t quarter, T* HWY_RESTRICT rows) {
  const Tag<T> d;
  const size_t step = quarter * kRow;
  for (size_t j = 0; j < quarter; ++j) {
    const T* root = roots + j * 6;
    const auto w2 = SetRoot(d, root), w1 = SetRoot(d, root + 2), w3 = SetRoot(d, root + 4);
    for (size_t c = 0; c < kLanes; c += hn::Lanes(d)) {
      T* p = rows + j * kRow + c;
      auto a = LoadRow(d, p), b = LoadRow(d, p + step);
      auto e = LoadRow(d, p + 2 * step), f = LoadRow(d, p + 3 * step);
      if constexpr (kInverse) {
        b = TimesConjugate(b, w2);
        e = TimesConjugate(e, w1);
        f = TimesConjugate(f, w3);
        const auto s0 = Plus(a, b), s1 = Minus(a, b), d0 = Plus(e, f), d1 = Minus(e, f);
        const decltype(a) id1{hn::Neg(d1.im), d1.re};
        StoreRow(Plus(s0, d0), d, p);
        StoreRow(Plus(s1, id1), d, p + step);
        StoreRow(Minus(s0, d0), d, p + 2 * step);
        StoreRow(Minus(s1, id1), d, p + 3 * step);
      } else {
        const auto s0 = Plus(a, e), s1 = Plus(b, f), d0 = Minus(a, e), d1 = Minus(b, f);
        const decltype(a) minus_id1{d1.im, hn::Neg(d1.re)};
        StoreRow(Plus(s0, s1), d, p);
        StoreRow(Times(Minus(s0, s1), w2), d, p + step);
        StoreRow(Times(Plus(d0, minus_id1), w1), d, p + 2 * step);
        StoreRow(Times(Minus(d0, minus_id1), w3), d, p + 3 * step);
      }
    }
  }
}

// The last level if the number of levels is odd.
template <class T>
HWY_INLINE void Pair(T* HWY_RESTRICT rows) {
  const Tag<T> d;
  for (size_t c = 0; c < kRow; c += hn::Lanes(d)) {
    const auto a = hn::LoadU(d, rows + c), b = hn::LoadU(d, rows + kRow + c);
    hn::StoreU(hn::Add(a, b), d, rows + c);
    hn::StoreU(hn::Sub(a, b), d, rows + kRow + c);
  }
}

// The transform of `size` rows in each lane.
template <bool kInverse, class T>
void Rows(const T* HWY_RESTRICT roots, size_t size, T* HWY_RESTRICT rows) {
  if (size == 2) Pair(rows);
  if (size < 4) return;
  const size_t quarter = size / 4;
  if (!kInverse) Stage<false>(roots, quarter, rows);
  for (size_t i = 0; i < 4 && quarter > 1; ++i) {
    Rows<kInverse>(roots + quarter * 6, quarter, rows + i * quarter * kRow);
  }
  if (kInverse) Stage<true>(roots, quarter, rows);
}

// Transposes a tile of 16 rows and 16 lanes in squares of the width of a vector.
template <class T>
HWY_INLINE void TransposeTile(T* HWY_RESTRICT tile) {
  const Tag<T> d;
  constexpr size_t N = hn::MaxLanes(Tag<T>());
  hn::Vec<Tag<T>> upper[N], lower[N];
  for (size_t part = 0; part < kRow; part += kLanes) {
    for (size_t i = 0; i < kLanes; i += N) {
      for (size_t j = i; j < kLanes; j += N) {
        T* above = tile + i * kRow + part + j;
        T* below = tile + j * kRow + part + i;
        for (size_t r = 0; r < N; ++r) upper[r] = hn::LoadU(d, above + r * kRow);
        heed::HWY_NAMESPACE::Transpose(d, upper);
        if (i != j) {
          for (size_t r = 0; r < N; ++r) lower[r] = hn::LoadU(d, below + r * kRow);
          heed::HWY_NAMESPACE::Transpose(d, lower);
          for (size_t r = 0; r < N; ++r) hn::StoreU(lower[r], d, above + r * kRow);
        }
        for (size_t r = 0; r < N; ++r) hn::StoreU(upper[r], d, below + r * kRow);
      }
    }
  }
}

template <bool kInverse, class T>
HWY_INLINE void ApplyTwiddles(const FourierPlan<T>& plan, size_t tile, T* HWY_RESTRICT rows) {
  const Tag<T> d;
  for (size_t l = 0; l < kLanes; ++l) {
    const auto shared = SetRoot(d, plan.lane_twiddles.data() + (tile * kLanes + l) * 2);
    for (size_t c = 0; c < kLanes; c += hn::Lanes(d)) {
      const auto own = LoadRow(d, plan.tile_twiddles.data() + l * kRow + c);
      T* p = rows + l * kRow + c;
      StoreRow(Twiddled<kInverse>(LoadRow(d, p), Times(own, shared)), d, p);
    }
  }
}

template <class T>
void SpectrumOf(const FourierPlan<T>& plan, const T* HWY_RESTRICT x, const T* HWY_RESTRICT before,
                T* HWY_RESTRICT spectrum) {
  const Tag<T> d;
  const size_t num_rows = static_cast<size_t>(plan.rows);
  for (size_t j = 0; j < num_rows; ++j) {
    const auto w = SetRoot(d, plan.row_weight.data() + j * 2);
    for (size_t c = 0; c < kLanes; c += hn::Lanes(d)) {
      const size_t at = j * kLanes + c;
      const auto weight = Times(LoadRow(d, plan.lane_weight.data() + c), w);
      const auto v = hn::LoadU(d, x + at);
      Complex<hn::Vec<Tag<T>>> product{hn::Mul(weight.re, v), hn::Mul(weight.im, v)};
      if (before != nullptr) {
        const auto b = hn::LoadU(d, before + at);
        product = {hn::MulAdd(weight.im, b, product.re), hn::NegMulAdd(weight.re, b, product.im)};
      }
      StoreRow(product, d, spectrum + j * kRow + c);
    }
  }
  Rows<false>(plan.stages.data(), num_rows, spectrum);
  for (size_t tile = 0; tile < num_rows / kLanes; ++tile) {
    T* rows = spectrum + tile * kLanes * kRow;
    TransposeTile(rows);
    ApplyTwiddles<false>(plan, tile, rows);
    Rows<false>(plan.short_stages.data(), kLanes, rows);
  }
}

template <class T>
void AddProductOf(const FourierPlan<T>& plan, const T* a, const T* b, T* HWY_RESTRICT sum) {
  const Tag<T> d;
  const size_t size = static_cast<size_t>(plan.spectrum_size());
  for (size_t row = 0; row < size; row += kRow) {
    for (size_t c = row; c < row + kLanes; c += hn::Lanes(d)) {
      StoreRow(Plus(LoadRow(d, sum + c), Times(LoadRow(d, a + c), LoadRow(d, b + c))), d, sum + c);
    }
  }
}

template <class T>
void ConvolutionOf(const FourierPlan<T>& plan, const T* a, const T* b, T* scratch, T* HWY_RESTRICT y) {
  const Tag<T> d;
  const size_t num_rows = static_cast<size_t>(plan.rows);
  for (size_t tile = 0; tile < num_rows / kLanes; ++tile) {
    const size_t begin = tile * kLanes * kRow;
    for (size_t i = begin; i < begin + kLanes * kRow; i += kRow) {
      for (size_t c = i; c < i + kLanes; c += hn::Lanes(d)) {
        const auto a_row = LoadRow(d, a + c);
        StoreRow(b == nullptr ? a_row : Times(a_row, LoadRow(d, b + c)), d, scratch + c);
      }
    }
    Rows<true>(plan.short_stages.data(), kLanes, scratch + begin);
    ApplyTwiddles<true>(plan, tile, scratch + begin);
    TransposeTile(scratch + begin);
  }
  Rows<true>(plan.stages.data(), num_rows, scratch);
  const auto scale = hn::Set(d, T(1) / static_cast<T>(plan.n));  // exact, because n is a power of two
  for (size_t j = 0; j < num_rows; ++j) {
    const auto w = SetRoot(d, plan.row_weight.data() + j * 2);
    for (size_t c = 0; c < kLanes; c += hn::Lanes(d)) {
      const auto weight = Times(LoadRow(d, plan.lane_weight.data() + c), w);
      const auto z = TimesConjugate(LoadRow(d, scratch + j * kRow + c), weight);
      hn::StoreU(hn::Mul(z.re, scale), d, y + j * kLanes + c);
    }
  }
}

void SpectrumF32(const FourierPlan<float>& plan, const float* x, const float* before, float* spectrum) {
  SpectrumOf(plan, x, before, spectrum);
}

void SpectrumF64(const FourierPlan<double>& plan, const double* x, const double* before, double* spectrum) {
  SpectrumOf(plan, x, before, spectrum);
}

void AddProductF32(const FourierPlan<float>& plan, const float* a, const float* b, float* sum) {
  AddProductOf(plan, a, b, sum);
}

void AddProductF64(const FourierPlan<double>& plan, const double* a, const double* b, double* sum) {
  AddProductOf(plan, a, b, sum);
}

void ConvolveF32(const FourierPlan<float>& plan, const float* a, const float* b, float* scratch, float* y) {
  ConvolutionOf(plan, a, b, scratch, y);
}

void ConvolveF64(const FourierPlan<double>& plan, const double* a, const double* b, double* scratch, double* y) {
  ConvolutionOf(plan, a, b, scratch, y);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {
namespace {

// Appends exp(2 pi i num / den), with the angle reduced to less than 2 pi.
template <class T>
void AppendRoot(int64_t num, int64_t den, std::vector<T>& out) {
  const double angle = 2 * std::numbers::pi * static_cast<double>(num % den) / static_cast<double>(den);
  out.push_back(static_cast<T>(std::cos(angle)));
  out.push_back(static_cast<T>(std::sin(angle)));
}

template <class T>
std::vector<T> StagesOf(int64_t size) {
  std::vector<T> roots;
  for (; size >= 4; size /= 4) {
    for (int64_t j = 0; j < size / 4; ++j) {
      for (const int64_t power : {2, 1, 3}) AppendRoot(-power * j, size, roots);
    }
  }
  return roots;
}

// Returns the bit reversal of `index` < `size`, a power of two.
int64_t Reversed(int64_t index, int64_t size) {
  int64_t reversed = 0;
  for (; size > 1; size /= 2, index /= 2) reversed = 2 * reversed + index % 2;
  return reversed;
}

}  // namespace

template <class T>
FourierPlan<T>::FourierPlan(int64_t length)
    : n(length), rows(length / kFourierLanes), lane_weight(2 * kFourierLanes), stages(StagesOf<T>(rows)),
      short_stages(StagesOf<T>(kFourierLanes)), tile_twiddles(2 * kFourierLanes * kFourierLanes) {
  std::vector<T> root;
  for (int64_t l = 0; l < kFourierLanes; ++l) {
    root.clear();
    AppendRoot(l, 4 * n, root);
    lane_weight[l] = root[0];
    lane_weight[kFourierLanes + l] = root[1];
    for (int64_t a = 0; a < kFourierLanes; ++a) {
      root.clear();
      AppendRoot(-l * Reversed(a, kFourierLanes), kMinFourierLength, root);
      tile_twiddles[2 * l * kFourierLanes + a] = root[0];
      tile_twiddles[(2 * l + 1) * kFourierLanes + a] = root[1];
    }
  }
  for (int64_t j = 0; j < rows; ++j) AppendRoot(kFourierLanes * j, 4 * n, row_weight);
  // Row 16 tile + a holds frequency Reversed(tile) + (rows / 16) Reversed(a).
  const int64_t tiles = rows / kFourierLanes;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int64_t l = 0; l < kFourierLanes; ++l) {
      AppendRoot(-l * Reversed(tile, tiles), n, lane_twiddles);
    }
  }
}

template struct FourierPlan<float>;
template struct FourierPlan<double>;

template <class T>
const FourierPlan<T>& SharedPlan(int64_t n) {
  static std::atomic<const FourierPlan<T>*> plans[64];  // by log2 n
  auto& slot = plans[std::countr_zero(static_cast<uint64_t>(n))];
  const FourierPlan<T>* plan = slot.load(std::memory_order_acquire);
  if (plan != nullptr) return *plan;
  auto made = std::make_unique<const FourierPlan<T>>(n);
  // If threads build one at the same time, the first stores its own and the others use that.
  if (slot.compare_exchange_strong(plan, made.get(), std::memory_order_acq_rel)) {
    return *made.release();
  }
  return *plan;
}

template const FourierPlan<float>& SharedPlan(int64_t);
template const FourierPlan<double>& SharedPlan(int64_t);

HWY_EXPORT(SpectrumF32);
HWY_EXPORT(SpectrumF64);
HWY_EXPORT(AddProductF32);
HWY_EXPORT(AddProductF64);
HWY_EXPORT(ConvolveF32);
HWY_EXPORT(ConvolveF64);

void Spectrum(int64_t allowed_targets, const FourierPlan<float>& plan, const float* x, const float* before,
              float* spectrum) {
  HWY_DISPATCH_TABLE(SpectrumF32)[TargetIndex(allowed_targets)](plan, x, before, spectrum);
}

void Spectrum(int64_t allowed_targets, const FourierPlan<double>& plan, const double* x, const double* before,
              double* spectrum) {
  HWY_DISPATCH_TABLE(SpectrumF64)[TargetIndex(allowed_targets)](plan, x, before, spectrum);
}

void AddProduct(int64_t allowed_targets, const FourierPlan<float>& plan, const float* a, const float* b, float* sum) {
  HWY_DISPATCH_TABLE(AddProductF32)[TargetIndex(allowed_targets)](plan, a, b, sum);
}

void AddProduct(int64_t allowed_targets, const FourierPlan<double>& plan, const double* a, const double* b,
                double* sum) {
  HWY_DISPATCH_TABLE(AddProductF64)[TargetIndex(allowed_targets)](plan, a, b, sum);
}

void Convolve(int64_t allowed_targets, const FourierPlan<float>& plan, const float* a, const float* b, float* scratch,
              float* y) {
  HWY_DISPATCH_TABLE(ConvolveF32)[TargetIndex(allowed_targets)](plan, a, b, scratch, y);
}

void Convolve(int64_t allowed_targets, const FourierPlan<double>& plan, const double* a, const double* b,
              double* scratch, double* y) {
  HWY_DISPATCH_TABLE(ConvolveF64)[TargetIndex(allowed_targets)](plan, a, b, scratch, y);
}

}  // namespace heed::scan
#endif  // HWY_ONCE

// Token shift with gradients, compiled once per SIMD target. It is bound by memory.
#include <cstddef>
#include <cstdint>

#include "heed/core/targets.h"
#include "heed/layers/shifted_rows_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/layers/shifted_rows_kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/export_passes.h"
#include "heed/simd/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::layers::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

// Elements beyond `count` are 0, and so is all of an absent row.
template <class D, class S>
HWY_INLINE hn::Vec<D> Load(D d, const S* HWY_RESTRICT from, size_t i, size_t count) {
  if (from == nullptr) return hn::Zero(d);
  return count == hn::Lanes(d) ? hs::LoadWide(d, from + i) : hs::LoadWideN(d, from + i, count);
}

// y = before + mix .* (now - before)
template <class T, class S>
HWY_INLINE void MixRow(const S* HWY_RESTRICT now, const S* HWY_RESTRICT before, const S* HWY_RESTRICT mix, size_t size,
                       S* HWY_RESTRICT y) {
  const hn::ScalableTag<T> d;
  const size_t N = hn::Lanes(d);
  for (size_t i = 0; i < size; i += N) {
    const size_t n = HWY_MIN(N, size - i);
    const auto last = Load(d, before, i, n);
    hs::StoreRounded(d, hn::MulAdd(Load(d, mix, i, n), hn::Sub(Load(d, now, i, n), last), last), y + i, n);
  }
}

template <class T, class S>
void RunRows(const ShiftedRowsCall& c, int64_t task, int64_t begin, int64_t end) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const ConstTensorView &x = c.in.x, &mix = c.in.mix;
  const int64_t tokens = x.size(1), M = mix.size(0);
  const size_t N = hn::Lanes(d), size = static_cast<size_t>(x.size(2));
  T* partials = c.partials == nullptr ? nullptr : static_cast<T*>(c.partials) + task * mix.num_elements();
  for (int64_t row = begin; row < end; ++row) {
    const int64_t b = row / tokens, t = row % tokens;
    const S* now = x.as<S>() + b * x.stride(0) + t * x.stride(1);
    const S* before = t > 0                  ? now - x.stride(1)
                      : c.in.first.present() ? c.in.first.as<S>() + b * c.in.first.stride(0)
                                             : nullptr;
    if (!c.dy.present()) {
      for (int64_t m = 0; m < M; ++m) {
        S* y = c.y.as<S>() + m * c.y.stride(0) + b * c.y.stride(1) + t * c.y.stride(2);
        MixRow<T>(now, before, mix.as<S>() + m * mix.stride(0), size, y);
      }
      continue;
    }
    const S* dy = c.dy.as<S>() + b * c.dy.stride(1) + t * c.dy.stride(2);
    const S* dy_next = t + 1 < tokens ? dy + c.dy.stride(2) : nullptr;
    S* dx = c.out.dx.present() ? c.out.dx.as<S>() + b * c.out.dx.stride(0) + t * c.out.dx.stride(1) : nullptr;
    S* dfirst = c.out.dfirst.present() && t == 0 ? c.out.dfirst.as<S>() + b * c.out.dfirst.stride(0) : nullptr;
    for (size_t i = 0; i < size; i += N) {
      const size_t n = HWY_MIN(N, size - i);
      const V change = hn::Sub(Load(d, now, i, n), Load(d, before, i, n));
      V of_now = hn::Zero(d), of_before = hn::Zero(d);
      for (int64_t m = 0; m < M; ++m) {
        const int64_t at = m * c.dy.stride(0);
        const V share = Load(d, mix.as<S>() + m * mix.stride(0), i, n), arriving = Load(d, dy + at, i, n);
        of_now = hn::MulAdd(share, arriving, of_now);
        of_before = hn::Add(of_before, hn::NegMulAdd(share, arriving, arriving));
        if (dy_next != nullptr) {
          const V later = Load(d, dy_next + at, i, n);
          of_now = hn::Add(of_now, hn::NegMulAdd(share, later, later));
        }
        if (partials != nullptr) {
          T* sum = partials + static_cast<size_t>(m) * size + i;
          hs::StoreRounded(d, hn::MulAdd(arriving, change, Load(d, sum, 0, n)), sum, n);
        }
      }
      if (dx != nullptr) hs::StoreRounded(d, of_now, dx + i, n);
      if (dfirst != nullptr) hs::StoreRounded(d, of_before, dfirst + i, n);
    }
  }
}

void RunOfTarget(const ShiftedRowsCall& c, int64_t task, int64_t begin, int64_t end) {
  const DType dtype = c.in.x.dtype();
  if (dtype == DType::kF64) return RunRows<double, double>(c, task, begin, end);
  hs::WithStorage<float>(dtype, [&](auto of) HWY_ATTR { RunRows<float, decltype(of)>(c, task, begin, end); });
}

ShiftedRowsKernel ShiftedRowsOfTarget() { return &RunOfTarget; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::layers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::layers {
HEED_EXPORT(ShiftedRowsKernel, ShiftedRowsOfTarget)

ShiftedRowsKernel ShiftedRowsKernelFor(const Context& ctx) { return ShiftedRowsOfTarget(ctx); }

}  // namespace heed::layers
#endif  // HWY_ONCE

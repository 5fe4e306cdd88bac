// Row-wise computations of nsa: means of windows, sums with gates, and the gradients of both. Memory-bound.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "heed/core/dispatch.h"
#include "heed/ops/sparse/nsa/nsa_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/sparse/nsa/nsa_rows.cc"  // this file
#include "hwy/foreach_target.h"                               // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/convert-inl.h"

#ifndef HEED_OPS_SPARSE_NSA_ROWS_ONCE_
#define HEED_OPS_SPARSE_NSA_ROWS_ONCE_
namespace heed::nsa {

// Address of a row of a tensor over sequences, tokens and heads.
template <class S>
const S* RowOf(const ConstTensorView& t, int64_t b, int64_t i, int64_t h) {
  return t.as<S>() + b * t.stride(0) + i * t.stride(1) + h * t.stride(2);
}
template <class S>
S* RowOf(const TensorView& t, int64_t b, int64_t i, int64_t h) {
  return t.as<S>() + b * t.stride(0) + i * t.stride(1) + h * t.stride(2);
}

// Calls f(b, token, head) for every row, in tasks of one token.
template <class F>
void ForRows(Context& ctx, const ConstTensorView& t, const F& f) {
  const int64_t tokens = t.size(1), heads = t.size(2);
  ctx.ParallelFor(t.size(0) * tokens, [&](int64_t task, int) {
    for (int64_t h = 0; h < heads; ++h) f(task / tokens, task % tokens, h);
  });
}

}  // namespace heed::nsa
#endif  // HEED_OPS_SPARSE_NSA_ROWS_ONCE_

HWY_BEFORE_NAMESPACE();
namespace heed::nsa::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// Calls f(S(), d) with the element type and the tag of the computation.
template <class F>
HWY_INLINE void WithTypes(DType dtype, const F& f) {
  if (dtype == DType::kF64) return f(double(), hn::ScalableTag<double>());
  hs::WithStorage<float>(dtype, [&](auto stored) HWY_ATTR { f(stored, hn::ScalableTag<float>()); });
}

// Calls f(element, count) for each vector of a row.
template <class D, class F>
HWY_INLINE void ForVectors(D, int64_t size, const F& f) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t e = 0; e < size; e += N) f(e, static_cast<size_t>(std::min(N, size - e)));
}

template <class S>
HWY_INLINE double AsDouble(S x) {
  return LoadAsDouble(DTypeOf<S>::value, &x, 0);
}

// Sums are in f64, so a mean is rounded once.
void MeansImpl(Context& ctx, const Shape& s, const ConstTensorView& x, const TensorView& means) {
  const hn::ScalableTag<double> dd;
  WithTypes(x.dtype(), [&](auto stored, auto) HWY_ATTR {
    using S = decltype(stored);
    using T = std::conditional_t<std::is_same_v<S, double>, double, float>;
    const hn::Rebind<T, decltype(dd)> d;
    const auto widened = [&](const S* from, size_t n) HWY_ATTR {
      if constexpr (std::is_same_v<T, double>) {
        return hn::LoadN(dd, from, n);
      } else {
        return hn::PromoteTo(dd, hs::LoadWideN(d, from, n));
      }
    };
    ForRows(ctx, means, [&](int64_t b, int64_t w, int64_t h) HWY_ATTR {
      ForVectors(dd, x.size(3), [&](int64_t e, size_t n) HWY_ATTR {
        auto sum = hn::Zero(dd);
        for (int64_t t = 0; t < s.length; ++t) sum = hn::Add(sum, widened(RowOf<S>(x, b, w * s.stride + t, h) + e, n));
        const auto mean = hn::Div(sum, hn::Set(dd, static_cast<double>(s.length)));
        S* const to = RowOf<S>(means, b, w, h) + e;
        if constexpr (std::is_same_v<T, double>) {
          hn::StoreN(mean, dd, to, n);
        } else if constexpr (std::is_same_v<S, float>) {
          hn::StoreN(hn::DemoteTo(d, mean), d, to, n);
        } else {
          const hn::Rebind<uint16_t, decltype(d)> du16;
          hn::StoreN(hs::Round(d, S(), hn::DemoteTo(d, mean)), du16, reinterpret_cast<uint16_t*>(to), n);
        }
      });
    });
  });
}

void AddGatedImpl(Context& ctx, const ConstTensorView& branches, const ConstTensorView& gates, const TensorView& o) {
  const ConstTensorView of[kBranches] = {Of(branches, 0), Of(branches, 1), Of(branches, 2)};
  WithTypes(o.dtype(), [&](auto stored, auto d) HWY_ATTR {
    using S = decltype(stored);
    ForRows(ctx, o, [&](int64_t b, int64_t i, int64_t h) HWY_ATTR {
      const S* const gate = RowOf<S>(gates, b, i, h);
      ForVectors(d, o.size(3), [&](int64_t e, size_t n) HWY_ATTR {
        auto sum = hn::Zero(d);
        for (int64_t c = 0; c < kBranches; ++c) {
          const auto g = hn::Set(d, static_cast<hn::TFromD<decltype(d)>>(AsDouble(gate[c])));
          sum = hn::MulAdd(g, hs::LoadWideN(d, RowOf<S>(of[c], b, i, h) + e, n), sum);
        }
        hs::StoreRounded(d, sum, RowOf<S>(o, b, i, h) + e, n);
      });
    });
  });
}

void GateGradientsImpl(Context& ctx, int64_t c, const ConstTensorView& d_o, const ConstTensorView& gates,
                       const ConstTensorView& branch, const TensorView& dgates, const TensorView& gated) {
  WithTypes(d_o.dtype(), [&](auto stored, auto d) HWY_ATTR {
    using S = decltype(stored);
    ForRows(ctx, d_o, [&](int64_t b, int64_t i, int64_t h) HWY_ATTR {
      const S* const arriving = RowOf<S>(d_o, b, i, h);
      const auto g = hn::Set(d, static_cast<hn::TFromD<decltype(d)>>(AsDouble(RowOf<S>(gates, b, i, h)[c])));
      auto dot = hn::Zero(d);
      ForVectors(d, d_o.size(3), [&](int64_t e, size_t n) HWY_ATTR {
        const auto x = hs::LoadWideN(d, arriving + e, n);
        if (dgates.present()) dot = hn::MulAdd(x, hs::LoadWideN(d, RowOf<S>(branch, b, i, h) + e, n), dot);
        if (gated.present()) hs::StoreRounded(d, hn::Mul(g, x), RowOf<S>(gated, b, i, h) + e, n);
      });
      if (dgates.present()) hs::StoreRounded(d, hn::Set(d, hn::ReduceSum(d, dot)), RowOf<S>(dgates, b, i, h) + c, 1);
    });
  });
}

void AddToImpl(Context& ctx, const Shape& s, const TensorView& to, std::span<const ConstTensorView> others,
               const ConstTensorView& d_means) {
  WithTypes(to.dtype(), [&](auto stored, auto d) HWY_ATTR {
    using S = decltype(stored);
    using T = hn::TFromD<decltype(d)>;
    ForRows(ctx, to, [&](int64_t b, int64_t t, int64_t h) HWY_ATTR {
      const int64_t first = t < s.length ? 0 : (t - s.length) / s.stride + 1;
      const int64_t end = d_means.present() ? std::min(t / s.stride + 1, s.windows) : 0;
      ForVectors(d, to.size(3), [&](int64_t e, size_t n) HWY_ATTR {
        S* const at = RowOf<S>(to, b, t, h) + e;
        auto sum = hs::LoadWideN(d, at, n);
        for (const ConstTensorView& other : others)
          sum = hn::Add(sum, hs::LoadWideN(d, RowOf<S>(other, b, t, h) + e, n));
        auto arriving = hn::Zero(d);
        for (int64_t w = first; w < end; ++w) {
          arriving = hn::Add(arriving, hs::LoadWideN(d, RowOf<S>(d_means, b, w, h) + e, n));
        }
        if (end > first) sum = hn::Add(sum, hn::Div(arriving, hn::Set(d, static_cast<T>(s.length))));
        hs::StoreRounded(d, sum, at, n);
      });
    });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::nsa::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::nsa {

HWY_EXPORT(MeansImpl);
HWY_EXPORT(AddGatedImpl);
HWY_EXPORT(GateGradientsImpl);
HWY_EXPORT(AddToImpl);

void Means(Context& ctx, const Shape& s, const ConstTensorView& x, const TensorView& means) {
  HWY_DISPATCH_TABLE(MeansImpl)[TargetIndex(ctx.allowed_targets())](ctx, s, x, means);
}

void AddGated(Context& ctx, const ConstTensorView& branches, const ConstTensorView& gates, const TensorView& o) {
  HWY_DISPATCH_TABLE(AddGatedImpl)[TargetIndex(ctx.allowed_targets())](ctx, branches, gates, o);
}

void GateGradients(Context& ctx, int64_t c, const ConstTensorView& d_o, const ConstTensorView& gates,
                   const ConstTensorView& branch, const TensorView& dgates, const TensorView& gated) {
  HWY_DISPATCH_TABLE(GateGradientsImpl)[TargetIndex(ctx.allowed_targets())](ctx, c, d_o, gates, branch, dgates, gated);
}

void AddTo(Context& ctx, const Shape& s, const TensorView& to, std::span<const ConstTensorView> others,
           const ConstTensorView& d_means) {
  HWY_DISPATCH_TABLE(AddToImpl)[TargetIndex(ctx.allowed_targets())](ctx, s, to, others, d_means);
}

}  // namespace heed::nsa
#endif  // HWY_ONCE

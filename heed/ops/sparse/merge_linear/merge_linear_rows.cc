// Rows of merge_linear. Memory-bound: two scalars per row in f64, then its channels, vectorised.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/core/dispatch.h"
#include "heed/ops/sparse/merge_linear/merge_linear_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/sparse/merge_linear/merge_linear_rows.cc"  // this file
#include "hwy/foreach_target.h"                                                 // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/convert-inl.h"

#ifndef HEED_OPS_SPARSE_MERGE_LINEAR_ROWS_ONCE_
#define HEED_OPS_SPARSE_MERGE_LINEAR_ROWS_ONCE_
namespace heed::merge_linear {

// The coefficients of a row's parts.
struct Weights {
  double exact = 0;   // coefficient of o: g exp(lse) / W
  double linear = 0;  // coefficient of num: 1 / W
  double share = 0;   // den / W, which is 1 - `exact`
  double gated = 0;   // exp(lse) / W
  bool has_exact = false;
};

// Divides both parts of W by the larger one, or by the only one.
inline Weights WeightsOf(double lse, double den, double gate, double most) {
  Weights w;
  double shift = lse;
  if (den != 0) {
    const double of_den = std::log(std::abs(den));
    if (!(of_den <= shift)) shift = of_den;
  }
  if (shift == -std::numeric_limits<double>::infinity()) return w;
  const double e = std::exp(lse - shift);
  double c = std::exp(-shift);
  if (c > most) c = most;  // stays finite beside a numerator of 0
  const double linear = den == 0 ? 0 : c * den, total = gate * e + linear;
  if (total == 0) return w;
  w.exact = gate * e / total;
  w.linear = std::clamp(c / total, -most, most);
  w.share = linear / total;
  w.gated = e / total;
  w.has_exact = e != 0;
  if (std::isnan(total)) w.linear = total;
  return w;
}

inline double At(const ConstTensorView& t, int64_t a, int64_t b, int64_t c) {
  return LoadAsDouble(t.dtype(), t.data(), a * t.stride(0) + b * t.stride(1) + c * t.stride(2));
}

template <class S>
const S* RowOf(const ConstTensorView& t, int64_t b, int64_t i, int64_t h) {
  return t.as<S>() + b * t.stride(0) + i * t.stride(1) + h * t.stride(2);
}
template <class S>
S* RowOf(const TensorView& t, int64_t b, int64_t i, int64_t h) {
  return t.as<S>() + b * t.stride(0) + i * t.stride(1) + h * t.stride(2);
}

// Calls f(b, i, h, weights) for every row.
template <class T, class F>
void ForRows(Context& ctx, const Inputs& in, const F& f) {
  const int64_t tokens = in.o.size(1), heads = in.o.size(2);
  ctx.ParallelFor(in.o.size(0) * tokens, [&](int64_t task, int) {
    const int64_t b = task / tokens, i = task % tokens;
    for (int64_t h = 0; h < heads; ++h) {
      const double gate = in.gate.present() ? LoadAsDouble(in.gate.dtype(), in.gate.data(), h * in.gate.stride(0)) : 1;
      f(b, i, h, WeightsOf(At(in.lse, b, h, i), At(in.den, b, i, h), gate, std::numeric_limits<T>::max()));
    }
  });
}

}  // namespace heed::merge_linear
#endif  // HEED_OPS_SPARSE_MERGE_LINEAR_ROWS_ONCE_

HWY_BEFORE_NAMESPACE();
namespace heed::merge_linear::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// Calls f(T(), S(), R()) for the dtype of the computation and those of o and num.
template <class F>
HWY_INLINE void WithTypes(const Inputs& in, const F& f) {
  if (in.o.dtype() == DType::kF64) return f(double(), double(), double());
  hs::WithStorage<float>(in.o.dtype(), [&](auto of_o) HWY_ATTR {
    hs::WithStorage<float>(in.num.dtype(), [&](auto of_num) HWY_ATTR { f(float(), of_o, of_num); });
  });
}

void MergeRowsImpl(Context& ctx, const Inputs& in, const TensorView& out) {
  WithTypes(in, [&](auto computed, auto of_o, auto of_num) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(of_o);
    using R = decltype(of_num);
    const hn::ScalableTag<T> d;
    constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
    const int64_t channels = in.o.size(3);
    ForRows<T>(ctx, in, [&](int64_t b, int64_t i, int64_t h, const Weights& w) HWY_ATTR {
      const auto exact = hn::Set(d, static_cast<T>(w.exact)), linear = hn::Set(d, static_cast<T>(w.linear));
      for (int64_t e = 0; e < channels; e += N) {
        const auto n = static_cast<size_t>(std::min(N, channels - e));
        auto sum = hn::Zero(d);
        if (w.linear != 0) sum = hn::Mul(linear, hs::LoadWideN(d, RowOf<R>(in.num, b, i, h) + e, n));
        if (w.has_exact) sum = hn::MulAdd(exact, hs::LoadWideN(d, RowOf<S>(in.o, b, i, h) + e, n), sum);
        hs::StoreRounded(d, sum, RowOf<S>(out, b, i, h) + e, n);
      }
    });
  });
}

void MergeRowsBackwardImpl(Context& ctx, const BackwardInputs& in, const Gradients& out, double* gate_terms) {
  WithTypes(in, [&](auto computed, auto of_o, auto of_num) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(of_o);
    using R = decltype(of_num);
    const hn::ScalableTag<T> d;
    constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
    const int64_t tokens = in.o.size(1), heads = in.o.size(2), channels = in.o.size(3);
    ForRows<T>(ctx, in, [&](int64_t b, int64_t i, int64_t h, const Weights& w) HWY_ATTR {
      const auto exact = hn::Set(d, static_cast<T>(w.exact)), linear = hn::Set(d, static_cast<T>(w.linear));
      auto with_o = hn::Zero(d), with_num = hn::Zero(d);
      for (int64_t e = 0; e < channels; e += N) {
        const auto n = static_cast<size_t>(std::min(N, channels - e));
        const auto arriving = hs::LoadWideN(d, RowOf<S>(in.d_o, b, i, h) + e, n);
        if (w.has_exact) with_o = hn::MulAdd(arriving, hs::LoadWideN(d, RowOf<S>(in.o, b, i, h) + e, n), with_o);
        if (w.linear != 0)
          with_num = hn::MulAdd(arriving, hs::LoadWideN(d, RowOf<R>(in.num, b, i, h) + e, n), with_num);
        const auto of_exact = w.has_exact ? hn::Mul(exact, arriving) : hn::Zero(d);
        const auto of_linear = w.linear != 0 ? hn::Mul(linear, arriving) : hn::Zero(d);
        if (out.dexact.present()) hs::StoreRounded(d, of_exact, RowOf<S>(out.dexact, b, i, h) + e, n);
        if (out.dnum.present()) hs::StoreRounded(d, of_linear, RowOf<R>(out.dnum, b, i, h) + e, n);
      }
      const double o = static_cast<double>(hn::ReduceSum(d, with_o));
      const double num = w.linear == 0 ? 0 : w.linear * static_cast<double>(hn::ReduceSum(d, with_num));
      const double difference = w.share * o - num;  // <d_o, o - out>
      const auto store = [](const TensorView& t, int64_t x, int64_t y, int64_t z, double value) {
        if (t.present()) StoreDouble(t.dtype(), t.data(), x * t.stride(0) + y * t.stride(1) + z * t.stride(2), value);
      };
      store(out.dlse, b, h, i, w.has_exact ? w.exact * difference : 0);
      store(out.dden, b, i, h, w.linear == 0 ? 0 : -w.linear * (w.exact * o + num));
      if (gate_terms != nullptr) gate_terms[(b * tokens + i) * heads + h] = w.has_exact ? w.gated * difference : 0;
    });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::merge_linear::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::merge_linear {

HWY_EXPORT(MergeRowsImpl);
HWY_EXPORT(MergeRowsBackwardImpl);

void MergeRows(Context& ctx, const Inputs& in, const TensorView& out) {
  HWY_DISPATCH_TABLE(MergeRowsImpl)[TargetIndex(ctx.allowed_targets())](ctx, in, out);
}

void MergeRowsBackward(Context& ctx, const BackwardInputs& in, const Gradients& out, double* gate_terms) {
  HWY_DISPATCH_TABLE(MergeRowsBackwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, in, out, gate_terms);
}

}  // namespace heed::merge_linear
#endif  // HWY_ONCE

// Rows of attention residuals: bound by reading the outputs of all layers.
//
// A row of a layer is read from memory once. The two sums of four rows come first, then the rows are added to o from
// the cache, with the rescaling of a running maximum, so that no pass over all layers has to come back to them. The
// gradient needs all probabilities before the first row of dresiduals, and reads the rows of a token twice.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "heed/core/carver.h"
#include "heed/core/dispatch.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/exact/attention_residual/attention_residual_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/exact/attention_residual/attention_residual_rows.cc"  // this file
#include "hwy/foreach_target.h"                                                            // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/convert-inl.h"

#ifndef HEED_OPS_EXACT_ATTENTION_RESIDUAL_ROWS_ONCE_
#define HEED_OPS_EXACT_ATTENTION_RESIDUAL_ROWS_ONCE_
namespace heed::attention_residual {

// Tokens per task, and per partial sum of the gradients of query and weight.
inline constexpr int64_t kTokens = 16;
// Layers that are added to a sum over layers at once, which is loaded and stored once for all of them.
inline constexpr int64_t kLayers = 4;
// Elements beyond the channels of a buffer, more than the lanes of any vector.
inline constexpr int64_t kSpare = 16;

// Sums over the channels of a row v.
struct RowSums {
  double squares = 0, with_u = 0, with_d_o = 0;  // of v^2, u v, d_o v
};

// Computes the sums in f64, for rows whose sums overflow in f32 or whose squares f32 flushes and no eps hides.
template <class T, class S>
RowSums WideSums(const S* v, const T* u, const S* d_o, DType dtype, int64_t channels) {
  RowSums sums;
  for (int64_t c = 0; c < channels; ++c) {
    const double x = LoadAsDouble(dtype, v, c);
    sums.squares += x * x;
    sums.with_u += x * static_cast<double>(u[c]);
    if (d_o != nullptr) sums.with_d_o += x * LoadAsDouble(dtype, d_o, c);
  }
  return sums;
}

// The memory of a thread, and of all threads: weight .* query, and for gradients sum a_l v_l over the tokens of a task.
template <class T>
struct RowScratch {
  T* sum;
  double* logits;
  int64_t bytes;

  RowScratch(const Inputs& in, void* base) {
    Carver carver(base);
    carver.Next(sum, in.query.size(0) + kSpare);
    carver.Next(logits, in.residuals.size(0));
    bytes = carver.bytes();
  }
};
template <class T>
struct SharedRows {
  T *u, *partial;  // [padded], [tasks][padded]
  int64_t tasks, padded, bytes;

  SharedRows(const Inputs& in, bool has_partial, void* base)
      : tasks((NumTokens(in) + kTokens - 1) / kTokens), padded(in.query.size(0) + kSpare) {
    Carver carver(base);
    carver.Next(u, padded);
    carver.Next(partial, has_partial ? tasks * padded : 0);
    bytes = carver.bytes();
  }
};

// The numbers of a layer and a token that do not depend on other layers.
struct Layer {
  double logit = 0, inverse = 0, with_u = 0, with_d_o = 0;  // s_l, r_l, <u, v_l>, <d_o, v_l>
};

inline Layer LayerOf(const RowSums& sums, const Options& options, int64_t channels) {
  const double mean = sums.squares / static_cast<double>(channels) + options.eps;
  const double inverse = mean == 0 ? 0 : 1 / std::sqrt(mean);
  return {options.scale * inverse * sums.with_u, inverse, sums.with_u, sums.with_d_o};
}

template <class S>
const S* RowOf(const ConstTensorView& t, int64_t layer, int64_t token) {
  return t.as<S>() + layer * t.stride(0) + TokenOffset(t, 1, t.rank() - 1, token);
}
template <class S>
S* RowOf(const TensorView& t, int64_t layer, int64_t token) {
  return t.as<S>() + layer * t.stride(0) + TokenOffset(t, 1, t.rank() - 1, token);
}

// Writes u = weight .* query, with zeros behind it.
template <class T>
void ScaleQuery(const Inputs& in, T* u) {
  const int64_t channels = in.query.size(0);
  for (int64_t c = 0; c < channels; ++c) {
    const double q = LoadAsDouble(in.query.dtype(), in.query.data(), c * in.query.stride(0));
    const double w =
        in.weight.present() ? LoadAsDouble(in.weight.dtype(), in.weight.data(), c * in.weight.stride(0)) : 1;
    u[c] = static_cast<T>(q * w);
  }
  std::fill_n(u + channels, kSpare, T{0});
}

}  // namespace heed::attention_residual
#endif  // HEED_OPS_EXACT_ATTENTION_RESIDUAL_ROWS_ONCE_

HWY_BEFORE_NAMESPACE();
namespace heed::attention_residual::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// Calls f(T(), S()) for the types of the computation and of residuals.
template <class F>
HWY_INLINE void WithTypes(const Inputs& in, const F& f) {
  if (in.residuals.dtype() == DType::kF64) return f(double(), double());
  hs::WithStorage<float>(in.residuals.dtype(), [&](auto of_rows) HWY_ATTR { f(float(), of_rows); });
}

// Calls f(c, whole) for the first channel of each vector: `whole` is a constant, false for the rest of a row.
template <int64_t N, class F>
HWY_INLINE void ForVectors(int64_t channels, const F& f) {
  int64_t c = 0;
  for (; c + N <= channels; c += N) f(c, std::true_type());
  if (c < channels) f(c, std::false_type());
}

// Calls f(l, count) for layers [l, l + count), with a constant count of at most kLayers.
template <int64_t R = kLayers, class F>
HWY_INLINE void ForLayers(int64_t l, int64_t layers, const F& f) {
  for (; l + R <= layers; l += R) f(l, std::integral_constant<int64_t, R>());
  if constexpr (R > 1) {
    if (l < layers) ForLayers<R - 1>(l, layers, f);
  }
}

template <class D, class S>
HWY_INLINE hn::Vec<D> LoadOf(D d, const S* from, int64_t left, std::true_type /*whole*/) {
  (void)left;
  return hs::LoadWide(d, from);
}
template <class D, class S>
HWY_INLINE hn::Vec<D> LoadOf(D d, const S* from, int64_t left, std::false_type /*whole*/) {
  return hs::LoadWideN(d, from, static_cast<size_t>(left));
}

// The sums of a row. Two or four accumulators each hide the latency of the additions.
template <bool kWithGradient, class T, class S>
HWY_INLINE RowSums SumsOf(const S* HWY_RESTRICT v, const T* HWY_RESTRICT u, const S* HWY_RESTRICT d_o, DType dtype,
                          double eps, int64_t channels) {
  const hn::ScalableTag<T> d;
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>()), kUnroll = kWithGradient ? 2 : 4;
  auto squares0 = hn::Zero(d), squares1 = squares0, squares2 = squares0, squares3 = squares0;
  auto with_u0 = squares0, with_u1 = squares0, with_u2 = squares0, with_u3 = squares0;
  auto with_d_o0 = squares0, with_d_o1 = squares0;
  const auto add = [&](int64_t c, auto& squares, auto& with_u, auto& with_d_o) HWY_ATTR {
    const auto x = hs::LoadWide(d, v + c);
    squares = hn::MulAdd(x, x, squares);
    with_u = hn::MulAdd(x, hn::LoadU(d, u + c), with_u);
    if constexpr (kWithGradient) with_d_o = hn::MulAdd(x, hs::LoadWide(d, d_o + c), with_d_o);
  };
  int64_t c = 0;
  for (; c + kUnroll * N <= channels; c += kUnroll * N) {
    add(c, squares0, with_u0, with_d_o0);
    add(c + N, squares1, with_u1, with_d_o1);
    if constexpr (!kWithGradient) {
      add(c + 2 * N, squares2, with_u2, with_d_o0);
      add(c + 3 * N, squares3, with_u3, with_d_o1);
    }
  }
  for (; c < channels; c += N) {
    const auto n = static_cast<size_t>(std::min(N, channels - c));
    const auto x = hs::LoadWideN(d, v + c, n);
    squares0 = hn::MulAdd(x, x, squares0);
    with_u0 = hn::MulAdd(x, hn::LoadU(d, u + c), with_u0);
    if constexpr (kWithGradient) with_d_o0 = hn::MulAdd(x, hs::LoadWideN(d, d_o + c, n), with_d_o0);
  }
  const auto sum = [&](auto a, auto b, auto e, auto f) HWY_ATTR {
    return static_cast<double>(hn::ReduceSum(d, hn::Add(hn::Add(a, b), hn::Add(e, f))));
  };
  const RowSums sums = {sum(squares0, squares1, squares2, squares3), sum(with_u0, with_u1, with_u2, with_u3),
                        kWithGradient ? sum(with_d_o0, with_d_o1, hn::Zero(d), hn::Zero(d)) : 0};
  if constexpr (std::is_same_v<T, float>) {
    constexpr double kSmall = 1e-25;  // far above squares that f32 flushes
    const bool flushed = sums.squares < kSmall && eps < kSmall;
    if (flushed || !std::isfinite(sums.squares + sums.with_u + sums.with_d_o)) {
      return WideSums(v, u, kWithGradient ? d_o : nullptr, dtype, channels);
    }
  }
  return sums;
}

void ComputeRowsImpl(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  WithTypes(in, [&](auto computed, auto of_rows) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(of_rows);
    const hn::ScalableTag<T> d;
    constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
    const ConstTensorView& v = in.residuals;
    const DType dtype = v.dtype();
    const int64_t layers = v.size(0), channels = in.query.size(0), tokens = NumTokens(in);
    RowsMemory(in).Make(ctx);
    T* HWY_RESTRICT u = SharedRows<T>(in, false, ctx.Shared()).u;
    ScaleQuery(in, u);
    ctx.ParallelFor((tokens + kTokens - 1) / kTokens, [&](int64_t task, int worker) HWY_ATTR {
      const RowScratch<T> scratch(in, ctx.Scratch(worker));
      T* HWY_RESTRICT sum = scratch.sum;
      double* HWY_RESTRICT logits = scratch.logits;
      for (int64_t token = task * kTokens; token < std::min(tokens, (task + 1) * kTokens); ++token) {
        double most = -std::numeric_limits<double>::infinity(), total = 0;
        ForLayers(0, layers, [&](int64_t first, auto count) HWY_ATTR {
          constexpr int64_t R = count.value;
          const S* rows[R];
          const double before = most;
          for (int64_t r = 0; r < R; ++r) {
            rows[r] = RowOf<S>(v, first + r, token);
            const RowSums sums = SumsOf<false>(rows[r], u, rows[r], dtype, options.eps, channels);
            logits[first + r] = LayerOf(sums, options, channels).logit;
            if (logits[first + r] > most) most = logits[first + r];
          }
          const double keeps = first == 0 ? 0 : std::exp(before - most);
          total *= keeps;
          T shares[R];
          for (int64_t r = 0; r < R; ++r) {
            const double share = std::exp(logits[first + r] - most);
            total += share;
            shares[r] = static_cast<T>(share);
          }
          const auto kept = hn::Set(d, static_cast<T>(keeps));
          ForVectors<N>(channels, [&](int64_t c, auto whole) HWY_ATTR {
            auto term = hn::Mul(hn::Set(d, shares[0]), LoadOf(d, rows[0] + c, channels - c, whole));
            for (int64_t r = 1; r < R; ++r) {
              term = hn::MulAdd(hn::Set(d, shares[r]), LoadOf(d, rows[r] + c, channels - c, whole), term);
            }
            if (first > 0) term = hn::MulAdd(kept, hn::LoadU(d, sum + c), term);
            hn::StoreU(term, d, sum + c);
          });
        });
        const auto inverse = hn::Set(d, static_cast<T>(1 / total));
        S* HWY_RESTRICT o = out.o.as<S>() + TokenOffset(out.o, 0, out.o.rank() - 1, token);
        for (int64_t c = 0; c < channels; c += N) {
          const auto n = static_cast<size_t>(std::min(N, channels - c));
          hs::StoreRounded(d, hn::Mul(inverse, hn::LoadU(d, sum + c)), o + c, n);
        }
        if (!out.weights.present()) continue;
        const int64_t begin = TokenOffset(out.weights, 1, out.weights.rank(), token);
        for (int64_t l = 0; l < layers; ++l) {
          StoreDouble(out.weights.dtype(), out.weights.data(), begin + l * out.weights.stride(0),
                      std::exp(logits[l] - most) / total);
        }
      }
    });
  });
}

void ComputeRowGradientsImpl(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  WithTypes(in, [&](auto computed, auto of_rows) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(of_rows);
    const hn::ScalableTag<T> d;
    constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
    const ConstTensorView& v = in.residuals;
    const DType dtype = v.dtype();
    const int64_t layers = v.size(0), channels = in.query.size(0), tokens = NumTokens(in);
    const bool sums_over_tokens = out.dquery.present() || out.dweight.present();
    RowGradientsMemory(in, sums_over_tokens).Make(ctx);
    const SharedRows<T> shared(in, sums_over_tokens, ctx.Shared());
    const int64_t tasks = shared.tasks, padded = shared.padded;
    const T* HWY_RESTRICT u = shared.u;
    ScaleQuery(in, shared.u);
    ctx.ParallelFor(tasks, [&](int64_t task, int worker) HWY_ATTR {
      Layer* HWY_RESTRICT of = static_cast<Layer*>(ctx.Scratch(worker));
      T* HWY_RESTRICT partial = sums_over_tokens ? shared.partial + task * padded : nullptr;
      if (partial != nullptr) std::fill_n(partial, padded, T{0});
      for (int64_t token = task * kTokens; token < std::min(tokens, (task + 1) * kTokens); ++token) {
        const S* HWY_RESTRICT d_o = in.d_o.as<S>() + TokenOffset(in.d_o, 0, in.d_o.rank() - 1, token);
        double most = -std::numeric_limits<double>::infinity(), total = 0, mean = 0;
        for (int64_t l = 0; l < layers; ++l) {
          of[l] = LayerOf(SumsOf<true>(RowOf<S>(v, l, token), u, d_o, dtype, options.eps, channels), options, channels);
          if (of[l].logit > most) most = of[l].logit;
        }
        for (int64_t l = 0; l < layers; ++l) total += of[l].logit = std::exp(of[l].logit - most);
        for (int64_t l = 0; l < layers; ++l) mean += (of[l].logit /= total) * of[l].with_d_o;
        ForLayers(0, layers, [&](int64_t first, auto count) HWY_ATTR {
          constexpr int64_t R = count.value;
          const S* rows[R];
          S* dv[R];
          T share[R], of_u[R], of_v[R];
          for (int64_t i = 0; i < R; ++i) {
            const Layer& layer = of[first + i];
            const double p = layer.logit, r = layer.inverse, a = options.scale * r * p * (layer.with_d_o - mean);
            share[i] = static_cast<T>(p);
            of_u[i] = static_cast<T>(a);
            of_v[i] = static_cast<T>(a * r * r * layer.with_u / static_cast<double>(channels));
            rows[i] = RowOf<S>(v, first + i, token);
            dv[i] = out.dresiduals.present() ? RowOf<S>(out.dresiduals, first + i, token) : nullptr;
          }
          ForVectors<N>(channels, [&](int64_t c, auto whole) HWY_ATTR {
            const auto n = static_cast<size_t>(whole.value ? N : channels - c);
            const auto of_o = LoadOf(d, d_o + c, channels - c, whole), query = hn::LoadU(d, u + c);
            auto sum = hn::Zero(d);
            for (int64_t i = 0; i < R; ++i) {
              const auto x = LoadOf(d, rows[i] + c, channels - c, whole), a = hn::Set(d, of_u[i]);
              sum = hn::MulAdd(a, x, sum);
              if (dv[0] == nullptr) continue;
              const auto of_logit = hn::NegMulAdd(hn::Set(d, of_v[i]), x, hn::Mul(a, query));
              hs::StoreRounded(d, hn::MulAdd(hn::Set(d, share[i]), of_o, of_logit), dv[i] + c, n);
            }
            if (partial != nullptr) hn::StoreU(hn::Add(sum, hn::LoadU(d, partial + c)), d, partial + c);
          });
        });
      }
    });
    for (int64_t c = 0; c < channels && sums_over_tokens; ++c) {
      double sum = 0;
      for (int64_t task = 0; task < tasks; ++task) sum += static_cast<double>(shared.partial[task * padded + c]);
      const double q = LoadAsDouble(in.query.dtype(), in.query.data(), c * in.query.stride(0));
      const double w =
          in.weight.present() ? LoadAsDouble(in.weight.dtype(), in.weight.data(), c * in.weight.stride(0)) : 1;
      const auto store = [&](const TensorView& t, double value) {
        if (t.present()) StoreDouble(t.dtype(), t.data(), c * t.stride(0), value);
      };
      store(out.dquery, w * sum);
      store(out.dweight, q * sum);
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::attention_residual::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::attention_residual {

mechanism::Reservation RowsMemory(const Inputs& in) {
  const auto of = [&](auto computed) -> mechanism::Reservation {
    using T = decltype(computed);
    return {.per_thread = RowScratch<T>(in, nullptr).bytes, .shared = SharedRows<T>(in, false, nullptr).bytes};
  };
  return in.residuals.dtype() == DType::kF64 ? of(double()) : of(float());
}

mechanism::Reservation RowGradientsMemory(const Inputs& in, bool sums) {
  const int64_t shared = in.residuals.dtype() == DType::kF64 ? SharedRows<double>(in, sums, nullptr).bytes
                                                             : SharedRows<float>(in, sums, nullptr).bytes;
  return {.per_thread = in.residuals.size(0) * int64_t{sizeof(Layer)}, .shared = shared};
}

HWY_EXPORT(ComputeRowsImpl);
HWY_EXPORT(ComputeRowGradientsImpl);

void ComputeRows(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  HWY_DISPATCH_TABLE(ComputeRowsImpl)[TargetIndex(ctx.allowed_targets())](ctx, in, options, out);
}

void ComputeRowGradients(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  HWY_DISPATCH_TABLE(ComputeRowGradientsImpl)[TargetIndex(ctx.allowed_targets())](ctx, in, options, out);
}

}  // namespace heed::attention_residual
#endif  // HWY_ONCE

// The computations of SSD beside its recurrence: time steps, the gate, sums over tokens.
//
// All memory-bound, with rows of P channels read and written once, except for the time steps: one softplus per token
// and head against 4 N P flops.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/ops/ssm/ssd/ssd_kernels_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/ssm/ssd/ssd_kernels.cc"  // this file
#include "hwy/foreach_target.h"                               // IWYU pragma: keep
// After foreach_target.h:
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "hwy/cache_control.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::ssd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

constexpr size_t kStretch = 64;  // tokens per iteration, and per sum in the accumulation dtype
constexpr int64_t kAhead = 8;    // prefetch distance in tokens

template <class S, class View>
HWY_INLINE S* At(const View& t, int64_t b, int64_t token, int64_t head) {
  return const_cast<S*>(static_cast<const S*>(t.data())) + b * t.stride(0) + token * t.stride(1) + head * t.stride(2);
}

// Loads n elements, one per token.
template <class T>
HWY_INLINE void Gather(const ConstTensorView& t, int64_t b, int64_t token, int64_t head, size_t n, T* to) {
  const hn::CappedTag<T, 1> d1;
  hs::WithStorage<T>(t.dtype(), [&](auto stored) HWY_ATTR {
    const auto* from = At<decltype(stored)>(t, b, token, head);
    for (size_t i = 0; i < n; ++i, from += t.stride(1)) {
      to[i] = hn::GetLane(hs::LoadWideN(d1, from, 1));
    }
  });
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Softplus(D d, V x) {
  const V positive = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Zero(d), x);
  return hn::Add(positive, hn::Log1p(d, hs::Exp(d, hn::Neg(hn::Abs(x)))));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Sigmoid(D d, V x) {
  const V one = hn::Set(d, hn::TFromD<D>{1});
  return hn::Div(one, hn::Add(one, hs::Exp(d, hn::Neg(x))));
}

template <class T>
HWY_ATTR void TimeSteps(const Elements& e, const mechanism::TokenRange& range, int64_t head) {
  const hn::ScalableTag<T> d;
  const auto h = static_cast<size_t>(head);
  const auto bias = hn::Set(d, static_cast<T>(e.bias[h]));
  const auto A = hn::Set(d, static_cast<T>(e.A[h]));
  const auto low = hn::Set(d, static_cast<T>(e.dt_min));
  const auto high = hn::Set(d, static_cast<T>(e.dt_max));
  HWY_ALIGN T raw[kStretch] = {};
  for (int64_t begin = range.begin; begin < range.end; begin += kStretch) {
    const size_t n = static_cast<size_t>(std::min<int64_t>(kStretch, range.end - begin));
    Gather(e.in.dt, range.batch, begin, head, n, raw);
    T* delta = At<T>(e.delta, range.batch, begin, head);
    T* log_decay = At<T>(e.log_decay, range.batch, begin, head);
    for (size_t i = 0; i < n; i += hn::MaxLanes(d)) {
      auto x = hn::Add(hn::Load(d, raw + i), bias);
      if (e.softplus) x = Softplus(d, x);
      x = hn::IfThenElse(hn::Lt(x, low), low, x);  // keeps a NaN
      x = hn::IfThenElse(hn::Gt(x, high), high, x);
      const size_t lanes = HWY_MIN(hn::MaxLanes(d), n - i);
      hn::StoreN(x, d, delta + i, lanes);
      hn::StoreN(hn::Mul(x, A), d, log_decay + i, lanes);
    }
  }
}

// Computes, for one token and head, dz, and dy in place of y.
template <class T>
HWY_ATTR void GateGradients(const Elements& e, int64_t b, int64_t token, int64_t head) {
  const hn::ScalableTag<T> d;
  const auto P = static_cast<size_t>(e.channels);
  T* y = At<T>(e.y, b, token, head);
  hs::WithStorage<T>(e.in.z.dtype(), [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    const S* z_row = At<S>(e.in.z, b, token, head);
    const S* d_o = At<S>(e.d_o, b, token, head);
    S* dz = e.out.z.present() ? At<S>(e.out.z, b, token, head) : nullptr;
    for (size_t i = 0; i < P; i += hn::MaxLanes(d)) {
      const size_t lanes = HWY_MIN(hn::MaxLanes(d), P - i);
      const auto z = hs::LoadWideN(d, z_row + i, lanes);
      const auto gradient = hs::LoadWideN(d, d_o + i, lanes);
      const auto sigmoid = Sigmoid(d, z), one = hn::Set(d, T{1});
      if (dz != nullptr) {  // silu' = s (1 + z (1 - s))
        const auto slope = hn::Mul(sigmoid, hn::MulAdd(z, hn::Sub(one, sigmoid), one));
        hs::StoreRounded(d, hn::Mul(hn::Mul(gradient, hn::LoadN(d, y + i, lanes)), slope), dz + i, lanes);
      }
      hn::StoreN(hn::Mul(gradient, hn::Mul(z, sigmoid)), d, y + i, lanes);
    }
  });
}

// Prefetches a row of n elements, since rows of one head are far apart.
template <class S>
HWY_INLINE void Ask(const S* row, size_t n) {
  for (size_t i = 0; i < n; i += 64 / sizeof(S)) hwy::Prefetch(row + i);
}

// The sums of a head over one sequence.
struct Sums {
  double A = 0, bias = 0;
  std::vector<double> D;
};

template <class T>
HWY_ATTR void Finish(const Elements& e, const mechanism::TokenRange& range, int64_t head, T* d_sum, Sums& sums) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  const auto P = static_cast<size_t>(e.channels), h = static_cast<size_t>(head);
  const double A = e.A[h];
  const T* skip = e.skip.present() ? static_cast<const T*>(e.skip.data()) + head * e.channels : nullptr;
  const bool staged = e.y.present();
  HWY_ALIGN T raw[kStretch] = {}, of_steps[kStretch] = {};
  for (int64_t begin = range.begin; begin < range.end; begin += kStretch) {
    const size_t n = static_cast<size_t>(std::min<int64_t>(kStretch, range.end - begin));
    const T* delta = At<T>(e.delta, range.batch, begin, head);
    const T* dg = At<T>(e.d_log_decay, range.batch, begin, head);
    std::fill_n(d_sum, P + N, T{0});
    hs::WithStorage<T>(e.in.x.dtype(), [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      for (size_t t = 0; t < n; ++t) {
        const int64_t token = begin + static_cast<int64_t>(t);
        const S* x = At<S>(e.in.x, range.batch, token, head);
        const T* dv = At<T>(e.dv, range.batch, token, head);
        S* dx = e.out.x.present() ? At<S>(e.out.x, range.batch, token, head) : nullptr;
        if (const int64_t ahead = token + kAhead; ahead < range.end) {
          Ask(At<S>(e.in.x, range.batch, ahead, head), P);
          Ask(At<T>(e.dv, range.batch, ahead, head), P);
          if (skip != nullptr && !staged) Ask(At<S>(e.d_o, range.batch, ahead, head), P);
          if (dx != nullptr) Ask(At<S>(e.out.x, range.batch, ahead, head), P);
        }
        auto dot = hn::Zero(d);
        for (size_t i = 0; i < P; i += N) {
          const size_t lanes = HWY_MIN(N, P - i);
          const auto x_i = hs::LoadWideN(d, x + i, lanes), dv_i = hn::LoadN(d, dv + i, lanes);
          dot = hn::MulAdd(dv_i, x_i, dot);
          auto gradient = hn::Mul(hn::Set(d, delta[t]), dv_i);
          if (skip != nullptr) {
            const auto dy = staged ? hn::LoadN(d, At<T>(e.y, range.batch, token, head) + i, lanes)
                                   : hs::LoadWideN(d, At<S>(e.d_o, range.batch, token, head) + i, lanes);
            gradient = hn::MulAdd(hn::LoadN(d, skip + i, lanes), dy, gradient);
            hn::StoreU(hn::MulAdd(dy, x_i, hn::LoadU(d, d_sum + i)), d, d_sum + i);
          }
          if (dx != nullptr) hs::StoreRounded(d, gradient, dx + i, lanes);
        }
        of_steps[t] = hn::ReduceSum(d, dot) + static_cast<T>(A) * dg[t];
      }
    });
    Gather(e.in.dt, range.batch, begin, head, n, raw);
    const auto bias = hn::Set(d, static_cast<T>(e.bias[h]));
    for (size_t i = 0; i < n; i += N) {
      const auto x = hn::Add(hn::Load(d, raw + i), bias);
      auto value = x, gradient = hn::Load(d, of_steps + i);
      if (e.softplus) {
        value = Softplus(d, x);
        gradient = hn::Mul(gradient, Sigmoid(d, x));
      }
      const auto clamped = hn::Or(hn::Lt(value, hn::Set(d, static_cast<T>(e.dt_min))),
                                  hn::Gt(value, hn::Set(d, static_cast<T>(e.dt_max))));
      hn::Store(hn::IfThenZeroElse(clamped, gradient), d, of_steps + i);
    }
    for (size_t t = 0; t < n; ++t) {
      sums.A += static_cast<double>(dg[t]) * static_cast<double>(delta[t]);
      sums.bias += static_cast<double>(of_steps[t]);
    }
    for (size_t i = 0; i < P; ++i) sums.D[i] += static_cast<double>(d_sum[i]);
    if (!e.out.dt.present()) continue;
    const hn::CappedTag<T, 1> d1;
    hs::WithStorage<T>(e.out.dt.dtype(), [&](auto stored) HWY_ATTR {
      auto* to = At<decltype(stored)>(e.out.dt, range.batch, begin, head);
      for (size_t t = 0; t < n; ++t, to += e.out.dt.stride(1)) {
        hs::StoreRounded(d1, hn::Set(d1, of_steps[t]), to, 1);
      }
    });
  }
}

template <class T>
void FinishAll(Context& ctx, const Elements& e) {
  const auto H = static_cast<size_t>(e.heads), P = static_cast<size_t>(e.channels);
  std::vector<Sums> sums(e.ranges.size() * H);
  for (Sums& of : sums) of.D.resize(P);
  ctx.ReserveScratch((e.channels + 128) * int64_t{sizeof(T)});
  ctx.ParallelFor(static_cast<int64_t>(sums.size()), [&](int64_t task, int worker) HWY_ATTR {
    const auto at = static_cast<size_t>(task);
    Finish<T>(e, e.ranges[at / H], static_cast<int64_t>(at % H), static_cast<T*>(ctx.Scratch(worker)), sums[at]);
  });
  // Sequences are added in order.
  const bool by_channel = e.out.D.present() && e.out.D.rank() == 2;
  for (size_t h = 0; h < H; ++h) {
    Sums total;
    total.D.resize(P);
    for (size_t i = 0; i < e.ranges.size(); ++i) {
      const Sums& of = sums[i * H + h];
      total.A += of.A;
      total.bias += of.bias;
      for (size_t p = 0; p < P; ++p) total.D[p] += of.D[p];
    }
    const auto put = [&](const TensorView& t, int64_t channel, double value) {
      if (!t.present()) return;
      const int64_t at = static_cast<int64_t>(h) * t.stride(0) + (t.rank() == 2 ? channel * t.stride(1) : 0);
      StoreDouble(t.dtype(), t.data(), at, value);
    };
    put(e.out.A, 0, total.A);
    put(e.out.dt_bias, 0, total.bias);
    double whole = 0;
    for (size_t p = 0; p < P; ++p) {
      whole += total.D[p];
      if (by_channel) put(e.out.D, static_cast<int64_t>(p), total.D[p]);
    }
    if (!by_channel) put(e.out.D, 0, whole);
  }
}

template <class T>
void TimeStepsOf(Context& ctx, const Elements& e) {
  for (size_t i = 0; i < e.D.size(); ++i) {
    static_cast<T*>(e.skip.data())[i] = static_cast<T>(e.D[i]);
  }
  ctx.ParallelFor(static_cast<int64_t>(e.ranges.size()) * e.heads, [&](int64_t task, int) HWY_ATTR {
    TimeSteps<T>(e, e.ranges[static_cast<size_t>(task / e.heads)], task % e.heads);
  });
}

template <class T>
void GateGradientsOf(Context& ctx, const Elements& e) {
  constexpr int64_t kTokens = 16;  // tokens per task
  for (const mechanism::TokenRange& range : e.ranges) {
    const int64_t tasks = (range.end - range.begin + kTokens - 1) / kTokens;
    ctx.ParallelFor(tasks, [&](int64_t task, int) HWY_ATTR {
      const int64_t begin = range.begin + task * kTokens;
      for (int64_t t = begin; t < std::min(begin + kTokens, range.end); ++t) {
        for (int64_t h = 0; h < e.heads; ++h) GateGradients<T>(e, range.batch, t, h);
      }
    });
  }
}

enum class Pass { kTimeSteps, kGate, kFinish };

void Run(Context& ctx, const Elements& e, Pass pass) {
  const auto of = [&](auto type) {
    using T = decltype(type);
    switch (pass) {
      case Pass::kTimeSteps: return TimeStepsOf<T>(ctx, e);
      case Pass::kGate: return GateGradientsOf<T>(ctx, e);
      case Pass::kFinish: return FinishAll<T>(ctx, e);
    }
  };
  if (e.compute == DType::kF64) {
    of(double());
  } else {
    of(float());
  }
}

void RunTimeSteps(Context& ctx, const Elements& e) { Run(ctx, e, Pass::kTimeSteps); }
void RunGate(Context& ctx, const Elements& e) { Run(ctx, e, Pass::kGate); }
void RunFinish(Context& ctx, const Elements& e) { Run(ctx, e, Pass::kFinish); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::ssd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::ssd {

HWY_EXPORT(RunTimeSteps);
HWY_EXPORT(RunGate);
HWY_EXPORT(RunFinish);

void ComputeTimeSteps(Context& ctx, const Elements& e) {
  if (e.in.x.device().type == DeviceType::kCuda) return cuda::ComputeTimeSteps(ctx, e);
  HWY_DISPATCH_TABLE(RunTimeSteps)[TargetIndex(ctx.allowed_targets())](ctx, e);
}

void ComputeGateGradients(Context& ctx, const Elements& e) {
  if (e.in.x.device().type == DeviceType::kCuda) return cuda::ComputeGateGradients(ctx, e);
  HWY_DISPATCH_TABLE(RunGate)[TargetIndex(ctx.allowed_targets())](ctx, e);
}

void FinishGradients(Context& ctx, const Elements& e) {
  if (e.in.x.device().type == DeviceType::kCuda) return cuda::FinishGradients(ctx, e);
  HWY_DISPATCH_TABLE(RunFinish)[TargetIndex(ctx.allowed_targets())](ctx, e);
}

}  // namespace heed::ssd
#endif  // HWY_ONCE

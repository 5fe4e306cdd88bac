// The keys that a preconditioned delta rule writes, for every SIMD target.
//
// A task owns one key head of one sequence. The chain from token to token is one multiply-add per channel; a logarithm,
// an exponential and a division per channel and token, which do not depend on each other, are the bound: about 45
// instructions per vector, where the recurrence has 3 V multiply-adds per channel. A is updated as A + (exp(g) - 1) A
// where the decay is near 1, so that a rounding of exp(g), equal for many tokens, does not add up.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "heed/core/carver.h"
#include "heed/core/dispatch.h"
#include "heed/mechanism/key_preconditioner_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/mechanism/key_preconditioner.cc"  // this file
#include "hwy/foreach_target.h"                                    // IWYU pragma: keep
// After foreach_target.h:
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrent::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/
using recurrence::Rows;
using recurrence::Sequence;
using recurrence::States;

constexpr int64_t kBlock = 64;  // tokens whose gates are computed together

template <class S>
HWY_INLINE S* RowAt(const Rows& rows, const Sequence& s, int64_t head, int64_t token) {
  return const_cast<S*>(static_cast<const S*>(rows.data)) + s.batch * rows.batch_stride +
         (s.first + token) * rows.token_stride + head * rows.head_stride;
}

template <class T>
HWY_INLINE T* StateAt(const States& states, const Sequence& s, int64_t head) {
  return const_cast<T*>(static_cast<const T*>(states.data)) + s.state * states.sequence_stride +
         head * states.head_stride;
}

template <class T>
void LoadState(const States& states, const Sequence& s, int64_t head, size_t size, T* to) {
  if (states.data == nullptr) return;
  const T* from = StateAt<T>(states, s, head);
  for (size_t i = 0; i < size; ++i) to[i] = from[static_cast<int64_t>(i) * states.key_stride];
}

template <class T>
void StoreState(const States& states, const Sequence& s, int64_t head, size_t size, const T* from) {
  if (states.data == nullptr) return;
  T* to = StateAt<T>(states, s, head);
  for (size_t i = 0; i < size; ++i) to[static_cast<int64_t>(i) * states.key_stride] = from[i];
}

// The gates of a block of tokens.
template <class T>
struct Gates {
  static constexpr size_t kLanes = hn::MaxLanes(hn::ScalableTag<T>());
  HWY_ALIGN T decay[kBlock], factor[kBlock], rate[kBlock];  // exp(g); what multiplies A; b
  bool adds[kBlock];                                        // the factor is exp(g) - 1, and is added to 1

  HWY_ATTR void Load(const KeyPreconditioner& keys, const Sequence& s, int64_t head, int64_t first, size_t n) {
    const hn::ScalableTag<T> d;
    HWY_ALIGN T g[kBlock] = {};
    const auto read = [&](const Rows& rows, T* to) {
      for (size_t t = 0; t < n; ++t) {
        const auto token = s.first + first + static_cast<int64_t>(t);
        const int64_t at = s.batch * rows.batch_stride + token * rows.token_stride + head * rows.head_stride;
        to[t] = static_cast<T>(LoadAsDouble(rows.dtype, rows.data, at));
      }
    };
    read(keys.log_decay, g);
    read(keys.rate, rate);
    for (size_t t = 0; t < n; t += kLanes) {
      const auto zero = hn::Zero(d);
      auto x = hn::Load(d, g + t);
      x = hn::IfThenElse(hn::Gt(x, zero), zero, x);  // NaN propagates
      const auto a = hs::Exp(d, x);
      const auto is_near = hn::Gt(a, hn::Set(d, T{0.5}));
      hn::Store(a, d, decay + t);
      hn::Store(hn::IfThenElse(is_near, hs::Expm1(d, x), a), d, factor + t);
    }
    for (size_t t = 0; t < n; ++t) adds[t] = decay[t] > T{0.5};
  }
  // exp(g_t) x.
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Decayed(D d, V x, size_t t) const {
    const V f = hn::Set(d, factor[t]);
    return adds[t] ? hn::MulAdd(f, x, x) : hn::Mul(f, x);
  }
};

// r of A + eps. NaN for what is not positive and finite.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Deviation(D d, V sum, V center) {
  using T = hn::TFromD<D>;
  const V inside = hn::Min(hn::Max(sum, hn::Set(d, std::numeric_limits<T>::min())), hn::Set(d, hwy::HighestValue<T>()));
  const V log = hn::Log(d, inside);
  return hn::Sub(hn::IfThenElse(hn::Eq(inside, sum), log, hn::Set(d, std::numeric_limits<T>::quiet_NaN())), center);
}

template <class T>
HWY_ATTR void WriteHead(const KeyPreconditioner& keys, const Sequence& s, int64_t head, T* state) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  const auto size = static_cast<size_t>(keys.size);
  const auto center = hn::Set(d, static_cast<T>(keys.center[static_cast<size_t>(head)]));
  const auto eps = hn::Set(d, static_cast<T>(keys.eps)), one = hn::Set(d, T{1});
  const auto minus_log = hn::Set(d, static_cast<T>(-keys.log_bound));
  std::memset(state, 0, (size + N - 1) / N * N * sizeof(T));
  LoadState(keys.initial, s, head, size, state);
  Gates<T> gates;
  hs::WithStorage<T>(keys.k.dtype, [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    for (int64_t first = 0; first < s.count; first += kBlock) {
      const auto n = static_cast<size_t>(std::min<int64_t>(kBlock, s.count - first));
      gates.Load(keys, s, head, first, n);
      for (size_t i = 0; i < size; i += N) {
        const size_t lanes = HWY_MIN(N, size - i);
        auto A = hn::Load(d, state + i);
        for (size_t t = 0; t < n; ++t) {
          const int64_t token = first + static_cast<int64_t>(t);
          const S* from = RowAt<S>(keys.k, s, head, token) + i;
          const auto k = lanes == N ? hs::LoadWide(d, from) : hs::LoadWideN(d, from, lanes);
          A = hn::MulAdd(hn::Mul(hn::Set(d, gates.rate[t]), k), k, gates.Decayed(d, A, t));
          const auto r = Deviation(d, hn::Add(A, eps), center);
          const auto share = hs::FastDivide(d, r, hn::Add(one, hn::Abs(r)));
          const auto M = hs::Exp(d, hn::Mul(minus_log, share));
          hs::StoreRounded(d, hn::Mul(M, k), RowAt<T>(keys.written, s, head, token) + i, lanes);
          if (keys.curvature.data != nullptr) {
            hs::StoreRounded(d, A, RowAt<T>(keys.curvature, s, head, token) + i, lanes);
          }
        }
        hn::Store(A, d, state + i);
      }
    }
  });
  StoreState(keys.final, s, head, size, state);
}

// The memory of a task of the backward pass: dA, A before the first token, and sums of the tokens of a block by lane.
template <class T>
struct BackwardBuffers {
  T *d_state, *before, *of_decays, *of_rates;

  int64_t LayOut(int64_t size, void* base) {
    constexpr auto N = static_cast<int64_t>(hn::MaxLanes(hn::ScalableTag<T>()));
    Carver carver(base);
    carver.Next(d_state, size + N);
    carver.Next(before, size + N);
    carver.Next(of_decays, kBlock * N);
    carver.Next(of_rates, kBlock * N);
    return carver.bytes();
  }
};

// dA_t gets what M_t has of it, and is then multiplied by the decay. Returns the gradient of the center.
template <class T>
HWY_ATTR double HeadBackward(const KeyPreconditioner& keys, const Sequence& s, int64_t head,
                             const BackwardBuffers<T>& b) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  const auto size = static_cast<size_t>(keys.size);
  const auto center = hn::Set(d, static_cast<T>(keys.center[static_cast<size_t>(head)]));
  const auto eps = hn::Set(d, static_cast<T>(keys.eps)), one = hn::Set(d, T{1}), two = hn::Set(d, T{2});
  const auto minus_log = hn::Set(d, static_cast<T>(-keys.log_bound));
  for (T* state : {b.d_state, b.before}) std::memset(state, 0, (size + N) * sizeof(T));
  LoadState(keys.d_final, s, head, size, b.d_state);
  LoadState(keys.initial, s, head, size, b.before);
  double d_center = 0;
  Gates<T> gates;
  const auto load = [&](const Rows& rows, int64_t token, size_t i, size_t lanes) HWY_ATTR {
    const T* from = RowAt<T>(rows, s, head, token) + i;
    return lanes == N ? hn::LoadU(d, from) : hn::LoadN(d, from, lanes);
  };
  hs::WithStorage<T>(keys.k.dtype, [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    for (int64_t end = s.count; end > 0;) {
      const int64_t first = (end - 1) / kBlock * kBlock;
      const auto n = static_cast<size_t>(end - first);
      end = first;
      gates.Load(keys, s, head, first, n);
      for (T* sums : {b.of_decays, b.of_rates}) std::memset(sums, 0, n * N * sizeof(T));
      auto of_center = hn::Zero(d);
      for (size_t i = 0; i < size; i += N) {
        const size_t lanes = HWY_MIN(N, size - i);
        auto dA = hn::Load(d, b.d_state + i);
        for (size_t t = n; t-- > 0;) {
          const int64_t token = first + static_cast<int64_t>(t);
          const S* from = RowAt<S>(keys.k, s, head, token) + i;
          const auto k = lanes == N ? hs::LoadWide(d, from) : hs::LoadWideN(d, from, lanes);
          const auto sum = hn::Add(load(keys.curvature, token, i, lanes), eps);
          const auto r = Deviation(d, sum, center);
          const auto below = hs::FastDivide(d, one, hn::Add(one, hn::Abs(r)));
          const auto M = hs::Exp(d, hn::Mul(minus_log, hn::Mul(r, below)));
          const auto dw = load(keys.d_written, token, i, lanes);
          const auto Mdw = hn::Mul(M, dw);
          const auto dr = hn::Mul(hn::Mul(minus_log, hn::Mul(below, below)), hn::Mul(Mdw, k));
          of_center = hn::Sub(of_center, dr);
          dA = hn::Add(dA, hn::Div(dr, sum));
          const auto rate_dA = hn::Mul(hn::Set(d, gates.rate[t]), dA);
          if (keys.dk.data != nullptr) {
            auto dk = hn::Add(Mdw, load(keys.d_read, token, i, lanes));
            dk = hn::MulAdd(hn::Mul(two, k), rate_dA, dk);
            hs::StoreRounded(d, dk, RowAt<S>(keys.dk, s, head, token) + i, lanes);
          }
          T* of_rate = b.of_rates + t * N;
          hn::Store(hn::MulAdd(hn::Mul(k, k), dA, hn::Load(d, of_rate)), d, of_rate);
          dA = gates.Decayed(d, dA, t);
          const auto earlier =
              token == 0 ? hn::LoadN(d, b.before + i, lanes) : load(keys.curvature, token - 1, i, lanes);
          T* of_decay = b.of_decays + t * N;
          hn::Store(hn::MulAdd(earlier, dA, hn::Load(d, of_decay)), d, of_decay);
        }
        hn::Store(dA, d, b.d_state + i);
      }
      d_center += static_cast<double>(hn::ReduceSum(d, of_center));
      const auto store = [&](const Rows& rows, const T* sums) HWY_ATTR {
        for (size_t t = 0; rows.data != nullptr && t < n; ++t) {
          const int64_t token = s.first + first + static_cast<int64_t>(t);
          const int64_t at = s.batch * rows.batch_stride + token * rows.token_stride + head * rows.head_stride;
          StoreDouble(rows.dtype, const_cast<void*>(rows.data), at,
                      static_cast<double>(hn::ReduceSum(d, hn::Load(d, sums + t * N))));
        }
      };
      store(keys.d_log_decay, b.of_decays);
      store(keys.d_rate, b.of_rates);
    }
  });
  StoreState(keys.d_initial, s, head, size, b.d_state);
  return d_center;
}

template <class T>
HWY_ATTR void WriteAll(Context& ctx, const KeyPreconditioner& keys) {
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
  ctx.ReserveScratch((keys.size + N) * int64_t{sizeof(T)});
  ctx.ParallelFor(static_cast<int64_t>(keys.sequences->size()) * keys.heads, [&](int64_t task, int worker) HWY_ATTR {
    const Sequence& s = (*keys.sequences)[static_cast<size_t>(task / keys.heads)];
    WriteHead(keys, s, task % keys.heads, static_cast<T*>(ctx.Scratch(worker)));
  });
}

template <class T>
HWY_ATTR void AllBackward(Context& ctx, const KeyPreconditioner& keys) {
  BackwardBuffers<T> none;
  ctx.ReserveScratch(none.LayOut(keys.size, nullptr));
  ctx.ParallelFor(static_cast<int64_t>(keys.sequences->size()) * keys.heads, [&](int64_t task, int worker) HWY_ATTR {
    const Sequence& s = (*keys.sequences)[static_cast<size_t>(task / keys.heads)];
    BackwardBuffers<T> buffers;
    buffers.LayOut(keys.size, ctx.Scratch(worker));
    keys.d_center[task] = HeadBackward(keys, s, task % keys.heads, buffers);
  });
}

void RunWriteKeys(Context& ctx, const KeyPreconditioner& keys) {
  keys.compute == DType::kF64 ? WriteAll<double>(ctx, keys) : WriteAll<float>(ctx, keys);
}
void RunBackward(Context& ctx, const KeyPreconditioner& keys) {
  keys.compute == DType::kF64 ? AllBackward<double>(ctx, keys) : AllBackward<float>(ctx, keys);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrent::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrent {

HWY_EXPORT(RunWriteKeys);
HWY_EXPORT(RunBackward);

void WriteKeys(Context& ctx, const KeyPreconditioner& keys) {
  HWY_DISPATCH_TABLE(RunWriteKeys)[TargetIndex(ctx.allowed_targets())](ctx, keys);
}

void WriteKeysBackward(Context& ctx, const KeyPreconditioner& keys) {
  HWY_DISPATCH_TABLE(RunBackward)[TargetIndex(ctx.allowed_targets())](ctx, keys);
}

}  // namespace heed::recurrent
#endif  // HWY_ONCE

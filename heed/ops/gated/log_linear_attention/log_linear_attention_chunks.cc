// Passes of log-linear attention over chunks of 64 tokens, which end at multiples of 64 from the first token of all.
//
// FMA-bound: a chunk multiplies its tokens by the state of each bit of its position, by each other, and with a sum of
// its own. A state keeps its value of the time when it was made, and a factor for the decays since then, which queries
// take on: between two chunks only the sum of the last one is made.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/carver.h"
#include "heed/core/dispatch.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/gated/log_linear_attention/log_linear_attention_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/gated/log_linear_attention/log_linear_attention_chunks.cc"  // this file
#include "hwy/foreach_target.h"                                                                  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/gated/log_linear_attention/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::log_linear_attention::HWY_NAMESPACE {

// The forward pass of one value head of a sequence.
template <class T, class S>
HWY_INLINE void ForwardHead(const Call& call, const Inputs& in, const Outputs& out, int64_t n, int64_t h,
                            Chunk<T>& chunk) {
  const hn::ScalableTag<T> d;
  const Sequence& s = call.sequences[static_cast<size_t>(n)];
  const int64_t K = call.K, V = call.V, Kp = chunk.Kp, Vp = chunk.Vp, kh = h / (call.G / call.H);
  const int64_t end = s.position + s.end - s.begin;
  chunk.LoadStates(in, n, h, s.position);
  for (int64_t p = s.position; p < end;) {
    const int64_t count = std::min(kTokens - p % kTokens, end - p), token = s.begin + p - s.position;
    LoadChunk<S>(d, call, in, s.batch, token, count, h, kh, chunk);
    std::memset(chunk.o, 0, static_cast<size_t>(count * Vp) * sizeof(T));
    for (int64_t j = 0; p >> j != 0; ++j) {
      if ((p >> j & 1) == 0) continue;
      WeightQueries(d, call, p, count, j, chunk);
      Multiply(d, chunk.qs, Kp, 1, chunk.state[j], Vp, K, count, V, chunk.o, Vp);
    }
    TransposeRows(chunk.k, Kp, count, K, chunk.kT, kTokens);
    MultiplyPairs(d, chunk.q, Kp, chunk.kT, K, count, chunk.pairs, kTokens);
    for (int64_t i = 0; i < count; ++i) {
      T* HWY_RESTRICT row = chunk.pairs + i * kTokens;
      const T* HWY_RESTRICT decays = chunk.decay + i * kTokens;
      ForRuns(p, i, [&](int64_t level, int64_t first, int64_t last) HWY_ATTR {
        const T lambda = chunk.Scale(i, level);
        for (int64_t r = first; r < last; ++r) row[r] *= decays[r] * lambda;
      });
      std::fill(row + i + 1, row + count, T{-0.0});
    }
    MultiplyLower(d, chunk.pairs, kTokens, chunk.v, Vp, count, V, chunk.o, Vp);
    for (int64_t i = 0; i < count; ++i) {
      StoreRow(d, chunk.o + i * Vp, V,
               out.o.as<S>() + s.batch * out.o.stride(0) + (token + i) * out.o.stride(1) + h * out.o.stride(2));
    }
    if (p + count < end || out.final_state.present()) {
      Merge(d, K, V, p, count, chunk, [&](int64_t j) { return chunk.state[j]; });
    }
    p += count;
  }
  if (!out.final_state.present()) return;
  for (int64_t j = 0; j < call.L; ++j) {
    const bool live = (end >> j & 1) != 0;
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t c = 0; c < V; ++c) {
        const TensorView& t = out.final_state;
        const int64_t at = n * t.stride(0) + h * t.stride(1) + j * t.stride(2) + i * t.stride(3) + c * t.stride(4);
        t.as<T>()[at] = live ? chunk.factor[j] * chunk.state[j][i * Vp + c] : T{0};
      }
    }
  }
}

mechanism::Reservation ForwardMemoryImpl(const Call& call, DType dtype) {
  mechanism::Reservation memory;
  WithTypes(dtype, [&](auto computed, auto)
                       HWY_ATTR { memory.per_thread = Chunk<decltype(computed)>(call, nullptr, false, 0).bytes; });
  return memory;
}

void ForwardImpl(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  ForwardMemoryImpl(call, in.q.dtype()).Make(ctx);
  WithTypes(in.q.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    ctx.ParallelFor(static_cast<int64_t>(call.sequences.size()) * call.G, [&](int64_t task, int worker) HWY_ATTR {
      Chunk<T> chunk(call, ctx.Scratch(worker), false, 0);
      ForwardHead<T, S>(call, in, out, task / call.G, task % call.G, chunk);
    });
  });
}

// A state of one token, [K, V]: adds factor q^T x to o, and decays x. With `sum`, decay x goes there and x becomes 0.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void StepState(D d, const T* HWY_RESTRICT q, T factor, T decay, int64_t K, int64_t V, T* HWY_RESTRICT x,
                            int64_t row, int64_t column, T* HWY_RESTRICT sum, int64_t sum_row, T* HWY_RESTRICT o) {
  constexpr int64_t N = hn::MaxLanes(D());
  if (column != 1) {
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t c = 0; c < V; ++c) {
        T& element = x[i * row + c * column];
        o[c] += factor * q[i] * element;
        if (sum != nullptr) sum[i * sum_row + c] += decay * element;
        element = sum != nullptr ? T{0} : decay * element;
      }
    }
    return;
  }
  const auto decays = hn::Set(d, decay);
  for (int64_t c = 0; c < V; c += N) {
    const auto n = static_cast<size_t>(std::min(N, V - c));
    const bool whole = n == N;
    auto read = hn::Zero(d);
    for (int64_t i = 0; i < K; ++i) {
      T* HWY_RESTRICT at = x + i * row + c;
      const auto element = whole ? hn::LoadU(d, at) : hn::LoadN(d, at, n);
      read = hn::MulAdd(hn::Set(d, q[i]), element, read);
      auto left = hn::Mul(decays, element);
      if (sum != nullptr) {
        hn::Store(hn::Add(hn::Load(d, sum + i * sum_row + c), left), d, sum + i * sum_row + c);
        left = hn::Zero(d);
      }
      if (whole) {
        hn::StoreU(left, d, at);
      } else {
        hn::StoreN(left, d, at, n);
      }
    }
    hn::Store(hn::MulAdd(hn::Set(d, factor), read, hn::Load(d, o + c)), d, o + c);
  }
}

// One token of one value head: the states are those of the caller.
template <class T, class S>
HWY_INLINE void StepHead(const Call& call, const Inputs& in, const TensorView& state, const TensorView& out, int64_t n,
                         int64_t h, Chunk<T>& chunk) {
  const hn::ScalableTag<T> d;
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
  const Sequence& s = call.sequences[static_cast<size_t>(n)];
  const int64_t K = call.K, V = call.V, Vp = chunk.Vp, kh = h / (call.G / call.H), p = s.position;
  LoadChunk<S>(d, call, in, s.batch, 0, 1, h, kh, chunk);
  T own = 0;
  for (int64_t i = 0; i < K; ++i) own += chunk.q[i] * chunk.k[i];
  const auto weight = hn::Set(d, own * chunk.Scale(0, 0));
  for (int64_t c = 0; c < V; c += N) hn::Store(hn::Mul(weight, hn::Load(d, chunk.v + c)), d, chunk.o + c);
  // The states of the lowest bits that are set, and this token, become the state of the next bit.
  const int64_t target = std::countr_one(static_cast<uint64_t>(p));
  for (int64_t i = 0; i < K; ++i) {
    const auto key = hn::Set(d, chunk.k[i]);
    for (int64_t c = 0; c < V; c += N) {
      hn::Store(hn::Mul(key, hn::Load(d, chunk.v + c)), d, chunk.sum + i * Vp + c);
    }
  }
  const auto at = [&](int64_t j) {
    return state.as<T>() + n * state.stride(0) + h * state.stride(1) + j * state.stride(2);
  };
  const T decay = chunk.since[0];
  for (int64_t j = 0; p >> j != 0; ++j) {
    if ((p >> j & 1) == 0) continue;
    StepState(d, chunk.q, decay * chunk.Scale(0, j + 1), decay, K, V, at(j), state.stride(3), state.stride(4),
              j < target ? chunk.sum : nullptr, Vp, chunk.o);
  }
  if (target < call.L) {
    T* HWY_RESTRICT to = at(target);
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t c = 0; c < V; ++c) to[i * state.stride(3) + c * state.stride(4)] = chunk.sum[i * Vp + c];
    }
  }
  StoreRow(d, chunk.o, V, out.as<S>() + s.batch * out.stride(0) + h * out.stride(1));
}

void StepImpl(Context& ctx, const Call& call, const Inputs& in, const TensorView& state, const TensorView& o) {
  ForwardMemoryImpl(call, in.q.dtype()).Make(ctx);
  WithTypes(in.q.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    ctx.ParallelFor(call.B * call.G, [&](int64_t task, int worker) HWY_ATTR {
      Chunk<T> chunk(call, ctx.Scratch(worker), false, 0);
      StepHead<T, S>(call, in, state, o, task / call.G, task % call.G, chunk);
    });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::log_linear_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::log_linear_attention {

HWY_EXPORT(ForwardImpl);
HWY_EXPORT(ForwardMemoryImpl);
HWY_EXPORT(StepImpl);

void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  HWY_DISPATCH_TABLE(ForwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
void ComputeStep(Context& ctx, const Call& call, const Inputs& in, const TensorView& state, const TensorView& o) {
  HWY_DISPATCH_TABLE(StepImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, state, o);
}
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(ForwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::log_linear_attention
#endif  // HWY_ONCE

// Gradients of MesaNet: a pass forward that makes the states, then the chunks from the last to the first.
//
// With y_t the solution for H_kv,t d_o_t, the gradient of S_t by its own token is [-y_t x_t^T, x_t d_o_t^T]. Its sum
// over later tokens, with their decays, is a recurrence in reverse, like that of the state. Every 64th state is kept,
// and those between are made again. The gradient of a log decay is <dS, S>, which is computed where chunks meet, and
// differs from token to token by what the tokens read and write.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "heed/core/dispatch.h"
#include "heed/ops/gated/mesa/mesa_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/gated/mesa/mesa_backward.cc"  // this file
#include "hwy/foreach_target.h"                                    // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/gated/mesa/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::mesa::HWY_NAMESPACE {

constexpr int64_t kGroup = 4;  // chunks between two states that are kept

// <a, b>, in f64 over sums of 4096 products.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE double LongProduct(D d, const T* a, const T* b, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; i += 4096) {
    total += static_cast<double>(Product(d, a + i, b + i, std::min<int64_t>(4096, n - i)));
  }
  return total;
}

// dx_t = H_kv,t d_o_t.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientOfSolution(D d, int64_t count, Chunk<T>& c) {
  Clear(c.outT, c.Kp * kTokens);
  hs::Multiply(d, c.state + c.Kp, c.W, 1, c.d_oT, kTokens, c.V, c.K, kTokens, c.outT, kTokens);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t i = 0; i < c.Kp; ++i) c.dx[t * c.Kp + i] = c.since[t] * c.outT[i * kTokens + t];
  }
  hs::MultiplyPairs(d, c.d_o, c.Vp, c.kvT + c.Kp * kTokens, c.V, count, c.pairs, kTokens);
  WeightPairs(d, count, c.weights, c.pairs);
  hs::MultiplyLower(d, c.pairs, kTokens, c.kv, c.W, count, c.K, c.dx, c.Kp);
}

// dk, dv and dbeta of the tokens of a chunk, the last in `step`. dstate is the gradient of the state after it.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientsOfWrites(D d, int64_t count, Chunk<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const T* HWY_RESTRICT until = c.between + (count - 1) * kTokens;  // decays up to the end of the chunk
  // e_s = dS_kk k_s + dS_kv v_s and zn_s = [dS_kk^T k_s, dS_kv^T k_s], of the state after token s.
  Clear(c.outT, c.Kp * kTokens);
  hs::Multiply(d, c.dstate, c.W, 1, c.kvT, kTokens, c.W, c.K, kTokens, c.outT, kTokens);
  for (int64_t s = 0; s < count; ++s) {
    for (int64_t i = 0; i < c.Kp; ++i) c.e[s * c.Kp + i] = until[s] * c.outT[i * kTokens + s];
    Scale(d, until[s], c.kv + s * c.W, c.Kp, c.decayed + s * c.Kp);
  }
  Clear(c.zn, count * c.W);
  hs::Multiply(d, c.decayed, c.Kp, 1, c.dstate, c.W, c.K, count, c.W, c.zn, c.W);
  const auto pairs = [&](const T* rows, int64_t row, const T* columnsT, int64_t channels) HWY_ATTR {
    hs::MultiplyPairs(d, rows, row, columnsT, channels, count, c.pairs, kTokens);
    WeightPairs(d, count, c.between, c.pairs);
  };
  pairs(c.d_o, c.Vp, c.kvT + c.Kp * kTokens, c.V);
  hs::MultiplyUpper(d, c.pairs, kTokens, c.x, c.Kp, count, c.K, c.e, c.Kp);
  // The products of x and k read y with a minus, and d_o, side by side.
  for (int64_t t = 0; t < count; ++t) {
    Scale(d, T{-1}, c.y + t * c.Kp, c.Kp, c.scaled + t * c.W);
    std::copy(c.d_o + t * c.Vp, c.d_o + (t + 1) * c.Vp, c.scaled + t * c.W + c.Kp);
  }
  pairs(c.x, c.Kp, c.kvT, c.K);
  hs::MultiplyUpper(d, c.pairs, kTokens, c.scaled, c.W, count, c.K, c.e, c.Kp);
  hs::MultiplyUpper(d, c.pairs, kTokens, c.scaled + c.Kp, c.W, count, c.V, c.zn + c.Kp, c.W);
  pairs(c.scaled, c.W, c.kvT, c.K);  // -<y, k>
  hs::MultiplyUpper(d, c.pairs, kTokens, c.x, c.Kp, count, c.K, c.zn, c.W);
  for (int64_t s = 0; s < count; ++s) {
    c.step[s] = Product(d, c.kv + s * c.W, c.e + s * c.Kp, c.Kp);
    const auto beta = hn::Set(d, c.beta[s]);
    for (int64_t i = 0; i < c.Kp; i += N) {
      const auto sum = hn::Add(hn::Load(d, c.e + s * c.Kp + i), hn::Load(d, c.zn + s * c.W + i));
      hn::Store(hn::Mul(beta, sum), d, c.dk + s * c.Kp + i);
    }
    Scale(d, c.beta[s], c.zn + s * c.W + c.Kp, c.Vp, c.dv + s * c.Vp);
  }
}

// The gradient of the state before a chunk. `scaled` has -y and d_o from above.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void RetreatGradient(D d, int64_t count, Chunk<T>& c) {
  const T all = c.since[count - 1];
  if (all == 0) {
    Clear(c.dstate, c.K * c.W);
  } else if (all != 1) {
    Scale(d, all, c.dstate, c.K * c.W, c.dstate);
  }
  for (int64_t t = 0; t < count; ++t) {
    Scale(d, c.since[t], c.scaled + t * c.W, c.Kp, c.decayed + t * c.Kp);
    Scale(d, c.since[t], c.x + t * c.Kp, c.Kp, c.e + t * c.Kp);
  }
  hs::Multiply(d, c.decayed, 1, c.Kp, c.x, c.Kp, count, c.K, c.K, c.dstate, c.W);
  hs::Multiply(d, c.e, 1, c.Kp, c.d_o, c.Vp, count, c.K, c.V, c.dstate + c.Kp, c.W);
}

// The gradients of one head of a sequence. `dlamb` has K sums.
template <class T, class S>
HWY_INLINE void BackwardHead(const Call& call, const BackwardInputs& in, const Gradients& out, int64_t n, int64_t h,
                             double* dlamb, Chunk<T>& c) {
  const hn::ScalableTag<T> d;
  const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
  const int64_t size = c.K * c.W, tokens = s.end - s.begin, chunks = (tokens + kTokens - 1) / kTokens;
  const auto count_of = [&](int64_t chunk) { return std::min(kTokens, tokens - chunk * kTokens); };
  // The states before chunks: of group g at kGroup + g, and those of the current group first.
  T* const kept = c.states + kGroup * size;
  LoadLambda(in, h, c);
  LoadState(in.initial_state, c, n, h, c.state);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk % kGroup == 0) std::copy(c.state, c.state + size, kept + chunk / kGroup * size);
    LoadChunk<S>(d, in, s.batch, s.begin + chunk * kTokens, count_of(chunk), h, c);
    Advance(d, count_of(chunk), c, c.state);
  }
  LoadState(in.d_final_state, c, n, h, c.dstate);
  double later = in.log_decay.present() ? LongProduct(d, c.dstate, c.state, size) : 0;  // <dS, S> where chunks meet

  for (int64_t chunk = chunks; chunk-- > 0;) {
    const int64_t count = count_of(chunk), token = s.begin + chunk * kTokens, group = chunk / kGroup;
    if (chunk == chunks - 1 || chunk % kGroup == kGroup - 1) {
      std::copy(kept + group * size, kept + (group + 1) * size, c.states);
      for (int64_t i = group * kGroup; i < chunk; ++i) {
        T* const next = c.states + (i % kGroup + 1) * size;
        std::copy(next - size, next, next);
        LoadChunk<S>(d, in, s.batch, s.begin + i * kTokens, count_of(i), h, c);
        Advance(d, count_of(i), c, next);
      }
    }
    std::copy(c.states + chunk % kGroup * size, c.states + (chunk % kGroup + 1) * size, c.state);
    LoadChunk<S>(d, in, s.batch, token, count, h, c);
    for (int64_t t = 0; t < count; ++t) {
      hs::LoadRow(d, At<S>(in.d_o, s.batch, token + t, h), c.V, c.Vp, c.d_o + t * c.Vp);
      if (in.solution.present()) {
        hs::LoadRow(d, At<T>(in.solution, s.batch, token + t, h), c.K, c.Kp, c.x + t * c.Kp);
      }
    }
    hs::TransposeRows(c.d_o, c.Vp, count, c.Vp, c.d_oT, kTokens);
    if (!in.solution.present()) Solve(d, call, count, c.q, c, c.x);
    GradientOfSolution(d, count, c);
    Solve(d, call, count, c.dx, c, c.y);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t i = 0; i < c.K; ++i) {
        dlamb[i] -= static_cast<double>(c.y[t * c.Kp + i]) * static_cast<double>(c.x[t * c.Kp + i]);
      }
    }
    if (out.dlog_decay.present()) {
      for (int64_t t = 0; t < count; ++t) Scale(d, c.since[t], c.x + t * c.Kp, c.Kp, c.decayed + t * c.Kp);
      Clear(c.Hx, count * c.Kp);
      ReadState(d, count, c.x, c.decayed, c.state, c.W, c.kv, c.K, c, c.Hx, c.Kp);
    }
    GradientsOfWrites(d, count, c);
    if (out.dlog_decay.present()) {
      double sum = later;
      for (int64_t t = count; t-- > 0;) {
        const T *x = c.x + t * c.Kp, *y = c.y + t * c.Kp;
        sum += static_cast<double>(Product(d, x, c.dx + t * c.Kp, c.Kp));
        sum -= static_cast<double>(Product(d, y, c.Hx + t * c.Kp, c.Kp));
        sum -= static_cast<double>(c.beta[t] * c.step[t]);
        if (c.gate[t] == 0) sum = 0;
        c.of_decays[t] = sum;
      }
    }
    RetreatGradient(d, count, c);
    if (in.log_decay.present()) later = LongProduct(d, c.dstate, c.state, size);
    for (int64_t t = 0; t < count; ++t) {
      const auto rows = [&](const TensorView& to, const T* from, int64_t channels) HWY_ATTR {
        if (to.present()) hs::StoreRow(d, from, channels, At<S>(to, s.batch, token + t, h));
      };
      const auto number = [&](const TensorView& to, double value) {
        if (!to.present()) return;
        StoreDouble(to.dtype(), to.data(), s.batch * to.stride(0) + (token + t) * to.stride(1) + h * to.stride(2),
                    value);
      };
      rows(out.dq, c.y + t * c.Kp, c.K);
      rows(out.dk, c.dk + t * c.Kp, c.K);
      rows(out.dv, c.dv + t * c.Vp, c.V);
      number(out.dbeta, static_cast<double>(c.step[t]));
      number(out.dlog_decay, out.dlog_decay.present() ? c.of_decays[t] : 0);
    }
  }
  StoreState(out.dinitial_state, c, n, h, c.dstate);
}

// The states that a thread keeps.
int64_t KeptStates(const Call& call) {
  return kGroup + (mechanism::LongestOf(call.sequences) + kGroup * kTokens - 1) / (kGroup * kTokens);
}

mechanism::Reservation BackwardMemoryImpl(const Call& call, DType dtype) {
  mechanism::Reservation memory;
  WithTypes(dtype, [&](auto computed, auto) HWY_ATTR {
    memory.per_thread = Chunk<decltype(computed)>(call, nullptr, true, KeptStates(call)).bytes;
  });
  // dlambda of each sequence, which are added in order.
  memory.shared = std::ssize(call.sequences) * call.H * call.K * int64_t{sizeof(double)};
  return memory;
}

void BackwardImpl(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  BackwardMemoryImpl(call, in.q.dtype()).Make(ctx);
  const int64_t num_sequences = std::ssize(call.sequences);
  double* const dlamb = static_cast<double*>(ctx.Shared());
  std::fill_n(dlamb, num_sequences * call.H * call.K, 0.0);
  WithTypes(in.q.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    const int64_t states = KeptStates(call);
    ctx.ParallelFor(num_sequences * call.H, [&](int64_t task, int worker) HWY_ATTR {
      Chunk<T> chunk(call, ctx.Scratch(worker), true, states);
      BackwardHead<T, S>(call, in, out, task / call.H, task % call.H, dlamb + task * call.K, chunk);
    });
  });
  if (!out.dlamb.present()) return;
  for (int64_t i = 0; i < call.H * call.K; ++i) {
    double sum = 0;
    for (int64_t n = 0; n < num_sequences; ++n) sum += dlamb[n * call.H * call.K + i];
    const int64_t at = i / call.K * out.dlamb.stride(0) + i % call.K * out.dlamb.stride(1);
    StoreDouble(out.dlamb.dtype(), out.dlamb.data(), at, sum);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::mesa::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::mesa {

HWY_EXPORT(BackwardImpl);
HWY_EXPORT(BackwardMemoryImpl);

void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  HWY_DISPATCH_TABLE(BackwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(BackwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::mesa
#endif  // HWY_ONCE

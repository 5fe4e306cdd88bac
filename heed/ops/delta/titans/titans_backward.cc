// Gradients of Titans' linear memory: a pass forward that makes the states, then the chunks from the last to the first.
//
// With dy_t the gradient of what a query reads, n the last token of a chunk, dM and dS the gradients of the state after
// it, and the coefficients of chunk-inl.h:
//
//   dg_s = -lr_s (sum_{t >= s} C_ts P_ts dy_t + C_ns dM^T k_s + H_ns dS^T k_s)
//   dq_t = (b_t M + f_t S) dy_t - sum_{s <= t} C_ts lr_s <dy_t, g_s> k_s
//   dk_s = -lr_s (sum_{t >= s} C_ts <dy_t, g_s> q_t + C_ns dM g_s + H_ns dS g_s) + A dz_s + de_s
//   before the chunk:  dM = b_n dM + sum_t b_t q_t dy_t^T,  dS = h_n dS + f_n dM + sum_t f_t q_t dy_t^T
//
// dz follows from dg by the derivative of a gradient of LN (../ttt_linear/README.md), those of eta and alpha from those
// of the coefficients. dA is added to dM where a mini-batch begins.
#include "heed/core/targets.h"
// After targets.h:
#include <cstddef>
#include <cstdint>

#include "heed/core/dispatch.h"
#include "heed/ops/delta/titans/titans_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/delta/titans/titans_backward.cc"  // this file
#include "hwy/foreach_target.h"                                        // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/delta/common/test_time_training_backward-inl.h"
#include "heed/ops/delta/titans/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::titans::HWY_NAMESPACE {

// The gradients of numbers of tokens.
template <class T>
struct NumberGradients {
  T theta[kTokens], alpha[kTokens], eta[kTokens];
};

// to = rows scaled by a factor of each token, transposed.
template <class D, class Factor, class T = hn::TFromD<D>>
HWY_INLINE void ScaleAndTranspose(D d, const T* rows, const Factor& factor, Buffers<T>& c, T* scaled, T* to) {
  for (int64_t t = 0; t < c.count; ++t) Scale(d, factor(t), rows + t * c.Vp, c.Vp, scaled + t * c.Vp);
  TransposeTokens(d, scaled, c, to);
}

// dg and the gradients of theta and of the coefficients of pairs.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientsOfSteps(D d, Buffers<T>& c, NumberGradients<T>& of) {
  const T *C = c.C + (c.count - 1) * kTokens, *H = c.H + (c.count - 1) * kTokens;
  ReadRows(d, c, c.k, c.dM, c.kdM);
  ReadRows(d, c, c.k, c.dS, c.kdS);
  TransposeTokens(d, c.g, c, c.gT);
  hs::MultiplyPairs(d, c.dy, c.Vp, c.gT, c.K, c.count, c.dyg, kTokens);
  for (int64_t t = 0; t < c.count; ++t) {
    for (int64_t s = 0; s <= t; ++s) {
      c.dC[t * kTokens + s] = -c.lr[s] * c.pairs[t * kTokens + s] * c.dyg[t * kTokens + s];
    }
  }
  Clear(c.dg, c.count * c.Vp);
  MixPairs(d, c, static_cast<const T*>(nullptr), c.pairs);
  hs::MultiplyUpper(d, c.weighted, kTokens, c.dy, c.Vp, c.count, c.Vp, c.dg, c.Vp);
  for (int64_t s = 0; s < c.count; ++s) {
    const T *kdM = c.kdM + s * c.Vp, *kdS = c.kdS + s * c.Vp, *g = c.g + s * c.Vp;
    T* dg = c.dg + s * c.Vp;
    c.dC[(c.count - 1) * kTokens + s] -= c.lr[s] * Product(d, kdM, g, c.Vp);
    c.dH_last[s] = -c.lr[s] * Product(d, kdS, g, c.Vp);
    AddScaled(d, -C[s], kdM, c.Vp, dg);
    AddScaled(d, -H[s], kdS, c.Vp, dg);
    of.theta[s] = 2 * Product(d, dg, g, c.Vp);
    Scale(d, c.lr[s], dg, c.Vp, dg);
  }
}

// The first terms of dk, and dq.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientsOfRows(D d, Buffers<T>& c) {
  const T *C = c.C + (c.count - 1) * kTokens, *H = c.H + (c.count - 1) * kTokens;
  Clear(c.outT, c.Kp * kTokens);
  ScaleAndTranspose(d, c.g, [&](int64_t s) HWY_ATTR { return -c.lr[s] * C[s]; }, c, c.y, c.dyT);
  TimesRows(d, c.dM, c.dyT, c);
  ScaleAndTranspose(d, c.g, [&](int64_t s) HWY_ATTR { return -c.lr[s] * H[s]; }, c, c.y, c.dyT);
  TimesRows(d, c.dS, c.dyT, c);
  Transpose(d, c.outT, kTokens, c.Kp, kTokens, c.dk, c.Kp);

  // The rows b_t dy_t and f_t dy_t stay, in place of kdM and kdS.
  Clear(c.outT, c.Kp * kTokens);
  ScaleAndTranspose(d, c.dy, [&](int64_t t) HWY_ATTR { return c.b[t]; }, c, c.kdM, c.dyT);
  TimesRows(d, c.M, c.dyT, c);
  ScaleAndTranspose(d, c.dy, [&](int64_t t) HWY_ATTR { return c.f[t]; }, c, c.kdS, c.dyT);
  TimesRows(d, c.S, c.dyT, c);
  Transpose(d, c.outT, kTokens, c.Kp, kTokens, c.dq, c.Kp);

  MixPairs(d, c, c.lr, c.dyg);
  hs::MultiplyLower(d, c.weighted, kTokens, c.k, c.Kp, c.count, c.Kp, c.dq, c.Kp);
  hs::MultiplyUpper(d, c.weighted, kTokens, c.q, c.Kp, c.count, c.Kp, c.dk, c.Kp);
}

// The gradients of alpha and eta, token by token through the coefficients of a chunk.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientsOfGates(D d, Buffers<T>& c, NumberGradients<T>& of) {
  for (int64_t t = 0; t < c.count; ++t) {
    c.db[t] = Product(d, c.qM + t * c.Vp, c.dy + t * c.Vp, c.Vp);
    c.df[t] = Product(d, c.qS + t * c.Vp, c.dy + t * c.Vp, c.Vp);
  }
  // Gradients of b, f, h, and of the rows of C and H, after a token. The state after the chunk reads the last ones.
  T db = static_cast<T>(LongProduct(d, c.dM, c.M, c.size)), df = static_cast<T>(LongProduct(d, c.dM, c.S, c.size)),
    dh = static_cast<T>(LongProduct(d, c.dS, c.S, c.size)), dC[kTokens] = {}, dH[kTokens] = {};
  for (int64_t s = 0; s < c.count; ++s) dH[s] = c.dH_last[s];
  for (int64_t t = c.count - 1; t >= 0; --t) {
    const T keep = c.keep[t], eta = c.eta[t];
    const T *C = c.C + (t - 1) * kTokens, *H = c.H + (t - 1) * kTokens;  // of the token before
    db += c.db[t];
    df += c.df[t];
    dh += df;
    T of_keep = db * (t > 0 ? c.b[t - 1] : T{1}) + df * (t > 0 ? c.f[t - 1] : T{0});
    T of_eta = dh * (t > 0 ? c.h[t - 1] : T{1});
    for (int64_t s = 0; s <= t; ++s) {
      dC[s] += c.dC[t * kTokens + s];
      dH[s] += dC[s];
      if (s == t) break;
      of_keep += dC[s] * C[s];
      of_eta += dH[s] * H[s];
      dC[s] *= keep;
      dH[s] *= eta;
    }
    of.alpha[t] = -of_keep;
    of.eta[t] = of_eta;
    db *= keep;
    df *= keep;
    dh *= eta;
  }
}

// The gradients of the state before a chunk, but for what z gives to it.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientsOfState(D d, Buffers<T>& c) {
  const int64_t last = c.count - 1;
  Combine(d, c.h[last], c.f[last], c.dM, c.size, c.dS);
  Scale(d, c.b[last], c.dM, c.size, c.dM);
  hs::Multiply(d, c.q, 1, c.Kp, c.kdM, c.Vp, c.count, c.rows, c.Vp, c.dM, c.Vp);
  hs::Multiply(d, c.q, 1, c.Kp, c.kdS, c.Vp, c.count, c.rows, c.Vp, c.dS, c.Vp);
  if (c.begins && !c.ends) {
    AddScaled(d, T{1}, c.dA, c.size, c.dM);
    Clear(c.dA, c.size);
  }
  c.d_trained = c.begins ? c.dM : c.dA;
}

// The gradients of one head of a sequence.
template <class T, class Stored>
HWY_INLINE void BackwardHead(const Call& call, const BackwardInputs& in, const Gradients& out, int64_t n, int64_t h,
                             NormSums& sums, Buffers<T>& c) {
  const hn::ScalableTag<T> d;
  const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
  Begin(call, in, n, h, c);
  const auto load = [&](int64_t token, int64_t offset)
                        HWY_ATTR { LoadChunk<Stored>(d, call, in, s.batch, token, offset, s.end - token, h, c); };
  const auto start = [&](int64_t offset) HWY_ATTR {
    LoadPart(in.d_final_state, c, n, h, 0, c.dM);
    LoadPart(in.d_final_state, c, n, h, 1, c.dS);
    LoadPart(offset > 0 ? in.d_final_state : ConstTensorView(), c, n, h, 2, c.dA);
  };
  const auto back = [&](int64_t token) HWY_ATTR {
    LoadGradients<Stored>(d, in.d_o, s.batch, token, h, c);
    ReadQueries(d, call, c);
    GradientsOfOutputs(d, true, c);
    NumberGradients<T> of;
    GradientsOfSteps(d, c, of);
    GradientsOfGates(d, c, of);
    GradientsOfRows(d, c);
    GradientsOfState(d, c);
    GradientsOfTraining(d, c);
    StoreRows<Stored>(d, call, out, false, s.batch, token, h, c);
    for (int64_t t = 0; t < c.count; ++t) {
      StoreNumber(out.dtheta, s.batch, token + t, h, of.theta[t]);
      StoreNumber(out.dalpha, s.batch, token + t, h, of.alpha[t]);
      StoreNumber(out.deta, s.batch, token + t, h, of.eta[t]);
    }
    sums.Add(n, h, call, c);
  };
  ForChunksInReverse(d, call, n, c, load, [&]() HWY_ATTR { Advance(d, c); }, start, back);
  StorePart(out.dinitial_state, c, n, h, 0, c.dM);
  StorePart(out.dinitial_state, c, n, h, 1, c.dS);
  StorePart(out.dinitial_state, c, n, h, 2, c.dA);
}

mechanism::Reservation BackwardMemoryImpl(const Call& call, DType dtype) {
  const Kept kept = KeptBy(call);
  mechanism::Reservation memory;
  memory.shared = NormSums(call, nullptr).bytes;
  WithTypes(dtype, [&](auto computed, auto) HWY_ATTR {
    memory.per_thread = Buffers<decltype(computed)>(call, nullptr, true, kept.states, kept.tokens).bytes;
  });
  return memory;
}

void BackwardImpl(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  BackwardMemoryImpl(call, in.q.dtype()).Make(ctx);
  NormSums sums(call, ctx.Shared());
  WithTypes(in.q.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using Stored = decltype(stored);
    const Kept kept = KeptBy(call);
    ctx.ParallelFor(static_cast<int64_t>(call.sequences.size()) * call.H, [&](int64_t task, int worker) HWY_ATTR {
      Buffers<T> chunk(call, ctx.Scratch(worker), true, kept.states, kept.tokens);
      BackwardHead<T, Stored>(call, in, out, task / call.H, task % call.H, sums, chunk);
    });
  });
  sums.Store(call, out.dweight, out.dbias);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::titans::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::titans {

HWY_EXPORT(BackwardImpl);
HWY_EXPORT(BackwardMemoryImpl);

void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  HWY_DISPATCH_TABLE(BackwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(BackwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::titans
#endif  // HWY_ONCE

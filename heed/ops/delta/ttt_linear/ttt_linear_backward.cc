// Gradients of TTT-Linear: a pass forward that makes the states, then the chunks from the last to the first.
//
// With dy_t the gradient of what a query reads, dW and dG those of the state after a chunk, and E = -eta_last dW where
// the chunk ends a mini-batch, else dG:
//
//   dg_s = lr_s (E^T k_s - sum_{t >= s} eta_t P_ts dy_t)
//   dq_t = (W - eta_t G) dy_t - eta_t sum_{s <= t} lr_s <dy_t, g_s> k_s
//   dk_s = lr_s (E g_s - sum_{t >= s} eta_t <dy_t, g_s> q_t) + W dz_s + de_s
//
// dz follows from dg by the derivative of a gradient of LN (README.md).
#include "heed/core/targets.h"
// After targets.h:
#include <cstddef>
#include <cstdint>

#include "heed/core/dispatch.h"
#include "heed/ops/delta/ttt_linear/ttt_linear_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/delta/ttt_linear/ttt_linear_backward.cc"  // this file
#include "hwy/foreach_target.h"                                                // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/delta/common/test_time_training_backward-inl.h"
#include "heed/ops/delta/ttt_linear/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::ttt_linear::HWY_NAMESPACE {

// dg, the first terms of dk, and dq; then dW and dG before the chunk but for what z gives to dW.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientsOfReads(D d, Buffers<T>& c, T* deta, T* dlr) {
  const T last = c.eta[c.count - 1], factor = c.ends ? -last : T{1};
  const T* E = c.ends ? c.dW : c.dG;
  TransposeTokens(d, c.g, c, c.gT);
  TransposeTokens(d, c.dy, c, c.dyT);

  Clear(c.outT, c.Kp * kTokens);
  TimesRows(d, E, c.gT, c);
  Transpose(d, c.outT, kTokens, c.Kp, kTokens, c.dk, c.Kp);
  T of_last = 0;
  for (int64_t s = 0; s < c.count; ++s) {
    T* dk = c.dk + s * c.Kp;
    of_last += c.lr[s] * Product(d, c.k + s * c.Kp, dk, c.Kp);
    Scale(d, factor * c.lr[s], dk, c.Kp, dk);
  }
  if (c.ends) {
    const double of_sums = c.begins ? 0 : LongProduct(d, c.dW, c.G, c.size);
    deta[c.count - 1] -= of_last + static_cast<T>(of_sums);
  }

  Clear(c.dg, c.count * c.Vp);
  hs::Multiply(d, c.k, c.Kp, 1, E, c.Vp, c.rows, c.count, c.Vp, c.dg, c.Vp);
  if (c.ends) Scale(d, factor, c.dg, c.count * c.Vp, c.dg);
  WeightPairs(d, c.count, c.eta, T{-1}, static_cast<const T*>(nullptr), c.pairs, c.weighted);
  hs::MultiplyUpper(d, c.weighted, kTokens, c.dy, c.Vp, c.count, c.Vp, c.dg, c.Vp);
  for (int64_t s = 0; s < c.count; ++s) {
    T* dg = c.dg + s * c.Vp;
    dlr[s] = Product(d, dg, c.g + s * c.Vp, c.Vp);
    Scale(d, c.lr[s], dg, c.Vp, dg);
  }

  Clear(c.outT, c.Kp * kTokens);
  TimesRows(d, c.W, c.dyT, c);
  if (!c.begins) {
    for (int64_t t = 0; t < c.count; ++t) Scale(d, -c.eta[t], c.dy + t * c.Vp, c.Vp, c.y + t * c.Vp);
    TransposeTokens(d, c.y, c, c.dzT);
    TimesRows(d, c.G, c.dzT, c);
    if (c.ends) Scale(d, factor, c.dW, c.size, c.dG);
    hs::Multiply(d, c.q, 1, c.Kp, c.y, c.Vp, c.count, c.rows, c.Vp, c.dG, c.Vp);
  }
  Transpose(d, c.outT, kTokens, c.Kp, kTokens, c.dq, c.Kp);
  hs::MultiplyPairs(d, c.dy, c.Vp, c.gT, c.K, c.count, c.pairs, kTokens);
  WeightPairs(d, c.count, c.eta, T{-1}, c.lr, c.pairs, c.weighted);
  hs::MultiplyLower(d, c.weighted, kTokens, c.k, c.Kp, c.count, c.Kp, c.dq, c.Kp);
  hs::MultiplyUpper(d, c.weighted, kTokens, c.q, c.Kp, c.count, c.Kp, c.dk, c.Kp);
  hs::Multiply(d, c.q, 1, c.Kp, c.dy, c.Vp, c.count, c.rows, c.Vp, c.dW, c.Vp);
}

// The gradients of one head of a sequence.
template <class T, class S>
HWY_INLINE void BackwardHead(const Call& call, const BackwardInputs& in, const Gradients& out, int64_t n, int64_t h,
                             NormSums& sums, Buffers<T>& c) {
  const hn::ScalableTag<T> d;
  const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
  Begin(call, in, n, h, c);
  const auto load = [&](int64_t token, int64_t offset)
                        HWY_ATTR { LoadChunk<S>(d, call, in, s.batch, token, offset, s.end - token, h, c); };
  const auto start = [&](int64_t offset) HWY_ATTR {
    LoadPart(in.d_final_state, c, n, h, 0, c.dW);
    LoadPart(offset > 0 ? in.d_final_state : ConstTensorView(), c, n, h, 1, c.dG);
  };
  const auto back = [&](int64_t token) HWY_ATTR {
    LoadGradients<S>(d, in.d_o, s.batch, token, h, c);
    ReadSums(d, c, c.read);
    ReadQueries(d, call, c.read, c);
    GradientsOfOutputs(d, !call.query_residual, c);
    T deta[kTokens], dlr[kTokens];
    for (int64_t t = 0; t < c.count; ++t) deta[t] = -Product(d, c.dy + t * c.Vp, c.read + t * c.Vp, c.Vp);
    GradientsOfReads(d, c, deta, dlr);
    GradientsOfTraining(d, c);
    StoreRows<S>(d, call, out, call.query_residual, s.batch, token, h, c);
    for (int64_t t = 0; t < c.count; ++t) {
      StoreNumber(out.deta, s.batch, token + t, h, deta[t]);
      StoreNumber(out.dlr, s.batch, token + t, h, dlr[t]);
    }
    sums.Add(n, h, call, c);
  };
  ForChunksInReverse(d, call, n, c, load, [&]() HWY_ATTR { Advance(d, c); }, start, back);
  if (call.offsets[static_cast<size_t>(n)] == 0) Clear(c.dG, c.size);
  StorePart(out.dinitial_state, c, n, h, 0, c.dW);
  StorePart(out.dinitial_state, c, n, h, 1, c.dG);
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
    using S = decltype(stored);
    const Kept kept = KeptBy(call);
    ctx.ParallelFor(static_cast<int64_t>(call.sequences.size()) * call.H, [&](int64_t task, int worker) HWY_ATTR {
      Buffers<T> chunk(call, ctx.Scratch(worker), true, kept.states, kept.tokens);
      BackwardHead<T, S>(call, in, out, task / call.H, task % call.H, sums, chunk);
    });
  });
  sums.Store(call, out.dweight, out.dbias);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::ttt_linear::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::ttt_linear {

HWY_EXPORT(BackwardImpl);
HWY_EXPORT(BackwardMemoryImpl);

void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  HWY_DISPATCH_TABLE(BackwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(BackwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::ttt_linear
#endif  // HWY_ONCE

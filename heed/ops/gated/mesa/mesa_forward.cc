// The forward pass of MesaNet over chunks of 16 tokens, which begin at multiples of 16 of their sequence.
//
// FMA-bound: a step of the solver multiplies the tokens of a chunk by the state before it, and by each other twice.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/dispatch.h"
#include "heed/ops/gated/mesa/mesa_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/gated/mesa/mesa_forward.cc"  // this file
#include "hwy/foreach_target.h"                                   // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/gated/mesa/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::mesa::HWY_NAMESPACE {

// The forward pass of one head of a sequence.
template <class T, class S>
HWY_INLINE void ForwardHead(const Call& call, const Inputs& in, const Outputs& out, int64_t n, int64_t h, Chunk<T>& c) {
  const hn::ScalableTag<T> d;
  const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
  LoadState(in.initial_state, c, n, h, c.state);
  LoadLambda(in, h, c);
  for (int64_t token = s.begin; token < s.end; token += kTokens) {
    const int64_t count = std::min(kTokens, s.end - token);
    LoadChunk<S>(d, in, s.batch, token, count, h, c);
    Solve(d, call, count, c.q, c, c.x);
    Clear(c.o, count * c.Vp);
    for (int64_t t = 0; t < count; ++t) Scale(d, c.since[t], c.x + t * c.Kp, c.Kp, c.decayed + t * c.Kp);
    ReadState(d, count, c.x, c.decayed, c.state + c.Kp, c.W, c.kv + c.Kp, c.V, c, c.o, c.Vp);
    for (int64_t t = 0; t < count; ++t) {
      hs::StoreRow(d, c.o + t * c.Vp, c.V, At<S>(out.o, s.batch, token + t, h));
      if (out.solution.present()) {
        hs::StoreRow(d, c.x + t * c.Kp, c.K, At<T>(out.solution, s.batch, token + t, h));
      }
    }
    if (token + count < s.end || out.final_state.present()) Advance(d, count, c, c.state);
  }
  StoreState(out.final_state, c, n, h, c.state);
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
    ctx.ParallelFor(static_cast<int64_t>(call.sequences.size()) * call.H, [&](int64_t task, int worker) HWY_ATTR {
      Chunk<T> chunk(call, ctx.Scratch(worker), false, 0);
      ForwardHead<T, S>(call, in, out, task / call.H, task % call.H, chunk);
    });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::mesa::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::mesa {

HWY_EXPORT(ForwardImpl);
HWY_EXPORT(ForwardMemoryImpl);

void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  HWY_DISPATCH_TABLE(ForwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(ForwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::mesa
#endif  // HWY_ONCE

// The forward pass of TTT-Linear over chunks of up to 16 tokens of a mini-batch.
//
// FMA-bound: W is multiplied by the keys and by the queries of a chunk, and its change is a product of their tokens.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/dispatch.h"
#include "heed/ops/delta/ttt_linear/ttt_linear_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/delta/ttt_linear/ttt_linear_forward.cc"  // this file
#include "hwy/foreach_target.h"                                               // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/delta/ttt_linear/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::ttt_linear::HWY_NAMESPACE {

// o = residual + w .* LN(y) + c, in place of y.
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void StoreOutputs(D d, const Call& call, const TensorView& o, int64_t b, int64_t token, int64_t h,
                               Buffers<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t t = 0; t < c.count; ++t) {
    T* y = c.y + t * c.Vp;
    const T *residual = call.query_residual ? c.q + t * c.Kp : y, *x = c.yx + t * c.Vp;
    for (int64_t i = 0; i < c.Vp; i += N) {
      const auto rest = hn::Add(hn::Load(d, residual + i), hn::Load(d, c.c + i));
      hn::Store(hn::MulAdd(hn::Load(d, c.w + i), hn::Load(d, x + i), rest), d, y + i);
    }
    hs::StoreRow(d, y, c.K, At<S>(o, b, token + t, h));
  }
}

// The forward pass of one head of a sequence.
template <class T, class S>
HWY_INLINE void ForwardHead(const Call& call, const Inputs& in, const Outputs& out, int64_t n, int64_t h,
                            Buffers<T>& c) {
  const hn::ScalableTag<T> d;
  const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
  Begin(call, in, n, h, c);
  int64_t offset = call.offsets[static_cast<size_t>(n)];
  for (int64_t token = s.begin; token < s.end;) {
    LoadChunk<S>(d, call, in, s.batch, token, offset, s.end - token, h, c);
    ReadRows(d, c, c.k, c.W, c.z);
    Train(d, call, c.z, c);
    ReadSums(d, c, c.yx);
    ReadQueries(d, call, c.yx, c);
    StoreOutputs<S>(d, call, out.o, s.batch, token, h, c);
    token += c.count;
    offset = c.ends ? 0 : offset + c.count;
    if (token < s.end || out.final_state.present()) Advance(d, c);
  }
  StorePart(out.final_state, c, n, h, 0, c.W);
  StorePart(out.final_state, c, n, h, 1, c.G);
}

mechanism::Reservation ForwardMemoryImpl(const Call& call, DType dtype) {
  mechanism::Reservation memory;
  WithTypes(dtype, [&](auto computed, auto)
                       HWY_ATTR { memory.per_thread = Buffers<decltype(computed)>(call, nullptr, false, 0, 0).bytes; });
  return memory;
}

void ForwardImpl(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  ForwardMemoryImpl(call, in.q.dtype()).Make(ctx);
  WithTypes(in.q.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    ctx.ParallelFor(static_cast<int64_t>(call.sequences.size()) * call.H, [&](int64_t task, int worker) HWY_ATTR {
      Buffers<T> chunk(call, ctx.Scratch(worker), false, 0, 0);
      ForwardHead<T, S>(call, in, out, task / call.H, task % call.H, chunk);
    });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::ttt_linear::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::ttt_linear {

HWY_EXPORT(ForwardImpl);
HWY_EXPORT(ForwardMemoryImpl);

void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  HWY_DISPATCH_TABLE(ForwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(ForwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::ttt_linear
#endif  // HWY_ONCE

// The forward pass of Titans' linear memory over chunks of up to 16 tokens of a mini-batch.
//
// FMA-bound: A, M and S are multiplied by rows of a chunk, and the changes of M and S are products of its tokens.
#include "heed/core/targets.h"
// After targets.h:
#include <cstddef>
#include <cstdint>

#include "heed/core/dispatch.h"
#include "heed/ops/delta/titans/titans_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/delta/titans/titans_forward.cc"  // this file
#include "hwy/foreach_target.h"                                       // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/delta/titans/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::titans::HWY_NAMESPACE {

// o = y + w .* LN(y) + c, in place of y.
template <class Stored, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void StoreOutputs(D d, const TensorView& o, int64_t b, int64_t token, int64_t h, Buffers<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t t = 0; t < c.count; ++t) {
    T* y = c.y + t * c.Vp;
    const T* x = c.yx + t * c.Vp;
    for (int64_t i = 0; i < c.Vp; i += N) {
      const auto rest = hn::Add(hn::Load(d, y + i), hn::Load(d, c.c + i));
      hn::Store(hn::MulAdd(hn::Load(d, c.w + i), hn::Load(d, x + i), rest), d, y + i);
    }
    hs::StoreRow(d, y, c.K, At<Stored>(o, b, token + t, h));
  }
}

// The forward pass of one head of a sequence.
template <class T, class Stored>
HWY_INLINE void ForwardHead(const Call& call, const Inputs& in, const Outputs& out, int64_t n, int64_t h,
                            Buffers<T>& c) {
  const hn::ScalableTag<T> d;
  const mechanism::TokenRange& s = call.sequences[static_cast<size_t>(n)];
  Begin(call, in, n, h, c);
  int64_t offset = call.offsets[static_cast<size_t>(n)];
  for (int64_t token = s.begin; token < s.end;) {
    LoadChunk<Stored>(d, call, in, s.batch, token, offset, s.end - token, h, c);
    ReadRows(d, c, c.k, c.trained, c.z);
    Train(d, call, c.z, c);
    ReadQueries(d, call, c);
    StoreOutputs<Stored>(d, out.o, s.batch, token, h, c);
    token += c.count;
    offset = c.ends ? 0 : offset + c.count;
    if (token < s.end || out.final_state.present()) Advance(d, c);
  }
  if (offset == 0) Clear(c.A, c.size);
  StorePart(out.final_state, c, n, h, 0, c.M);
  StorePart(out.final_state, c, n, h, 1, c.S);
  StorePart(out.final_state, c, n, h, 2, c.A);
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
    using Stored = decltype(stored);
    ctx.ParallelFor(static_cast<int64_t>(call.sequences.size()) * call.H, [&](int64_t task, int worker) HWY_ATTR {
      Buffers<T> chunk(call, ctx.Scratch(worker), false, 0, 0);
      ForwardHead<T, Stored>(call, in, out, task / call.H, task % call.H, chunk);
    });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::titans::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::titans {

HWY_EXPORT(ForwardImpl);
HWY_EXPORT(ForwardMemoryImpl);

void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  HWY_DISPATCH_TABLE(ForwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(ForwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::titans
#endif  // HWY_ONCE

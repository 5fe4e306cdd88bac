// Gradients of Wall attention: within the block of the rows, and of a block of keys. FMA-bound.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstdint>
#include <tuple>

#include "heed/core/dispatch.h"
#include "heed/ops/exact/wall_attention/wall_attention_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/exact/wall_attention/wall_attention_backward.cc"  // this file
#include "hwy/foreach_target.h"                                                        // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/core/carver.h"
#include "heed/ops/exact/common/transitions_backward-inl.h"
#include "heed/ops/exact/wall_attention/blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::wall_attention::HWY_NAMESPACE {

// Work of a thread: sums of the gradient of log decays.
template <class T>
struct SumScratch {
  T* sum;  // [Dp]
  int64_t bytes;

  SumScratch(const Shape& s, void* base) {
    Carver carver(base);
    carver.Next(sum, s.Dp);
    bytes = carver.bytes();
  }
};

struct WallGradients : Wall {
  using BackwardInputs = wall_attention::BackwardInputs;
  using Gradients = wall_attention::Gradients;
  template <class T>
  using FinishScratch = SumScratch<T>;

  template <class T>
  struct OwnScratch {
    T* x;  // [64, Dp]: a query as it meets each key of its block

    void LayOut(const Shape& s, Carver& carver) { carver.Next(x, kBlock * s.Dp); }
  };

  // Each row returns from the first key to its own, with the gradient dx of x. x_j a_j dx is the gradient of
  // log_decay_j for all pairs of the row with earlier keys.
  template <class D, class T = hn::TFromD<D>>
  static HWY_NOINLINE void OwnGradients(D d, const Shape& s, const Block<T>& own, int64_t n, const ht::Ticket& ticket,
                                        ht::RowScratch<WallGradients, T>& c) {
    constexpr int64_t N = hn::MaxLanes(D());
    ticket.Wait();
    for (int64_t i = 0; i < n; ++i) {
      T* HWY_RESTRICT dx = c.dq + i * s.Dp;
      std::copy(c.own_q + i * s.Dp, c.own_q + (i + 1) * s.Dp, c.own.x + i * s.Dp);
      for (int64_t j = i; j > 0; --j) {
        MultiplyRow(d, c.own.x + j * s.Dp, own.a + j * s.Dp, s.Dp, c.own.x + (j - 1) * s.Dp);
      }
      for (int64_t j = 0; j <= i; ++j) {
        const T *HWY_RESTRICT x = c.own.x + j * s.Dp, *HWY_RESTRICT a = own.a + j * s.Dp,
                              *HWY_RESTRICT k = own.k + j * s.Dp;
        T *HWY_RESTRICT d_k = own.d_k + j * s.Dp, *HWY_RESTRICT d_decay = own.d_decay + j * s.Dp;
        const auto dS = hn::Set(d, c.own_dS[i * kBlock + j]);
        for (int64_t channel = 0; channel < s.Dp; channel += N) {
          const auto query = hn::Load(d, x + channel),
                     passed = hn::Mul(hn::Load(d, a + channel), hn::Load(d, dx + channel));
          hn::Store(hn::MulAdd(query, passed, hn::Load(d, d_decay + channel)), d, d_decay + channel);
          hn::Store(hn::MulAdd(dS, query, hn::Load(d, d_k + channel)), d, d_k + channel);
          hn::Store(hn::MulAdd(dS, hn::Load(d, k + channel), passed), d, dx + channel);
        }
      }
    }
    ticket.Release();
  }

  // dk, dv and dlog_decay of a block of a key head, whose heads of decays have blocks of their own.
  template <class S, class Blocks, class D, class T = hn::TFromD<D>>
  static HWY_NOINLINE void Finish(D d, const Shape& s, const BackwardInputs& in, const Gradients& out, const Task& task,
                                  const Blocks& blocks, const SumScratch<T>& c) {
    constexpr int64_t N = hn::MaxLanes(D());
    const Unit& u = *task.unit;
    const int64_t n = u.count(task.block), token = u.tokens.begin + task.block * kBlock, b = u.tokens.batch,
                  heads = in.log_decay.size(2) / in.k.size(2);
    const Block<T> first = blocks(0);
    for (int64_t head = 0; head < heads; ++head) {
      const Block<T> block = blocks(head);
      if (task.block + 1 < u.blocks) {
        // Pairs of later blocks of rows with all earlier blocks of keys, then with the earlier keys of this one too.
        MultiplyRow(d, block.d_P, block.P, s.Dp, c.sum);
        for (int64_t t = 0; t < n; ++t) {
          const int64_t row = t * s.Dp;
          for (int64_t i = 0; i < s.Dp; i += N) {
            const auto sum = hn::Load(d, c.sum + i), d_key = hn::Load(d, block.d_keys + row + i);
            T *const d_decay = block.d_decay + row + i, *const d_k = block.d_k + row + i;
            hn::Store(hn::Add(hn::Load(d, d_decay), sum), d, d_decay);
            hn::Store(hn::MulAdd(hn::Load(d, block.keys + row + i), d_key, sum), d, c.sum + i);
            hn::Store(hn::MulAdd(hn::Load(d, block.E + row + i), d_key, hn::Load(d, d_k)), d, d_k);
          }
        }
      }
      in.log_decay.dtype() == in.q.dtype()
          ? ht::StoreRows<S>(d, block.d_decay, s.Dp, out.dlog_decay, b, token, n, u.head + head)
          : ht::StoreRows<T>(d, block.d_decay, s.Dp, out.dlog_decay, b, token, n, u.head + head);
      if (head == 0) continue;
      for (const auto& [to, from, count] :
           {std::tuple{first.d_k, block.d_k, n * s.Dp}, {first.d_v, block.d_v, n * s.Vp}}) {
        for (int64_t i = 0; i < count; i += N) {
          hn::Store(hn::Add(hn::Load(d, to + i), hn::Load(d, from + i)), d, to + i);
        }
      }
    }
    ht::StoreRows<S>(d, first.d_k, s.Dp, out.dk, b, token, n, u.key_head);
    ht::StoreRows<S>(d, first.d_v, s.Vp, out.dv, b, token, n, u.key_head);
  }
};

mechanism::Reservation BackwardMemoryImpl(const Call& call, DType dtype) {
  return ht::BackwardMemoryOf<WallGradients>(call, dtype);
}

void BackwardImpl(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  ht::BackwardAll<WallGradients>(ctx, call, in, out);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::wall_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::wall_attention {

HWY_EXPORT(BackwardImpl);
HWY_EXPORT(BackwardMemoryImpl);

void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  HWY_DISPATCH_TABLE(BackwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(BackwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::wall_attention
#endif  // HWY_ONCE

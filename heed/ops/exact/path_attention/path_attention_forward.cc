// The forward pass of PaTH attention: blocks of keys are prepared, then each block of rows passes over the keys from
// its own block to the first, with an online softmax.
//
// FMA-bound: per pair D for the logit, Dv for the value and D D / 64 for the query's way over the block of keys. All
// blocks of rows are independent.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/ops/exact/path_attention/path_attention_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/exact/path_attention/path_attention_forward.cc"  // this file
#include "hwy/foreach_target.h"                                                       // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/ops/exact/path_attention/blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::path_attention::HWY_NAMESPACE {

template <class T>
struct ForwardScratch {
  Rows<T> rows;
  T *o, *most, *sum, *rescale;  // [64, Vp], and [64]: of the online softmax
  int64_t bytes;

  ForwardScratch(const Shape& s, void* base) {
    Carver carver(base);
    rows.LayOut(s, carver);
    carver.Next(o, kBlock * s.Vp);
    for (T** row : {&most, &sum, &rescale}) carver.Next(*row, kBlock);
    bytes = carver.bytes();
  }
};

// Turns logits into probabilities relative to the largest so far. With `own`, these are the first keys of the rows, and
// those after a row's token become -0.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Softmax(D d, int64_t n, bool own, int64_t Vp, ForwardScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  T* const S = c.rows.S;
  for (int64_t i = 0; i < n; ++i) {
    T* HWY_RESTRICT row = S + i * kBlock;
    auto most = hn::Set(d, own ? row[i] : c.most[i]);
    const int64_t end = own ? i + 1 : kBlock;
    for (int64_t j = 0; j < end; j += N) {
      const auto x = hn::Load(d, row + j);
      const auto seen = hn::FirstN(d, static_cast<size_t>(std::min(N, end - j)));
      most = hn::Max(hn::IfThenElse(seen, x, most), most);
    }
    const T before = c.most[i];
    c.most[i] = hn::ReduceMax(d, most);
    c.rescale[i] = own ? T{0} : before - c.most[i];
    const auto largest = hn::Set(d, c.most[i]);
    auto sum = hn::Zero(d);
    for (int64_t j = 0; j < kBlock; j += N) {
      auto p = hn::Set(d, T{-0.0});
      if (j < end) {
        const auto seen = hn::FirstN(d, static_cast<size_t>(std::min(N, end - j)));
        p = hn::IfThenElse(seen, hs::ExpNonPositive(d, hn::Sub(hn::Load(d, row + j), largest)), p);
        sum = hn::Add(sum, p);
      }
      hn::Store(p, d, row + j);
    }
    const T of_row = hn::ReduceSum(d, sum);
    if (own) {
      c.sum[i] = of_row;
    } else {
      c.rescale[i] = hn::GetLane(hs::ExpNonPositive(d, hn::Set(d, c.rescale[i])));
      c.sum[i] = c.sum[i] * c.rescale[i] + of_row;
    }
  }
  for (int64_t i = 0; i < n && !own; ++i) {
    if (c.rescale[i] == 1) continue;
    const auto factor = hn::Set(d, c.rescale[i]);
    for (int64_t j = i * Vp; j < (i + 1) * Vp; j += N) hn::Store(hn::Mul(factor, hn::Load(d, c.o + j)), d, c.o + j);
  }
}

// `blocks(i)`: block i of the task's key head.
template <class S, class D, class Blocks, class T = hn::TFromD<D>>
HWY_NOINLINE void ForwardRows(D d, const Call& call, const Inputs& in, const Outputs& out, const Task& task,
                              const Blocks& blocks, ForwardScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const Shape s(call);
  const Unit& u = *task.unit;
  const int64_t n = u.count(task.block), token = u.tokens.begin + task.block * kBlock, h = u.key_head * s.G + task.head;
  const T scale = static_cast<T>(call.scale);
  const bool gated = in.log_forget.present();
  c.rows.template Load<S>(d, s, in, task);
  {
    const Block<T> own = blocks(task.block);
    c.rows.OwnLogits(d, s, own, n, scale, gated);
    c.rows.Enter(d, s, own, n);
    Softmax(d, n, true, s.Vp, c);
    Clear(c.o, n * s.Vp);
    hs::MultiplyLower(d, c.rows.S, kBlock, own.v, s.Vp, n, s.Dv, c.o, s.Vp);
  }
  for (int64_t j = task.block; j-- > 0;) {
    const Block<T> keys = blocks(j);
    c.rows.Logits(d, s, keys, task.head, n, scale, gated);
    Softmax(d, n, false, s.Vp, c);
    hs::Multiply(d, c.rows.S, kBlock, 1, keys.v, s.Vp, kBlock, n, s.Dv, c.o, s.Vp);
    if (j == 0) break;
    c.rows.Pass(d, s, keys, n, c.rows.q, c.rows.next);
    std::swap(c.rows.q, c.rows.next);
  }
  for (int64_t i = 0; i < n; ++i) {
    const auto sum = hn::Set(d, c.sum[i]);
    for (int64_t j = i * s.Vp; j < (i + 1) * s.Vp; j += N) hn::Store(hn::Div(hn::Load(d, c.o + j), sum), d, c.o + j);
    SetNumber(out.lse, u.tokens.batch, h, token + i,
              static_cast<double>(c.most[i]) + std::log(static_cast<double>(c.sum[i])));
  }
  StoreRows<S>(d, c.o, s.Vp, out.o, u.tokens.batch, token, n, h);
}

void ForwardImpl(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  WithTypes(in, [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    const hn::ScalableTag<T> d;
    const Shape s(call);
    const int64_t block_bytes = Block<T>(s, nullptr, false).bytes;
    const std::vector<std::vector<Unit>> waves = Waves(call, block_bytes);
    int64_t most = 0;
    for (const std::vector<Unit>& wave : waves) most = std::max(most, NumBlocks(wave));
    ctx.ReserveShared(most * block_bytes);
    ctx.ReserveScratch(
        static_cast<size_t>(std::max(PrepareScratch<T>(s, nullptr).bytes, ForwardScratch<T>(s, nullptr).bytes)));
    char* const shared = static_cast<char*>(ctx.Shared());
    const auto block_of = [&](const Unit& u, int64_t i) {
      return Block<T>(s, shared + (u.first + i) * block_bytes, false);
    };
    for (const std::vector<Unit>& wave : waves) {
      std::vector<Task> of_keys, of_rows;
      for (const Unit& u : wave) {
        for (int64_t i = 0; i < u.blocks; ++i) of_keys.push_back({&u, 0, i});
        for (int64_t i = u.blocks; i-- > 0;) {  // the longest first
          for (int64_t h = 0; h < s.G; ++h) of_rows.push_back({&u, h, i});
        }
      }
      ctx.ParallelFor(static_cast<int64_t>(of_keys.size()), [&](int64_t i, int worker) HWY_ATTR {
        const Task& task = of_keys[static_cast<size_t>(i)];
        Prepare<S>(d, s, in, task, false, PrepareScratch<T>(s, ctx.Scratch(worker)), block_of(*task.unit, task.block));
      });
      ctx.ParallelFor(static_cast<int64_t>(of_rows.size()), [&](int64_t i, int worker) HWY_ATTR {
        const Task& task = of_rows[static_cast<size_t>(i)];
        ForwardScratch<T> scratch(s, ctx.Scratch(worker));
        ForwardRows<S>(d, call, in, out, task, [&](int64_t j) { return block_of(*task.unit, j); }, scratch);
      });
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::path_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::path_attention {

HWY_EXPORT(ForwardImpl);

void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  HWY_DISPATCH_TABLE(ForwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}

}  // namespace heed::path_attention
#endif  // HWY_ONCE

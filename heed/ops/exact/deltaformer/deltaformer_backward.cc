// Gradients of DeltaFormer after those of its second softmax: blocks of 64 keys, from the last one to the first. Each
// passes over the rows from the last block to its own, solves a unit upper triangular system for du, and adds the
// gradients of its keys and of the rows that read them.
//
// FMA-bound: 3 D + 2 Dv per pair. A block needs dr of all later ones, so that the blocks of a key head follow each
// other. The gradients dw of rows are ordered reductions: blocks of keys add in descending order.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/ticket.h"
#include "heed/ops/exact/deltaformer/deltaformer_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/exact/deltaformer/deltaformer_backward.cc"  // this file
#include "hwy/foreach_target.h"                                                  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/core/carver.h"
#include "heed/ops/exact/common/token_blocks-inl.h"
#include "heed/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::deltaformer::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;                 // simd/
using namespace heed::token_blocks;                 // NOLINT: exact/common/
using namespace heed::token_blocks::HWY_NAMESPACE;  // NOLINT

constexpr int64_t kRows = 16;  // of the triangles that are solved row by row

// A block of one key head, as it is kept; a T at the end of a name: transposed.
template <class T>
struct GradientBlock {
  T *kT, *uT;        // [D, 64], [Dv, 64]
  T *k, *w, *r;      // [64, Dp], [64, Dp], [64, Vp]
  T *dk, *dw, *dr;   // [64, Dp], [64, Dp], [64, Vp]
  T *lse_w, *delta;  // [64]: of the rows; delta: <dr, r>
  int64_t bytes;

  GradientBlock(const Call& call, void* base) {
    const int64_t Dp = Padded(call.D), Vp = Padded(call.Dv);
    Carver carver(base);
    carver.Next(kT, call.D * kBlock);
    carver.Next(uT, call.Dv * kBlock);
    for (T** rows : {&k, &w, &dk, &dw}) carver.Next(*rows, kBlock * Dp);
    for (T** rows : {&r, &dr}) carver.Next(*rows, kBlock * Vp);
    for (T** row : {&lse_w, &delta}) carver.Next(*row, kBlock);
    bytes = carver.bytes();
  }
};

template <class T>
struct KeyScratch {
  T *W, *dR;  // [64, 64]: of a block of rows and the block of keys
  T *du, *u;  // [64, Vp]
  T* beta;    // [64]
  int64_t bytes;

  KeyScratch(const Call& call, void* base) {
    const int64_t Vp = Padded(call.Dv);
    Carver carver(base);
    for (T** square : {&W, &dR}) carver.Next(*square, kBlock * kBlock);
    for (T** rows : {&du, &u}) carver.Next(*rows, kBlock * Vp);
    carver.Next(beta, kBlock);
    bytes = carver.bytes();
  }
};

// Turns logits into weights. With `own`, those of the diagonal and above become -0.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void WeightsOf(D d, int64_t n, bool own, T scale, const T* lse_w, T* W) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto factor = hn::Set(d, scale);
  for (int64_t i = 0; i < n; ++i) {
    T* HWY_RESTRICT row = W + i * kBlock;
    const auto lse = hn::Set(d, lse_w[i]);
    for (int64_t j = 0; j < kBlock; j += N) {
      hn::Store(hs::ExpNonPositive(d, hn::MulSub(factor, hn::Load(d, row + j), lse)), d, row + j);
    }
  }
  if (own) KeepLower(d, n, true, W);
}

// dR = scale W (dP - delta), given dP there. With `own`, the diagonal and what is above it becomes -0.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientOfLogits(D d, int64_t n, bool own, T scale, const T* delta, const T* W, T* dR) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto factor = hn::Set(d, scale);
  for (int64_t i = 0; i < n; ++i) {
    T* HWY_RESTRICT row = dR + i * kBlock;
    const auto of_row = hn::Set(d, delta[i]);
    for (int64_t j = 0; j < kBlock; j += N) {
      const auto weight = hn::Mul(factor, hn::Load(d, W + i * kBlock + j));
      hn::Store(hn::Mul(weight, hn::Sub(hn::Load(d, row + j), of_row)), d, row + j);
    }
  }
  if (own) KeepLower(d, n, true, dR);
}

// du and dr of a block, from the last row to the first, given what later blocks add to du and the weights within it.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Solve(D d, int64_t n, int64_t Dv, const GradientBlock<T>& block, const KeyScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const int64_t Vp = Padded(Dv);
  for (int64_t begin = (n - 1) / kRows * kRows; begin >= 0; begin -= kRows) {
    const int64_t end = std::min(begin + kRows, n);
    hs::Multiply(d, c.W + end * kBlock + begin, 1, kBlock, block.dr + end * Vp, Vp, n - end, end - begin, Dv,
                 c.du + begin * Vp, Vp);
    for (int64_t j = end; j-- > begin;) {
      const auto factor = hn::Set(d, -c.beta[j]);
      for (int64_t e = 0; e < Vp; e += N) {
        auto du = hn::Load(d, c.du + j * Vp + e);
        for (int64_t i = j + 1; i < end; ++i) {
          du = hn::MulAdd(hn::Set(d, c.W[i * kBlock + j]), hn::Load(d, block.dr + i * Vp + e), du);
        }
        hn::Store(du, d, c.du + j * Vp + e);
        hn::Store(hn::Mul(factor, du), d, block.dr + j * Vp + e);
      }
    }
  }
}

// `blocks(i)`: block i of the task's key head; `done`: counts its blocks whose dr is complete, the last one first;
// tickets: a counter for the dw of each block.
template <class S, class D, class Blocks, class T = hn::TFromD<D>>
HWY_NOINLINE void BackwardKeys(D d, const Call& call, const BackwardInputs& in, const Tables& tables,
                               const Gradients& out, const Task& task, const Blocks& blocks, TicketCounter& done,
                               TicketCounter* tickets, KeyScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const Unit& unit = *task.unit;
  const int64_t Dp = Padded(call.D), Vp = Padded(call.Dv), J = task.block, last = unit.blocks - 1,
                b = unit.tokens.batch, h = unit.key_head, n = unit.count(J), token = unit.tokens.begin + J * kBlock;
  const T scale = static_cast<T>(call.scale);
  const bool of_logits = out.dk.present() || out.dw.present();
  const GradientBlock<T> block = blocks(J);

  // Rows of a block, all of which see these keys or, in the block itself, those before them.
  const auto weights = [&](const GradientBlock<T>& rows, int64_t I) HWY_ATTR {
    const int64_t count = unit.count(I);
    Clear(c.W, count * kBlock);
    hs::Multiply(d, rows.w, Dp, 1, block.kT, kBlock, call.D, count, kBlock, c.W, kBlock);
    WeightsOf(d, count, I == J, scale, rows.lse_w, c.W);
  };
  const auto add_gradients = [&](const GradientBlock<T>& rows, int64_t I) HWY_ATTR {
    if (!of_logits) return;
    const int64_t count = unit.count(I);
    const bool own = I == J;
    Clear(c.dR, count * kBlock);
    hs::Multiply(d, rows.dr, Vp, 1, block.uT, kBlock, call.Dv, count, kBlock, c.dR, kBlock);
    GradientOfLogits(d, count, own, scale, rows.delta, c.W, c.dR);
    if (own) {
      hs::MultiplyUpper(d, c.dR, kBlock, rows.w, Dp, count, call.D, block.dk, Dp);
    } else {
      hs::Multiply(d, c.dR, 1, kBlock, rows.w, Dp, count, kBlock, call.D, block.dk, Dp);
    }
    WaitForTicket(tickets[I], I - J);
    if (own) {
      hs::MultiplyLower(d, c.dR, kBlock, block.k, Dp, count, call.D, rows.dw, Dp);
    } else {
      hs::Multiply(d, c.dR, kBlock, 1, block.k, Dp, kBlock, count, call.D, rows.dw, Dp);
    }
    ReleaseTicket(tickets[I]);
  };

  LoadRows<T>(d, tables.du, b, token, n, h, Vp, c.du);
  if (in.d_u.present()) {
    LoadRows<S>(d, in.d_u, b, token, n, h, Vp, c.u);
    for (int64_t i = 0; i < n * Vp; i += N) {
      hn::Store(hn::Add(hn::Load(d, c.du + i), hn::Load(d, c.u + i)), d, c.du + i);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    c.beta[i] = in.beta.present() ? static_cast<T>(Number(in.beta, b, token + i, h)) : T{1};
  }
  for (int64_t I = last; I > J; --I) {
    const GradientBlock<T> rows = blocks(I);
    weights(rows, I);
    WaitForTicket(done, last - I + 1);
    hs::Multiply(d, c.W, 1, kBlock, rows.dr, Vp, unit.count(I), kBlock, call.Dv, c.du, Vp);
    add_gradients(rows, I);
  }
  weights(block, J);
  Solve(d, n, call.Dv, block, c);
  for (int64_t i = 0; i < n; ++i) {
    auto of_row = hn::Zero(d), of_beta = hn::Zero(d);
    for (int64_t e = 0; e < Vp; e += N) {
      const auto r = hn::Load(d, block.r + i * Vp + e);
      of_row = hn::MulAdd(hn::Load(d, block.dr + i * Vp + e), r, of_row);
      of_beta = hn::MulAdd(hn::Load(d, c.du + i * Vp + e), r, of_beta);
    }
    block.delta[i] = hn::ReduceSum(d, of_row);
    SetNumber(out.dbeta, b, token + i, h, -static_cast<double>(hn::ReduceSum(d, of_beta)));
  }
  StoreRows<S>(d, c.du, Vp, out.dv, b, token, n, h);
  ReleaseTicket(done);
  add_gradients(block, J);
}

// Loads a block and clears its sums.
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Prepare(D d, const Call& call, const BackwardInputs& in, const Tables& tables, const Task& task,
                          const GradientBlock<T>& block, const KeyScratch<T>& c) {
  const Unit& unit = *task.unit;
  const int64_t Dp = Padded(call.D), Vp = Padded(call.Dv), b = unit.tokens.batch, h = unit.key_head,
                n = unit.count(task.block), token = unit.tokens.begin + task.block * kBlock;
  LoadRows<S>(d, in.k, b, token, n, h, Dp, block.k);
  LoadRows<S>(d, call.w, b, token, n, h, Dp, block.w);
  LoadRows<S>(d, in.u, b, token, n, h, Vp, c.u);
  LoadRows<T>(d, tables.r, b, token, n, h, Vp, block.r);
  hs::TransposeRows(block.k, Dp, n, call.D, block.kT, kBlock);
  hs::TransposeRows(c.u, Vp, n, call.Dv, block.uT, kBlock);
  for (T* sums : {block.dk, block.dw}) Clear(sums, kBlock * Dp);
  if (tables.dk.present()) LoadRows<T>(d, tables.dk, b, token, n, h, Dp, block.dk);
  for (int64_t i = 0; i < n; ++i) block.lse_w[i] = *At<T>(tables.lse_w, b, h, token + i);
}

// `of_keys`: gradients beside dq are requested.
mechanism::Reservation GradientsMemoryImpl(const Call& call, DType dtype, bool of_keys) {
  mechanism::Reservation memory;
  WithTypes(dtype, [&](auto computed, auto) HWY_ATTR {
    using T = decltype(computed);
    memory.per_thread = KeyScratch<T>(call, nullptr).bytes;
    if (!of_keys) return;
    const int64_t block_bytes = GradientBlock<T>(call, nullptr).bytes;
    const int64_t most = MostBlocks(Waves(call.sequences, call.Hkv, block_bytes));
    memory.shared = most * block_bytes;
    memory.tables = 2 * most * int64_t{sizeof(TicketCounter)};
  });
  return memory;
}

void BackwardImpl(Context& ctx, const Call& call, const BackwardInputs& in, const Tables& tables,
                  const Gradients& out) {
  GradientsMemoryImpl(call, in.q.dtype(), tables.du.present()).Make(ctx);
  WithTypes(in.q.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    const hn::ScalableTag<T> d;
    constexpr int64_t N = hn::MaxLanes(decltype(d)());
    const int64_t block_bytes = GradientBlock<T>(call, nullptr).bytes, Dp = Padded(call.D);
    std::vector<std::vector<Unit>> waves;
    if (tables.du.present()) waves = Waves(call.sequences, call.Hkv, block_bytes);
    const int64_t longest = LongestUnit(waves);
    char* const shared = static_cast<char*>(ctx.Shared());
    TicketCounter* const counters = static_cast<TicketCounter*>(ctx.Tables());
    const auto block_of = [&](const Unit& unit, int64_t i) {
      return GradientBlock<T>(call, shared + (unit.first + i) * block_bytes);
    };
    for (const std::vector<Unit>& wave : waves) {
      std::vector<Task> tasks;
      for (int64_t i = 0; i < longest; ++i) {  // in the order of their tickets
        for (const Unit& unit : wave) {
          if (i < unit.blocks) tasks.push_back({&unit, 0, unit.blocks - 1 - i});
        }
      }
      for (int64_t i = 0; i < 2 * NumBlocks(wave); ++i) new (&counters[i]) TicketCounter(0);
      const auto for_tasks = [&](const auto& f) {
        ctx.ParallelFor(std::ssize(tasks), [&](int64_t i, int worker) HWY_ATTR {
          const Task& task = tasks[static_cast<size_t>(i)];
          KeyScratch<T> scratch(call, ctx.Scratch(worker));
          f(task, block_of(*task.unit, task.block), scratch);
        });
      };
      for_tasks([&](const Task& task, const GradientBlock<T>& block, KeyScratch<T>& scratch)
                    HWY_ATTR { Prepare<S>(d, call, in, tables, task, block, scratch); });
      for_tasks([&](const Task& task, const GradientBlock<T>&, KeyScratch<T>& scratch) HWY_ATTR {
        TicketCounter* const own = counters + 2 * task.unit->first;  // of blocks, then the counter of finished ones
        BackwardKeys<S>(
            d, call, in, tables, out, task, [&](int64_t i) HWY_ATTR { return block_of(*task.unit, i); },
            own[task.unit->blocks], own, scratch);
      });
      for_tasks([&](const Task& task, const GradientBlock<T>& block, KeyScratch<T>&) HWY_ATTR {
        const Unit& unit = *task.unit;
        const int64_t n = unit.count(task.block), token = unit.tokens.begin + task.block * kBlock;
        for (int64_t i = 0; i < n * Dp && !in.w.present(); i += N) {
          hn::Store(hn::Add(hn::Load(d, block.dk + i), hn::Load(d, block.dw + i)), d, block.dk + i);
        }
        StoreRows<S>(d, block.dk, Dp, out.dk, unit.tokens.batch, token, n, unit.key_head);
        StoreRows<S>(d, block.dw, Dp, out.dw, unit.tokens.batch, token, n, unit.key_head);
      });
    }
    if (!tables.dq.present()) return;
    for (const mechanism::TokenRange& s : call.sequences) {
      ctx.ParallelFor(s.end - s.begin, [&](int64_t i, int) HWY_ATTR {
        for (int64_t h = 0; h < call.H; ++h) {
          hs::StoreRow(d, At<T>(tables.dq, s.batch, s.begin + i, h), call.D, At<S>(out.dq, s.batch, s.begin + i, h));
        }
      });
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::deltaformer::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::deltaformer {

HWY_EXPORT(BackwardImpl);
HWY_EXPORT(GradientsMemoryImpl);

void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Tables& tables,
                     const Gradients& out) {
  HWY_DISPATCH_TABLE(BackwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, tables, out);
}
mechanism::Reservation GradientsMemory(const Context& ctx, const Call& call, DType dtype, bool of_keys) {
  return HWY_DISPATCH_TABLE(GradientsMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype, of_keys);
}

}  // namespace heed::deltaformer
#endif  // HWY_ONCE

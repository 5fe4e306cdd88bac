// The values u of DeltaFormer: blocks of 64 tokens pass over the keys from the first block to their own, with an online
// softmax, then solve a unit lower triangular system within their own block.
//
// FMA-bound: D + Dv per pair. A block needs u of all earlier ones, so that the blocks of a key head follow each other.
// A task computes the logits of an earlier block before it waits for its u.
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
#define HWY_TARGET_INCLUDE "heed/ops/exact/deltaformer/deltaformer_values.cc"  // this file
#include "hwy/foreach_target.h"                                                // IWYU pragma: keep
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

// A block of one key head, as it is kept.
template <class T>
struct KeyBlock {
  T *kT, *u;  // [D, 64], [64, Vp]
  int64_t bytes;

  KeyBlock(const Call& call, void* base) {
    Carver carver(base);
    carver.Next(kT, call.D * kBlock);
    carver.Next(u, kBlock * Padded(call.Dv));
    bytes = carver.bytes();
  }
};

// A block of rows on its way over the blocks of keys.
template <class T>
struct RowScratch {
  T *w, *S, *r;          // [64, Dp], [64, 64], [64, Vp]: logits or numerators, and their sums of u
  T *most, *sum, *beta;  // [64]
  int64_t bytes;

  RowScratch(const Call& call, void* base) {
    Carver carver(base);
    carver.Next(w, kBlock * Padded(call.D));
    carver.Next(S, kBlock * kBlock);
    carver.Next(r, kBlock * Padded(call.Dv));
    for (T** row : {&most, &sum, &beta}) carver.Next(*row, kBlock);
    bytes = carver.bytes();
  }
};

// Turns the logits of a block of keys, the first one of the rows or a later one, into numerators relative to the
// largest logit so far. Row i sees the first seen(i) of them, the others become -0.
template <class D, class Seen, class T = hn::TFromD<D>>
HWY_NOINLINE void Softmax(D d, int64_t n, bool first, const Seen& seen, T scale, int64_t Vp, RowScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto factor = hn::Set(d, scale);
  for (int64_t i = 0; i < n; ++i) {
    T* HWY_RESTRICT row = c.S + i * kBlock;
    const int64_t end = seen(i);
    for (int64_t j = 0; j < kBlock; j += N) hn::Store(hn::Mul(factor, hn::Load(d, row + j)), d, row + j);
    const T before = first ? end > 0 ? row[0] : T{0} : c.most[i];
    auto most = hn::Set(d, before);
    for (int64_t j = 0; j < end; j += N) {
      const auto visible = hn::FirstN(d, static_cast<size_t>(std::min(N, end - j)));
      most = hn::Max(hn::IfThenElse(visible, hn::Load(d, row + j), most), most);
    }
    c.most[i] = hn::ReduceMax(d, most);
    const auto largest = hn::Set(d, c.most[i]);
    auto sum = hn::Zero(d);
    for (int64_t j = 0; j < kBlock; j += N) {
      auto p = hn::Set(d, T{-0.0});
      if (j < end) {
        const auto visible = hn::FirstN(d, static_cast<size_t>(std::min(N, end - j)));
        p = hn::IfThenElse(visible, hs::ExpNonPositive(d, hn::Sub(hn::Load(d, row + j), largest)), p);
        sum = hn::Add(sum, p);
      }
      hn::Store(p, d, row + j);
    }
    const T of_block = hn::ReduceSum(d, sum);
    if (first) {
      c.sum[i] = of_block;
      continue;
    }
    const T rescale = hn::GetLane(hs::ExpNonPositive(d, hn::Set(d, before - c.most[i])));
    c.sum[i] = c.sum[i] * rescale + of_block;
    if (rescale == 1) continue;
    const auto factors = hn::Set(d, rescale);
    for (int64_t j = i * Vp; j < (i + 1) * Vp; j += N) hn::Store(hn::Mul(factors, hn::Load(d, c.r + j)), d, c.r + j);
  }
}

// u of the rows from `from` on of a block, from their sums over earlier blocks and their numerators within it. A row is
// rounded before later ones read it.
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Solve(D d, const Call& call, const ValueInputs& in, const Unit& unit, int64_t token, int64_t from,
                        int64_t count, const TensorView& out, const KeyBlock<T>& block, RowScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const int64_t Vp = Padded(call.Dv), b = unit.tokens.batch, h = unit.key_head;
  for (int64_t begin = from / kRows * kRows; begin < count; begin += kRows) {
    const int64_t first = std::max(begin, from), end = std::min(begin + kRows, count);
    hs::Multiply(d, c.S + (first - from) * kBlock, kBlock, 1, block.u, Vp, begin, end - first, call.Dv,
                 c.r + (first - from) * Vp, Vp);
    for (int64_t i = first; i < end; ++i) {
      const T* HWY_RESTRICT weights = c.S + (i - from) * kBlock;
      const auto beta = hn::Set(d, c.beta[i - from]), sum = hn::Set(d, c.sum[i - from]);
      const S* v = At<S>(in.v, b, token + i - call.first, h);
      S* const to = At<S>(out, b, token + i, h);
      for (int64_t e = 0; e < call.Dv; e += N) {
        auto r = hn::Load(d, c.r + (i - from) * Vp + e);
        for (int64_t j = begin; j < i; ++j) {
          r = hn::MulAdd(hn::Set(d, weights[j]), hn::Load(d, block.u + j * Vp + e), r);
        }
        if (c.sum[i - from] != 0) r = hn::Div(r, sum);  // the first token reads nothing
        const auto left = static_cast<size_t>(std::min(call.Dv - e, N));
        hs::StoreRounded(d, hn::NegMulAdd(beta, r, hs::LoadWideN(d, v + e, left)), to + e, left);
      }
      hs::LoadRow(d, to, call.Dv, Vp, block.u + i * Vp);
    }
  }
}

// `blocks(i)`: block i of the task's key head; `done`: counts its blocks whose u is complete, from `first_block` on.
template <class S, class D, class Blocks, class T = hn::TFromD<D>>
HWY_NOINLINE void ValueRows(D d, const Call& call, const ValueInputs& in, const TensorView& out, const Task& task,
                            const Blocks& blocks, int64_t first_block, TicketCounter& done, RowScratch<T>& c) {
  const Unit& unit = *task.unit;
  const int64_t Dp = Padded(call.D), Vp = Padded(call.Dv), b = unit.tokens.batch, h = unit.key_head,
                count = unit.count(task.block), token = unit.tokens.begin + task.block * kBlock,
                from = std::max<int64_t>(call.first - token, 0), n = count - from, own = token + from - call.first;
  const T scale = static_cast<T>(call.scale);
  LoadRows<S>(d, call.w, b, own, n, h, Dp, c.w);
  for (int64_t i = 0; i < n; ++i) {
    c.beta[i] = in.beta.present() ? static_cast<T>(Number(in.beta, b, own + i, h)) : T{1};
  }
  Clear(c.r, n * Vp);
  for (int64_t j = 0; j < task.block; ++j) {
    const KeyBlock<T> keys = blocks(j);
    Clear(c.S, n * kBlock);
    hs::Multiply(d, c.w, Dp, 1, keys.kT, kBlock, call.D, n, kBlock, c.S, kBlock);
    Softmax(d, n, j == 0, [](int64_t) { return kBlock; }, scale, Vp, c);
    WaitForTicket(done, j - first_block + 1);
    hs::Multiply(d, c.S, kBlock, 1, keys.u, Vp, kBlock, n, call.Dv, c.r, Vp);
  }
  const KeyBlock<T> block = blocks(task.block);
  Clear(c.S, n * kBlock);
  hs::Multiply(d, c.w, Dp, 1, block.kT, kBlock, call.D, n, kBlock, c.S, kBlock);
  Softmax(d, n, task.block == 0, [from](int64_t i) { return from + i; }, scale, Vp, c);
  Solve<S>(d, call, in, unit, token, from, count, out, block, c);
  ReleaseTicket(done);
}

// The most units of a wave, each of which has a ticket.
int64_t MostUnits(const std::vector<std::vector<Unit>>& waves) {
  int64_t most = 0;
  for (const std::vector<Unit>& wave : waves) most = std::max<int64_t>(most, std::ssize(wave));
  return most;
}

mechanism::Reservation ValuesMemoryImpl(const Call& call, DType dtype) {
  mechanism::Reservation memory;
  WithTypes(dtype, [&](auto computed, auto) HWY_ATTR {
    using T = decltype(computed);
    const int64_t block_bytes = KeyBlock<T>(call, nullptr).bytes;
    const std::vector<std::vector<Unit>> waves = Waves(call.sequences, call.Hkv, block_bytes);
    memory.shared = MostBlocks(waves) * block_bytes;
    memory.tables = MostUnits(waves) * int64_t{sizeof(TicketCounter)};
    memory.per_thread = RowScratch<T>(call, nullptr).bytes;
  });
  return memory;
}

void ValuesImpl(Context& ctx, const Call& call, const ValueInputs& in, const TensorView& u) {
  ValuesMemoryImpl(call, in.k.dtype()).Make(ctx);
  WithTypes(in.k.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    const hn::ScalableTag<T> d;
    const int64_t block_bytes = KeyBlock<T>(call, nullptr).bytes, Dp = Padded(call.D), Vp = Padded(call.Dv);
    const std::vector<std::vector<Unit>> waves = Waves(call.sequences, call.Hkv, block_bytes);
    const int64_t longest = LongestUnit(waves), first_block = call.first / kBlock;
    char* const shared = static_cast<char*>(ctx.Shared());
    TicketCounter* const done = static_cast<TicketCounter*>(ctx.Tables());
    const auto block_of = [&](const Unit& unit, int64_t i) {
      return KeyBlock<T>(call, shared + (unit.first + i) * block_bytes);
    };
    for (const std::vector<Unit>& wave : waves) {
      std::vector<Task> of_keys, of_rows;
      for (int64_t i = 0; i < longest; ++i) {
        for (const Unit& unit : wave) {
          if (i >= unit.blocks) continue;
          of_keys.push_back({&unit, 0, i});
          if (i >= first_block) of_rows.push_back({&unit, 0, i});
        }
      }
      for (size_t i = 0; i < wave.size(); ++i) new (&done[i]) TicketCounter(0);
      ctx.ParallelFor(std::ssize(of_keys), [&](int64_t i, int worker) HWY_ATTR {
        const Task& task = of_keys[static_cast<size_t>(i)];
        const Unit& unit = *task.unit;
        const int64_t count = unit.count(task.block), token = unit.tokens.begin + task.block * kBlock,
                      given = std::clamp<int64_t>(call.first - token, 0, count);
        const KeyBlock<T> block = block_of(unit, task.block);
        T* const rows = RowScratch<T>(call, ctx.Scratch(worker)).w;
        LoadRows<S>(d, in.k, unit.tokens.batch, token, count, unit.key_head, Dp, rows);
        hs::TransposeRows(rows, Dp, count, call.D, block.kT, kBlock);
        LoadRows<S>(d, u, unit.tokens.batch, token, given, unit.key_head, Vp, block.u);
      });
      ctx.ParallelFor(std::ssize(of_rows), [&](int64_t i, int worker) HWY_ATTR {
        const Task& task = of_rows[static_cast<size_t>(i)];
        RowScratch<T> scratch(call, ctx.Scratch(worker));
        ValueRows<S>(
            d, call, in, u, task, [&](int64_t j) HWY_ATTR { return block_of(*task.unit, j); }, first_block,
            done[task.unit - wave.data()], scratch);
      });
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::deltaformer::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::deltaformer {

HWY_EXPORT(ValuesImpl);
HWY_EXPORT(ValuesMemoryImpl);

void ComputeValues(Context& ctx, const Call& call, const ValueInputs& in, const TensorView& u) {
  HWY_DISPATCH_TABLE(ValuesImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, u);
}
mechanism::Reservation ValuesMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(ValuesMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::deltaformer
#endif  // HWY_ONCE

// Gradients of softmax attention with transitions. Blocks are prepared as in the forward pass. Each block of rows
// passes over the keys from its own block to the first, which gives the gradients of values and of keys as they leave
// their blocks, and then returns, which gives the gradients of the queries on their way and of what they pass. Last,
// each block of keys takes the sums of all rows to its own tokens.
//
// Compiled once per SIMD target. The sums over rows of a block of keys are ordered reductions: blocks of rows add in
// ascending order, the heads of a group one after the other. A block of rows starts next to itself, so that those after
// it follow at a distance of a block. Beside what transitions-inl.h lists, M has
//
//   Rows<T>::PassGradient, AddPassed    gradients of a pass: of the rows that entered a block, and of what they passed
//   OwnScratch<T>, OwnGradients         gradients within the rows' own block; makes of c.dq, the gradient of queries as
//                                       they leave it, that of q
//   FinishScratch<T>, Finish<S>         stores the gradients of a block of a key head but those of log forget gates
#if defined(HEED_OPS_EXACT_COMMON_TRANSITIONS_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_EXACT_COMMON_TRANSITIONS_BACKWARD_INL_H_
#undef HEED_OPS_EXACT_COMMON_TRANSITIONS_BACKWARD_INL_H_
#else
#define HEED_OPS_EXACT_COMMON_TRANSITIONS_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/core/ticket.h"
#include "heed/ops/exact/common/transitions-inl.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/products-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::transitions::HWY_NAMESPACE {

// A place in an ordered reduction.
struct Ticket {
  TicketCounter& counter;
  int64_t ticket;
  void Wait() const { WaitForTicket(counter, ticket); }
  void Release() const { ReleaseTicket(counter); }
};

// Gradients of a block of rows.
template <class M, class T>
struct RowScratch {
  typename M::template Rows<T> rows;
  typename M::template OwnScratch<T> own;
  T* d_o;                       // [64, Vp]
  T *own_dS, *dS;               // [64, 64]: of logits, then times the scale; of the own block and of an earlier one
  T *own_q, *dq;                // [64, Dp]: the rows of q, and the gradient of the queries as they enter a block
  T *lse, *delta;               // [64]
  T *queries, *of_keys;         // [blocks][64, Dp]: the rows as they enter each block, dS keys
  double *of_rows, *of_blocks;  // [64]: sums of dS over earlier blocks; [blocks]: over pairs with one
  int64_t bytes;

  RowScratch(const Shape& s, int64_t blocks, void* base) {
    Carver carver(base);
    rows.LayOut(s, carver);
    own.LayOut(s, carver);
    carver.Next(d_o, kBlock * s.Vp);
    for (T** square : {&own_dS, &dS}) carver.Next(*square, kBlock * kBlock);
    for (T** of_queries : {&own_q, &dq}) carver.Next(*of_queries, kBlock * s.Dp);
    for (T** row : {&lse, &delta}) carver.Next(*row, kBlock);
    for (T** each : {&queries, &of_keys}) carver.Next(*each, blocks * kBlock * s.Dp);
    carver.Next(of_rows, kBlock);
    carver.Next(of_blocks, blocks);
    bytes = carver.bytes();
  }
};

// Turns the logits in rows.S into probabilities and `dS` into the gradient of logits, given <d_o, v> there. With `own`,
// those of later keys become -0.
template <class M, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void GradientOfLogits(D d, int64_t n, bool own, RowScratch<M, T>& c, T* dS) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto skipped = hn::Set(d, T{-0.0});
  for (int64_t i = 0; i < n; ++i) {
    T *HWY_RESTRICT row = c.rows.S + i * kBlock, *HWY_RESTRICT of_row = dS + i * kBlock;
    const auto lse = hn::Set(d, c.lse[i]), delta = hn::Set(d, c.delta[i]);
    const int64_t end = own ? i + 1 : kBlock;
    for (int64_t j = 0; j < kBlock; j += N) {
      const auto seen = hn::FirstN(d, static_cast<size_t>(std::clamp<int64_t>(end - j, 0, N)));
      const auto p = hs::ExpNonPositive(d, hn::Sub(hn::Load(d, row + j), lse));
      const auto gradient = hn::Mul(p, hn::Sub(hn::Load(d, of_row + j), delta));
      hn::Store(hn::IfThenElse(seen, p, skipped), d, row + j);
      hn::Store(hn::IfThenElse(seen, gradient, skipped), d, of_row + j);
    }
  }
}

// Sums of dS over the rows of each column, and over the columns of each row, which are added to `of_rows`. Returns the
// sum of all.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE double SumGradients(D d, int64_t n, const T* dS, double* of_rows, T* of_columns) {
  constexpr int64_t N = hn::MaxLanes(D());
  double total = 0;
  Clear(of_columns, kBlock);
  for (int64_t i = 0; i < n; ++i) {
    auto sum = hn::Zero(d);
    for (int64_t j = 0; j < kBlock; j += N) {
      const auto x = hn::Load(d, dS + i * kBlock + j);
      sum = hn::Add(sum, x);
      hn::Store(hn::Add(hn::Load(d, of_columns + j), x), d, of_columns + j);
    }
    const auto of_row = static_cast<double>(hn::ReduceSum(d, sum));
    of_rows[i] += of_row;
    total += of_row;
  }
  return total;
}

// `blocks(i)`: block i of the task's unit; tickets: two counters for each of its blocks.
template <class M, class S, class D, class Blocks, class T = hn::TFromD<D>>
HWY_NOINLINE void BackwardRows(D d, const Call& call, const typename M::BackwardInputs& in,
                               const typename M::Gradients& out, const Task& task, const Blocks& blocks,
                               TicketCounter* tickets, RowScratch<M, T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const Shape s(call);
  const Unit& u = *task.unit;
  const int64_t I = task.block, n = u.count(I), token = u.tokens.begin + I * kBlock, b = u.tokens.batch,
                h = u.head * s.G + task.head, tile = kBlock * s.Dp;
  const T scale = static_cast<T>(call.scale);
  const bool gated = in.log_forget.present(), of_gates = out.dlog_forget.present();
  const auto ticket = [&](int64_t j) { return (I - j) * s.G + task.head; };
  HWY_ALIGN T of_columns[kBlock];
  c.rows.template Load<S>(d, s, in, task);
  LoadRows<S>(d, in.d_o, b, token, n, h, s.Vp, c.d_o);
  for (int64_t i = 0; i < n; ++i) {
    double delta = in.d_lse.present() ? -Number(in.d_lse, b, h, token + i) : 0;
    const S* o = At<S>(in.o, b, token + i, h);
    auto sum = hn::Zero(d);
    for (int64_t j = 0; j < s.Dv; j += N) {
      const auto lanes = static_cast<size_t>(std::min(s.Dv - j, N));
      sum = hn::MulAdd(hs::LoadWideN(d, o + j, lanes), hn::Load(d, c.d_o + i * s.Vp + j), sum);
    }
    delta += static_cast<double>(hn::ReduceSum(d, sum));
    c.delta[i] = static_cast<T>(delta);
    c.lse[i] = static_cast<T>(Number(in.lse, b, h, token + i));
    c.of_rows[i] = 0;
  }

  // The rows' own block: dS, and the gradient of values.
  const auto own = blocks(I);
  c.rows.OwnLogits(d, s, own, n);
  c.rows.ScaleOwn(d, n, scale, gated);
  hs::MultiplyPairs(d, c.d_o, s.Vp, own.vT, s.Dv, n, c.own_dS, kBlock);
  GradientOfLogits(d, n, true, c, c.own_dS);
  WaitForTicket(tickets[2 * I], ticket(I));
  hs::MultiplyUpper(d, c.rows.S, kBlock, c.d_o, s.Vp, n, s.Dv, own.d_v, s.Vp);
  ReleaseTicket(tickets[2 * I]);
  double* const of_rows = own.of_rows + task.head * kBlock;
  if (of_gates) {  // pairs within the block that a token is between
    std::fill(of_rows, of_rows + kBlock, 0.0);
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (int64_t t = 0; t <= i; ++t) {
        of_rows[t] += sum;
        sum += static_cast<double>(c.own_dS[i * kBlock + t]);
      }
    }
  }
  ScaleRows(d, scale, n * kBlock, c.own_dS);
  KeepLower(d, n, false, c.own_dS);
  std::copy(c.rows.q, c.rows.q + tile, c.own_q);
  c.rows.Enter(d, s, own, n);

  // From right to left.
  for (int64_t j = I; j-- > 0;) {
    const auto keys = blocks(j);
    T* const queries = c.queries + j * tile;
    std::copy(c.rows.q, c.rows.q + n * s.Dp, queries);
    c.rows.Logits(d, s, keys, task.head, n, scale, gated);
    Clear(c.dS, n * kBlock);
    hs::Multiply(d, c.d_o, s.Vp, 1, keys.vT, kBlock, s.Dv, n, kBlock, c.dS, kBlock);
    GradientOfLogits(d, n, false, c, c.dS);
    if (of_gates) c.of_blocks[j] = SumGradients(d, n, c.dS, c.of_rows, of_columns);
    ScaleRows(d, scale, n * kBlock, c.dS);
    Clear(c.of_keys + j * tile, n * s.Dp);
    hs::Multiply(d, c.dS, kBlock, 1, keys.keys, s.Dp, kBlock, n, s.D, c.of_keys + j * tile, s.Dp);
    WaitForTicket(tickets[2 * j], ticket(j));
    hs::Multiply(d, c.rows.S, 1, kBlock, c.d_o, s.Vp, n, kBlock, s.Dv, keys.d_v, s.Vp);
    hs::Multiply(d, c.dS, 1, kBlock, queries, s.Dp, n, kBlock, s.D, keys.d_keys, s.Dp);
    for (int64_t t = 0; t < kBlock && of_gates; ++t) {
      keys.of_columns[task.head * kBlock + t] += static_cast<double>(of_columns[t]);
    }
    ReleaseTicket(tickets[2 * j]);
    if (j > 0) {
      c.rows.Pass(d, s, keys, n, c.rows.q, c.rows.next);
      std::swap(c.rows.q, c.rows.next);
    }
  }

  // From left to right: dq is the gradient of the queries as they enter block j.
  Clear(c.dq, n * s.Dp);
  double earlier = 0;
  for (int64_t j = 0; j < I; ++j) {
    T* const of_keys = c.of_keys + j * tile;
    if (j > 0) {
      const auto keys = blocks(j);
      c.rows.PassGradient(d, s, keys, n, c.dq, of_keys);
      WaitForTicket(tickets[2 * j + 1], ticket(j));
      c.rows.AddPassed(d, s, keys, n, c.queries + j * tile, c.dq);
      if (of_gates) keys.across[task.head] += earlier;
      ReleaseTicket(tickets[2 * j + 1]);
    }
    if (of_gates) earlier += c.of_blocks[j];
    std::copy(of_keys, of_keys + n * s.Dp, c.dq);
  }

  M::OwnGradients(d, s, own, n, Ticket{tickets[2 * I + 1], ticket(I)}, c);
  StoreRows<S>(d, c.dq, s.Dp, out.dq, b, token, n, h);
  double sum = 0;
  for (int64_t t = n; t-- > 0 && of_gates;) {  // pairs with keys of earlier blocks
    sum += c.of_rows[t];
    of_rows[t] += sum;
  }
}

// Stores dlog_forget of a block.
template <class Gradients, class T>
void StoreGates(const Shape& s, const Gradients& out, const Task& task, const BlockRows<T>& block) {
  const Unit& u = *task.unit;
  const int64_t n = u.count(task.block), token = u.tokens.begin + task.block * kBlock, b = u.tokens.batch;
  for (int64_t h = 0; h < s.G && out.dlog_forget.present(); ++h) {
    double sum = block.across[h];  // and pairs with rows of later blocks and earlier keys of this one
    for (int64_t t = 0; t < n; ++t) {
      SetNumber(out.dlog_forget, b, token + t, u.head * s.G + h, sum + block.of_rows[h * kBlock + t]);
      sum += block.of_columns[h * kBlock + t];
    }
  }
}

template <class M>
mechanism::Reservation BackwardMemoryOf(const Call& call, DType dtype) {
  mechanism::Reservation memory;
  tb::WithTypes(dtype, [&](auto computed, auto) HWY_ATTR {
    using T = decltype(computed);
    using Block = typename M::template Block<T>;
    using PrepareScratch = typename M::template PrepareScratch<T>;
    using FinishScratch = typename M::template FinishScratch<T>;
    const Shape s(call);
    const int64_t block_bytes = Block(s, nullptr, true).bytes;
    const std::vector<std::vector<Unit>> waves = Waves(call, block_bytes);
    memory.shared = MostBlocks(waves) * block_bytes;
    memory.staging = MostBlocks(waves) * 2 * int64_t{sizeof(TicketCounter)};
    memory.per_thread =
        std::max({PrepareScratch(s, nullptr).bytes, RowScratch<M, T>(s, LongestUnit(waves), nullptr).bytes,
                  FinishScratch(s, nullptr).bytes});
  });
  return memory;
}

template <class M>
void BackwardAll(Context& ctx, const Call& call, const typename M::BackwardInputs& in,
                 const typename M::Gradients& out) {
  BackwardMemoryOf<M>(call, in.q.dtype()).Make(ctx);
  tb::WithTypes(in.q.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    using Block = typename M::template Block<T>;
    using PrepareScratch = typename M::template PrepareScratch<T>;
    using FinishScratch = typename M::template FinishScratch<T>;
    const hn::ScalableTag<T> d;
    const Shape s(call);
    const Block sizes(s, nullptr, true);
    const std::vector<std::vector<Unit>> waves = Waves(call, sizes.bytes);
    const int64_t longest = LongestUnit(waves);
    char* const shared = static_cast<char*>(ctx.Shared());
    TicketCounter* const tickets = static_cast<TicketCounter*>(ctx.Staging());
    const auto block_of = [&](const Unit& u, int64_t i) {
      return Block(s, shared + (u.first + i) * sizes.bytes, true);
    };
    for (const std::vector<Unit>& wave : waves) {
      std::vector<Task> of_keys, of_rows;
      for (int64_t i = 0; i < longest; ++i) {  // in the order of their tickets
        for (const Unit& u : wave) {
          if (i >= u.blocks) continue;
          of_keys.push_back({&u, 0, i});
          for (int64_t h = 0; h < s.G; ++h) of_rows.push_back({&u, h, i});
        }
      }
      for (int64_t i = 0; i < 2 * NumBlocks(wave); ++i) new (&tickets[i]) TicketCounter(0);
      ctx.ParallelFor(static_cast<int64_t>(of_keys.size()), [&](int64_t i, int worker) HWY_ATTR {
        const Task& task = of_keys[static_cast<size_t>(i)];
        const Block block = block_of(*task.unit, task.block);
        std::memset(shared + (task.unit->first + task.block) * sizes.bytes + sizes.sums, 0,
                    static_cast<size_t>(sizes.bytes - sizes.sums));
        PrepareRows<S>(d, s, in, task, true, block);
        M::template Prepare<S>(d, s, in, task, true, PrepareScratch(s, ctx.Scratch(worker)), block);
      });
      ctx.ParallelFor(static_cast<int64_t>(of_rows.size()), [&](int64_t i, int worker) HWY_ATTR {
        const Task& task = of_rows[static_cast<size_t>(i)];
        RowScratch<M, T> scratch(s, longest, ctx.Scratch(worker));
        BackwardRows<M, S>(
            d, call, in, out, task, [&](int64_t j) { return block_of(*task.unit, j); }, tickets + 2 * task.unit->first,
            scratch);
      });
      ctx.ParallelFor(static_cast<int64_t>(of_keys.size()), [&](int64_t i, int worker) HWY_ATTR {
        const Task& task = of_keys[static_cast<size_t>(i)];
        StoreGates(s, out, task, block_of(*task.unit, task.block));
        if (task.unit->head % call.key_group() != 0) return;  // one task for the units of a key head
        M::template Finish<S>(
            d, s, in, out, task, [&](int64_t head) { return block_of(task.unit[head], task.block); },
            FinishScratch(s, ctx.Scratch(worker)));
      });
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::transitions::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_EXACT_COMMON_TRANSITIONS_BACKWARD_INL_H_

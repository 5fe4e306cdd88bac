// Softmax attention with transitions between key and query: blocks of 64 tokens, their rows, and the forward pass.
//
// Compiled once per SIMD target. Keys leave their block once, for all later queries. A block of rows passes over the
// blocks of keys from its own to the first: it multiplies its queries by the keys as they left a block, takes the
// online softmax's step, and passes the block. An operation says in a class M what a block keeps and how rows pass it:
//
//   Inputs, BackwardInputs, Outputs, Gradients
//   Block<T>           a block of one head of transitions as it is kept: BlockRows and what the operation adds
//   Rows<T>            a block of rows on its way: RowsBase and
//     OwnLogits        sets S to <q, k> over the path within the rows' own block
//     Enter            the rows leave their own block, after OwnLogits
//     Pass             the rows pass an earlier block
//   PrepareScratch<T>, Prepare<S>    prepares a block, but for what PrepareRows does
//
// and for gradients what transitions_backward-inl.h lists.
#if defined(HEED_OPS_EXACT_COMMON_TRANSITIONS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_EXACT_COMMON_TRANSITIONS_INL_H_
#undef HEED_OPS_EXACT_COMMON_TRANSITIONS_INL_H_
#else
#define HEED_OPS_EXACT_COMMON_TRANSITIONS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/mechanism/plan_internal.h"
#include "heed/ops/exact/common/token_blocks-inl.h"
#include "heed/ops/exact/common/transitions_call.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/products-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::transitions::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/
namespace tb = heed::token_blocks::HWY_NAMESPACE;
using tb::At;
using tb::Clear;
using tb::KeepLower;
using tb::LoadRows;
using tb::Number;
using tb::ScaleRows;
using tb::SetNumber;
using tb::StoreRows;

// Row lengths: D and Dv in whole vectors of any target. G: query heads of a head of transitions.
struct Shape {
  explicit Shape(const Call& call)
      : D(call.D), Dv(call.Dv), Dp(tb::Padded(call.D)), Vp(tb::Padded(call.Dv)), G(call.group()) {}
  int64_t D, Dv, Dp, Vp, G;
};

// Every operation keeps these of a block of one head of transitions. A T at the end of a name means transposed. Query
// heads have log forget gates of their own.
template <class T>
struct BlockRows {
  T *keysT, *v;                           // [D, 64]: keys as they leave the block; [64, Vp]
  T* until;                               // [G, 64]: sums of log forget gates after a token, up to the block's end
  double* total;                          // [G]: sums over the block
  T *keys, *vT;                           // [64, Dp], [Dv, 64]: for gradients
  T *d_keys, *d_v;                        // sums of gradients: of keys that leave the block, and of values
  double *of_rows, *of_columns, *across;  // [G, 64], [G, 64], [G]: of log forget gates
  int64_t sums, bytes;                    // offset of the sums, which begin as 0

  void Keep(const Shape& s, Carver& carver) {
    carver.Next(keysT, s.D * kBlock);
    carver.Next(v, kBlock * s.Vp);
    carver.Next(until, s.G * kBlock);
    carver.Next(total, s.G);
  }
  void KeepForGradients(const Shape& s, Carver& carver) {
    carver.Next(keys, kBlock * s.Dp);
    carver.Next(vT, s.Dv * kBlock);
  }
  void Sum(const Shape& s, Carver& carver) {
    carver.Next(d_keys, kBlock * s.Dp);
    carver.Next(d_v, kBlock * s.Vp);
    for (double** gates : {&of_rows, &of_columns}) carver.Next(*gates, s.G * kBlock);
    carver.Next(across, s.G);
  }
};

// One head of transitions of one sequence, whose blocks are kept from the index `first` on.
struct Unit {
  mechanism::TokenRange tokens;
  int64_t head, key_head, first, blocks;
  int64_t count(int64_t block) const { return std::min(kBlock, tokens.end - tokens.begin - block * kBlock); }
};

// Units whose blocks are kept at the same time: at most 64 MiB, or the units of one key head, which are adjacent.
inline std::vector<std::vector<Unit>> Waves(const Call& call, int64_t block_bytes) {
  std::vector<std::vector<Unit>> waves;
  const int64_t heads = call.key_group();
  int64_t kept = 0;
  for (const mechanism::TokenRange& s : call.sequences) {
    const int64_t blocks = (s.end - s.begin + kBlock - 1) / kBlock;
    for (int64_t h = 0; h < call.Hkv && blocks > 0; ++h) {
      if (waves.empty() || (kept + blocks * heads) * block_bytes > (int64_t{64} << 20)) {
        waves.emplace_back();
        kept = 0;
      }
      for (int64_t i = 0; i < heads; ++i) {
        waves.back().push_back({s, h * heads + i, h, kept, blocks});
        kept += blocks;
      }
    }
  }
  return waves;
}
inline int64_t NumBlocks(const std::vector<Unit>& wave) {
  return wave.empty() ? 0 : wave.back().first + wave.back().blocks;
}
// The most blocks of a wave, and of a unit.
inline int64_t MostBlocks(const std::vector<std::vector<Unit>>& waves) {
  int64_t most = 0;
  for (const std::vector<Unit>& wave : waves) most = std::max(most, NumBlocks(wave));
  return most;
}
inline int64_t LongestUnit(const std::vector<std::vector<Unit>>& waves) {
  int64_t longest = 0;
  for (const std::vector<Unit>& wave : waves) {
    for (const Unit& u : wave) longest = std::max(longest, u.blocks);
  }
  return longest;
}

// A block of rows of one query head, or with head 0, of a head of transitions.
struct Task {
  const Unit* unit;
  int64_t head, block;  // head: within its group
};

// Prepares what every block keeps: values and log forget gates.
template <class S, class D, class Inputs, class T = hn::TFromD<D>>
HWY_NOINLINE void PrepareRows(D d, const Shape& s, const Inputs& in, const Task& task, bool backward,
                              const BlockRows<T>& block) {
  const Unit& u = *task.unit;
  const int64_t n = u.count(task.block), token = u.tokens.begin + task.block * kBlock, b = u.tokens.batch;
  LoadRows<S>(d, in.v, b, token, n, u.key_head, s.Vp, block.v);
  if (backward) hs::TransposeRows(block.v, s.Vp, n, s.Dv, block.vT, kBlock);
  for (int64_t h = 0; h < s.G && in.log_forget.present(); ++h) {
    double sum = 0;
    for (int64_t t = n; t-- > 0;) {
      block.until[h * kBlock + t] = static_cast<T>(sum);
      sum += Number(in.log_forget, b, token + t, u.head * s.G + h);
    }
    block.total[h] = sum;
  }
}

// A block of rows of a head on its way over the blocks of keys.
template <class T>
struct RowsBase {
  T *q, *next;     // [64, Dp]: as they enter the current block from the right, and the next one
  T* S;            // [64, 64]: logits or probabilities
  T* gates;        // [64]: log forget gates of the rows
  double* before;  // [64]: sums of log forget gates from the beginning of the rows' block
  double passed;   // and of the blocks that were passed

  void LayOut(const Shape& s, Carver& carver) {
    for (T** rows : {&q, &next}) carver.Next(*rows, kBlock * s.Dp);
    carver.Next(S, kBlock * kBlock);
    carver.Next(gates, kBlock);
    carver.Next(before, kBlock);
  }

  template <class S_, class D, class Inputs>
  HWY_NOINLINE void Load(D d, const Shape& s, const Inputs& in, const Task& task) {
    const Unit& u = *task.unit;
    const int64_t h = u.head * s.G + task.head, n = u.count(task.block), token = u.tokens.begin + task.block * kBlock;
    LoadRows<S_>(d, in.q, u.tokens.batch, token, n, h, s.Dp, q);
    passed = 0;
    double sum = 0;
    for (int64_t i = 0; i < n && in.log_forget.present(); ++i) {
      const double gate = Number(in.log_forget, u.tokens.batch, token + i, h);
      sum += gate;
      gates[i] = static_cast<T>(gate);
      before[i] = sum;
    }
  }

  // Scales S within the rows' own block, and adds log forget gates if `gated`. Logits of later keys are undefined.
  template <class D>
  HWY_NOINLINE void ScaleOwn(D d, int64_t n, T scale, bool gated) {
    constexpr int64_t N = hn::MaxLanes(D());
    const auto factor = hn::Set(d, scale);
    HWY_ALIGN T forgotten[kBlock] = {};
    for (int64_t i = 0; i < n; ++i) {
      T* HWY_RESTRICT row = S + i * kBlock;
      if (gated) {
        for (int64_t j = 0; j < i; ++j) forgotten[j] += gates[i];
        for (int64_t j = 0; j < kBlock; j += N) {
          hn::Store(hn::MulAdd(factor, hn::Load(d, row + j), hn::Load(d, forgotten + j)), d, row + j);
        }
      } else {
        for (int64_t j = 0; j < kBlock; j += N) hn::Store(hn::Mul(factor, hn::Load(d, row + j)), d, row + j);
      }
    }
  }

  // Logits of an earlier block.
  template <class D>
  HWY_NOINLINE void Logits(D d, const Shape& s, const BlockRows<T>& block, int64_t head, int64_t n, T scale,
                           bool gated) {
    constexpr int64_t N = hn::MaxLanes(D());
    Clear(S, n * kBlock);
    hs::Multiply(d, q, s.Dp, 1, block.keysT, kBlock, s.D, n, kBlock, S, kBlock);
    const auto factor = hn::Set(d, scale);
    const T* HWY_RESTRICT until = block.until + head * kBlock;
    for (int64_t i = 0; i < n; ++i) {
      T* HWY_RESTRICT row = S + i * kBlock;
      if (gated) {
        const auto of_row = hn::Set(d, static_cast<T>(before[i] + passed));
        for (int64_t j = 0; j < kBlock; j += N) {
          const auto forgotten = hn::Add(of_row, hn::Load(d, until + j));
          hn::Store(hn::MulAdd(factor, hn::Load(d, row + j), forgotten), d, row + j);
        }
      } else {
        for (int64_t j = 0; j < kBlock; j += N) hn::Store(hn::Mul(factor, hn::Load(d, row + j)), d, row + j);
      }
    }
    if (gated) passed += block.total[head];
  }
};

template <class M, class T>
struct ForwardScratch {
  typename M::template Rows<T> rows;
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
template <class M, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Softmax(D d, int64_t n, bool own, int64_t Vp, ForwardScratch<M, T>& c) {
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

// `blocks(i)`: block i of the task's unit.
template <class M, class S, class D, class Blocks, class T = hn::TFromD<D>>
HWY_NOINLINE void ForwardRows(D d, const Call& call, const typename M::Inputs& in, const typename M::Outputs& out,
                              const Task& task, const Blocks& blocks, ForwardScratch<M, T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const Shape s(call);
  const Unit& u = *task.unit;
  const int64_t n = u.count(task.block), token = u.tokens.begin + task.block * kBlock, h = u.head * s.G + task.head;
  const T scale = static_cast<T>(call.scale);
  const bool gated = in.log_forget.present();
  c.rows.template Load<S>(d, s, in, task);
  {
    const auto own = blocks(task.block);
    c.rows.OwnLogits(d, s, own, n);
    c.rows.ScaleOwn(d, n, scale, gated);
    c.rows.Enter(d, s, own, n);
    Softmax(d, n, true, s.Vp, c);
    Clear(c.o, n * s.Vp);
    hs::MultiplyLower(d, c.rows.S, kBlock, own.v, s.Vp, n, s.Dv, c.o, s.Vp);
  }
  for (int64_t j = task.block; j-- > 0;) {
    const auto keys = blocks(j);
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

template <class M>
mechanism::Reservation ForwardMemoryOf(const Call& call, DType dtype) {
  mechanism::Reservation memory;
  tb::WithTypes(dtype, [&](auto computed, auto) HWY_ATTR {
    using T = decltype(computed);
    using Block = typename M::template Block<T>;
    using PrepareScratch = typename M::template PrepareScratch<T>;
    const Shape s(call);
    const int64_t block_bytes = Block(s, nullptr, false).bytes;
    memory.shared = MostBlocks(Waves(call, block_bytes)) * block_bytes;
    memory.per_thread = std::max(PrepareScratch(s, nullptr).bytes, ForwardScratch<M, T>(s, nullptr).bytes);
  });
  return memory;
}

template <class M>
void ForwardAll(Context& ctx, const Call& call, const typename M::Inputs& in, const typename M::Outputs& out) {
  ForwardMemoryOf<M>(call, in.q.dtype()).Make(ctx);
  tb::WithTypes(in.q.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    using Block = typename M::template Block<T>;
    using PrepareScratch = typename M::template PrepareScratch<T>;
    const hn::ScalableTag<T> d;
    const Shape s(call);
    const int64_t block_bytes = Block(s, nullptr, false).bytes;
    const std::vector<std::vector<Unit>> waves = Waves(call, block_bytes);
    char* const shared = static_cast<char*>(ctx.Shared());
    const auto block_of = [&](const Unit& u, int64_t i) {
      return Block(s, shared + (u.first + i) * block_bytes, false);
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
        const Block block = block_of(*task.unit, task.block);
        PrepareRows<S>(d, s, in, task, false, block);
        M::template Prepare<S>(d, s, in, task, false, PrepareScratch(s, ctx.Scratch(worker)), block);
      });
      ctx.ParallelFor(static_cast<int64_t>(of_rows.size()), [&](int64_t i, int worker) HWY_ATTR {
        const Task& task = of_rows[static_cast<size_t>(i)];
        ForwardScratch<M, T> scratch(s, ctx.Scratch(worker));
        ForwardRows<M, S>(d, call, in, out, task, [&](int64_t j) { return block_of(*task.unit, j); }, scratch);
      });
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::transitions::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_EXACT_COMMON_TRANSITIONS_INL_H_

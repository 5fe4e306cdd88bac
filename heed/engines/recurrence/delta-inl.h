// Delta rules, forward and one token, for one dtype of states.
//
//   S~_t = G_t .* S_{t-1},  e_t = w_t - S~_t^T r_t,  S_t = S~_t + k_t e_t^T,  o_t = scale S_t^T q_t
//
// or, if the read is before the decay (RWKV-7), with x_t = S_{t-1}^T a_t:
//
//   S_t = G_t .* S_{t-1} + k_t v_t^T + b_t x_t^T,  o_t = scale S_t^T q_t
//
// Compiled once per SIMD target. The pass of token t over the state computes S_t, o_t and what the next token's read
// key retrieves from S_t (delta_token-inl.h). A task owns one value head of one sequence. If there are fewer heads than
// threads, tasks prepare blocks and pass ranges of value columns over them (stages.h); columns are independent. Without
// `o` only the states are computed.
#if defined(HEED_ENGINES_RECURRENCE_DELTA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_DELTA_INL_H_
#undef HEED_ENGINES_RECURRENCE_DELTA_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_DELTA_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/delta_rows-inl.h"
#include "heed/engines/recurrence/delta_token-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/stages.h"
#include "heed/engines/recurrence/tasks.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The operands of a block. `found` [n + 1][value_row] is what each write's read key retrieves, S~_t^T r_t or x_t. If
// the read is after the decay, e_t replaces w_t.
template <class T>
struct DeltaBlock {
  const DeltaReader<T>& reader;
  const DeltaRows<T>& rows;
  size_t row, value_row;
  T* o;  // null: only the state is computed
  T* found;
  RowPrefetch* prefetch = nullptr;
};

// Processes n writes on C vectors of columns from `column` on of a state whose rows are `stride` apart.
template <bool kBefore, bool kOutputs, Decay kDecay, int C, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void DeltaTokens(D d, const DeltaBlock<T>& b, size_t n, size_t column, size_t num_rows, size_t stride,
                              T* state) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr unsigned kWrites = kBefore ? kWrite | kWrite2 : kWrite;
  constexpr unsigned kReads = kOutputs ? kRead | kRead2 : kRead2;
  Token<T> first;
  first.read2_row = b.rows.read_state;
  first.read2_out = b.found + column;
  first.prefetch = b.prefetch;
  PassBoundaryToken<kRead2, Decay::kNone, C>(d, first, num_rows, stride, state);
  for (size_t t = 0; t < n; ++t) {
    T* written = b.rows.w + t * b.value_row + column;
    T* found = b.found + t * b.value_row + column;
    Token<T> x;
    x.write_row = b.rows.k + t * b.row;
    x.write_lanes = written;
    if constexpr (kBefore) {
      x.write2_row = b.rows.write_key + t * b.row;
      x.write2_lanes = found;
    } else {
      for (size_t i = 0; i < C * N; i += N) {
        hn::StoreU(hn::Sub(hn::LoadU(d, written + i), hn::LoadU(d, found + i)), d, written + i);
      }
    }
    x.decay = b.reader.DecayOf(t);
    x.read2_row = b.rows.read_state + (t + 1 < n ? t + 1 : t) * b.row;
    x.read2_out = found + b.value_row;
    if constexpr (kOutputs) {
      x.read_row = b.rows.q + t * b.row;
      x.read_out = b.o + t * b.value_row + column;
    }
    x.prefetch = b.prefetch;
    PassToken<kWrites | kReads, kDecay, C>(d, b.rows.kinds[t], x, num_rows, stride, state);
  }
}

// The memory of a thread or of a slot.
template <class T>
struct DeltaBuffers {
  DeltaRows<T> rows;
  T *o, *found;
  T* state;

  static int64_t Bytes(const Problem& p, int64_t block) {
    return DeltaBuffers().LayOut(Holds::kAll, p, block, nullptr);
  }
  void Init(const Problem& p, int64_t block) { LayOut(Holds::kAll, p, block, this); }
  void ShareStates(const DeltaBuffers& first) { state = first.state; }

  int64_t LayOut(Holds holds, const Problem& p, int64_t block, void* base) {
    Carver carver(base, (sizeof(DeltaBuffers) + 127) / 128 * 128);
    const auto value_row = static_cast<int64_t>(Padded<T>(p.value_size));
    rows.LayOut(p, carver, block);
    carver.Next(o, block * value_row);
    carver.Next(found, (block + 1) * value_row);
    carver.Next(state, holds == Holds::kSlot ? 0 : p.key_size * value_row);
    return carver.bytes();
  }
};

// Calls f(kBefore, kDecay) with integral constants. For decays per key channel kDecay is kOfKeys: kRows for a state,
// kLanes for its transpose.
template <Decay kOfKeys, class F>
HWY_INLINE void WithDelta(const Problem& p, const F& f) {
  const std::integral_constant<Decay, kOfKeys> key_decay;
  if (p.delta == Delta::kBeforeDecay) return f(std::true_type(), key_decay);
  if (p.gate == Gate::kNone) return f(std::false_type(), std::integral_constant<Decay, Decay::kNone>());
  if constexpr (kOfKeys != Decay::kLanes) {
    if (p.gate == Gate::kScalar) return f(std::false_type(), std::integral_constant<Decay, Decay::kLanes>());
  }
  f(std::false_type(), key_decay);
}

// Processes n writes on all column blocks of a state.
template <bool kOutputs, class D, class T = hn::TFromD<D>>
HWY_NOINLINE HWY_ATTR void DeltaColumnBlocks(D d, const Problem& p, const DeltaBlock<T>& b, size_t n,
                                             const DeltaShape& shape, T* state) {
  WithDelta<Decay::kRows>(p, [&](auto before, auto decay) HWY_ATTR {
    ForColumnBlockVectors<T>(shape, [&](auto vectors, size_t c) HWY_ATTR {
      constexpr size_t kWidth = vectors.value * hn::MaxLanes(D());
      DeltaTokens<before.value, kOutputs, decay.value, vectors.value>(d, b, n, c, shape.rows, kWidth,
                                                                      state + shape.Offset(c));
    });
  });
}

// Computes some value columns of one head of one sequence.
template <class T>
class DeltaForwardHead {
 public:
  DeltaForwardHead(const Problem& p, const Task& task, const DeltaBuffers<T>& b, bool in_stages)
      : p_(p), s_(p.sequences[static_cast<size_t>(task.sequence)]), head_(task.head), b_(b),
        reader_(p, s_, task.head, b.rows), value_row_(Padded<T>(p.value_size)),
        shape_{static_cast<size_t>(p.key_size),
               static_cast<size_t>(p.key_size),
               FirstColumn(task.part, task.parts, value_row_),
               FirstColumn(task.part + 1, task.parts, value_row_),
               static_cast<size_t>(p.value_size),
               false},
        state_(b.state + shape_.begin * shape_.rows), states_alone_(p.o.data == nullptr), in_stages_(in_stages) {}

  HWY_ATTR void Begin(int64_t) { LoadState(d_, p_.initial, s_.state, head_, shape_, state_); }
  HWY_ATTR void End(int64_t) { StoreState(d_, state_, shape_, p_.final, s_.state, head_); }

  HWY_ATTR void Prepare(int64_t, int64_t block) {
    const int64_t first = block * p_.block_tokens();
    if (!states_alone_) reader_.Queries(first, TokensOf(first));
    reader_.Writes(first, TokensOf(first));
  }

  HWY_NOINLINE HWY_ATTR void Pass(int64_t, int64_t block) {
    const int64_t first = block * p_.block_tokens();
    const size_t n = TokensOf(first), writes = static_cast<size_t>(p_.writes);
    RowPrefetch prefetch;
    if (!in_stages_) {
      prefetch = reader_.Prefetch(first + static_cast<int64_t>(n), NumTokenPrefetches<T>(shape_, n * writes + 1),
                                  !states_alone_);
    }
    const DeltaBlock<T> operands = {reader_, b_.rows, Padded<T>(p_.key_size), value_row_, b_.o, b_.found, &prefetch};
    if (states_alone_) return DeltaColumnBlocks<false>(d_, p_, operands, n * writes, shape_, state_);
    DeltaColumnBlocks<true>(d_, p_, operands, n * writes, shape_, state_);
    StoreRows(d_, b_.o + (writes - 1) * value_row_, writes * value_row_, p_.o, s_, head_, first, n, shape_.begin,
              std::min(shape_.end, shape_.size), [](auto x, size_t, size_t) HWY_ATTR { return x; });
  }

 private:
  size_t TokensOf(int64_t first) const { return static_cast<size_t>(std::min(p_.block_tokens(), s_.count - first)); }

  const hn::ScalableTag<T> d_;
  const Problem& p_;
  const Sequence& s_;
  const int64_t head_;
  const DeltaBuffers<T>& b_;
  const DeltaReader<T> reader_;
  const size_t value_row_;
  const DeltaShape shape_;
  T* const state_;  // of the part's columns
  const bool states_alone_, in_stages_;
};

inline Stages DeltaForwardStages(const Problem& p, int64_t threads) {
  return Stages(p, threads, p.value_size, kPartColumns, p.block_tokens(), {.divided = true});
}

template <class T>
int64_t DeltaForwardBytes(const Context& ctx, const Problem& p) {
  const Stages stages = DeltaForwardStages(p, ctx.num_threads());
  const auto bytes = BytesOfHeads<DeltaBuffers<T>>(stages, p, p.block_writes());
  return bytes.per_thread + ShareOf(bytes.shared, ctx.num_threads());
}

template <class T>
void DeltaForward(Context& ctx, const Problem& p) {
  Stages stages = DeltaForwardStages(p, ctx.num_threads());
  const auto bytes = BytesOfHeads<DeltaBuffers<T>>(stages, p, p.block_writes());
  ctx.ReserveScratch(bytes.per_thread);
  ctx.ReserveShared(bytes.shared);
  RunHeads<DeltaBuffers<T>>(
      ctx, p, stages, ctx.Shared(),
      [&](const Task& task, const DeltaBuffers<T>& buffers, int, bool in_stages)
          HWY_ATTR { return DeltaForwardHead<T>(p, task, buffers, in_stages); },
      p, p.block_writes());
}

// Returns prefetches of the state of the head that the thread processes next. If a column block is only a part of each
// row, hardware prefetchers do not follow; memory is idle during the second pass over a state, which reads from cache.
template <class T>
RowPrefetch NextState(const Problem& p, const Task& task, const DeltaShape& shape) {
  RowPrefetch prefetch;
  if (NumColumnBlocks<T>(shape) == 1) return prefetch;
  const T* at = StateAt<T>(p.final, p.sequences[static_cast<size_t>(task.sequence)].state, task.head);
  prefetch.Add(at + shape.begin, p.final.key_stride * static_cast<int64_t>(sizeof(T)),
               (std::min(shape.end, shape.size) - shape.begin) * sizeof(T));
  prefetch.Begin(shape.rows, NumTokenPrefetches<T>(shape, static_cast<size_t>(p.writes) + 1));
  return prefetch;
}

// Processes one token with the state in the caller's memory; columns that fill no vector are copied. `next` is the
// thread's next task, or null.
template <class T>
HWY_NOINLINE HWY_ATTR void DeltaStepHead(const Problem& p, const Task& task, const Task* next,
                                         const DeltaBuffers<T>& b) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  const Sequence& s = p.sequences[static_cast<size_t>(task.sequence)];
  const size_t row = Padded<T>(p.key_size), value_row = Padded<T>(p.value_size);
  const auto keys = static_cast<size_t>(p.key_size);
  const auto values = static_cast<size_t>(p.value_size);
  const size_t begin = FirstColumn(task.part, task.parts, value_row);
  const size_t end = FirstColumn(task.part + 1, task.parts, value_row);
  const DeltaShape shape = {keys, keys, begin, end, values, false};
  const DeltaReader<T> reader(p, s, task.head, b.rows);
  reader.Queries(0, 1);
  reader.Writes(0, 1);
  const auto writes = static_cast<size_t>(p.writes);
  const bool in_place = p.final.value_stride == 1 || values == 1;
  const size_t whole = in_place ? std::max(begin, values / N * N) : begin;
  T* state = StateAt<T>(p.final, s.state, task.head);
  RowPrefetch prefetch;
  if (in_place && next != nullptr) prefetch = NextState<T>(p, *next, shape);
  const DeltaBlock<T> block = {reader, b.rows, row, value_row, b.o, b.found, &prefetch};
  WithDelta<Decay::kRows>(p, [&](auto before, auto decay) HWY_ATTR {
    hs::ForTiles<kDeltaBlockVectors>(begin / N, std::min(whole, end) / N, [&](auto vectors, size_t c) HWY_ATTR {
      DeltaTokens<before.value, true, decay.value, vectors.value>(
          d, block, writes, c * N, keys, static_cast<size_t>(p.final.key_stride), state + c * N);
    });
  });
  if (whole < end) {
    const DeltaShape rest = {keys, keys, whole, end, values, false};
    LoadState(d, p.final, s.state, task.head, rest, b.state);
    DeltaColumnBlocks<true>(d, p, block, writes, rest, b.state);
    StoreState(d, b.state, rest, p.final, s.state, task.head);
  }
  StoreRows(d, b.o + (writes - 1) * value_row, value_row, p.o, s, task.head, 0, 1, begin, std::min(end, values),
            [](auto x, size_t, size_t) HWY_ATTR { return x; });
}

template <class T>
void DeltaStep(Context& ctx, const Problem& p) {
  ctx.ReserveScratch(DeltaBuffers<T>::Bytes(p, p.writes));
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<DeltaBuffers<T>*>(ctx.Scratch(worker))->Init(p, p.writes);
  }
  const int64_t whole = static_cast<int64_t>(p.sequences.size()) * p.value_heads;
  const int64_t parts = NumParts(whole, ctx.num_threads(), p.value_size), size = whole * parts;
  const auto task_at = [&](int64_t index) {
    const int64_t of = index / parts;
    return Task{of / p.value_heads, of % p.value_heads, index % parts, parts};
  };
  // A thread takes consecutive heads, so that it knows which state it will read next.
  const int64_t run = std::max<int64_t>(1, size / (8 * ctx.num_threads()));
  ctx.ParallelFor((size + run - 1) / run, [&](int64_t index, int worker) HWY_ATTR {
    const int64_t end = std::min((index + 1) * run, size);
    for (int64_t i = index * run; i < end; ++i) {
      const Task task = task_at(i), next = task_at(i + 1);
      DeltaStepHead<T>(p, task, i + 1 < end ? &next : nullptr,
                       *static_cast<const DeltaBuffers<T>*>(ctx.Scratch(worker)));
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_DELTA_INL_H_

// The forward recurrence, for one dtype of states.
//
// Compiled once per SIMD target. A task owns one value head of one sequence. If there are fewer heads than threads,
// tasks prepare blocks (steps 1 to 3) and pass ranges of value columns over them (steps 4 and 5, stages.h). Columns are
// independent, so the bits are the same. Per block of 64 tokens:
//
//   1. rows of q, k and v are widened, q and k mapped, and decays computed: all of them stay in cache
//   2. normalised: z_t = a_t .* z_{t-1} + k_t and z_t . q_t
//   3. with decays: tables of the tiles (block-inl.h)
//   4. per column block and tile of a few tokens: o_t = S^T read_t + pairs, S <- E S + k v^T (register_tile-inl.h)
//   5. rows of o are divided by their denominators, multiplied with skip and gate, and rounded
//
// Without `o` only the states are computed, with the same bits: nothing is done for queries, and step 4 takes half as
// many flops.
//
// Each column of v and o is accessed by one pass only, so tiles read and write them in place if they have the type of
// the state and need no other operation; this saves a sixth of the time at 64 channels.
//
// Step 4 takes 4 K V flops per token; multiply-adds are the bound. The steps that are done per token and not per state
// element take 5 to 20 % of the time at K = V = 64.
#if defined(HEED_ENGINES_RECURRENCE_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_FORWARD_INL_H_
#undef HEED_ENGINES_RECURRENCE_FORWARD_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_FORWARD_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/gradients-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/rows-inl.h"
#include "heed/engines/recurrence/stages.h"
#include "heed/engines/recurrence/tasks.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// The memory of a thread or of a slot.
template <class T>
struct ForwardBuffers {
  BlockRows<T> rows;
  T *v, *o, *gate;  // [kBlock][padded V]
  T* pairs;
  T* denominators;  // [kBlock]: 1 / d_t
  T *state, *z;

  void ShareStates(const ForwardBuffers& first) {
    rows.ShareHead(first.rows);
    state = first.state;
    z = first.z;
  }

  int64_t LayOut(Holds holds, const Problem& p, void* base) {
    Carver carver(base, (sizeof(ForwardBuffers) + 127) / 128 * 128);
    const auto row = static_cast<int64_t>(Padded<T>(p.features()));
    const auto value_row = static_cast<int64_t>(Padded<T>(p.value_size));
    const auto block = static_cast<int64_t>(kBlock), tile = static_cast<int64_t>(kTile);
    const bool gated = p.gate != Gate::kNone, of_head = holds != Holds::kSlot;
    rows.LayOut(p, carver, kBlockTokens, of_head);
    carver.Next(v, block * value_row);
    carver.Next(o, block * value_row);
    carver.Next(gate, p.output_gate.data == nullptr ? 0 : block * value_row);
    carver.Next(pairs, gated ? block * tile : 0);
    carver.Next(denominators, block);
    carver.Next(state, of_head ? p.features() * value_row : 0);
    carver.Next(z, of_head ? row : 0);
    return carver.bytes();
  }
};

// Computes some value columns of one head of one sequence.
template <class T>
class ForwardHead {
 public:
  ForwardHead(const Problem& p, const Task& task, const ForwardBuffers<T>& buffers, bool in_stages)
      : p_(p), s_(p.sequences[static_cast<size_t>(task.sequence)]), head_(task.head), b_(buffers),
        reader_(p, s_, task.head, buffers.rows), row_(Padded<T>(p.features())), value_row_(Padded<T>(p.value_size)),
        first_part_(task.part == 0), in_stages_(in_stages), states_alone_(p.o.data == nullptr),
        values_in_place_(InPlace<T>(p.v, p.value_size) && p.key_mask.data == nullptr &&
                         p.value_factors.data == nullptr && !p.has_value_decay),
        outputs_in_place_(InPlace<T>(p.o, p.value_size) && !p.normalize && p.skip.data == nullptr &&
                          p.output_gate.data == nullptr && !p.has_value_decay),
        shape_{static_cast<size_t>(p.features()),
               static_cast<size_t>(p.features()),
               FirstColumn(task.part, task.parts, value_row_),
               FirstColumn(task.part + 1, task.parts, value_row_),
               static_cast<size_t>(p.value_size),
               false},
        state_(b_.state + shape_.begin * shape_.rows) {}

  // Without causality the first sweep adds all tokens to the state, and the second reads it.
  static StagesOf Sweeps(const Problem& p) {
    const bool in_order = !p.causal || p.normalize || p.has_bonus || IsRandom(p.feature);
    return {.sweeps = p.causal ? 1 : 2, .prepares_in_order = in_order, .divided = true};
  }

  HWY_ATTR void Begin(int64_t sweep) {
    if (sweep > 0) return;
    if (s_.count == 0 && first_part_) BeginRows();
    LoadState(d_, p_.initial, s_.state, head_, shape_, state_);
  }

  HWY_ATTR void End(int64_t sweep) {
    if (!p_.causal && sweep == 0) return;
    StoreState(d_, state_, shape_, p_.final, s_.state, head_);
    if (!first_part_) return;
    StoreNormalizer(b_.z, p_.final_z, s_.state, head_, shape_.rows);
    reader_.StoreMax();
  }

  HWY_ATTR void Prepare(int64_t sweep, int64_t block) {
    const int64_t first = block * kBlockTokens;
    if (sweep == 0 && block == 0) BeginRows();
    if (p_.causal) return PrepareCausal(first, TokensOf(first));
    sweep == 0 ? PrepareSums(first, TokensOf(first)) : PrepareReads(first, TokensOf(first));
  }

  HWY_ATTR void Pass(int64_t sweep, int64_t block) {
    const int64_t first = block * kBlockTokens;
    if (p_.causal) return CausalBlock(first, TokensOf(first));
    sweep == 0 ? AddBlock(first, TokensOf(first)) : ReadBlock(first, TokensOf(first));
  }

 private:
  using D = hn::ScalableTag<T>;

  size_t TokensOf(int64_t first) const { return static_cast<size_t>(std::min(kBlockTokens, s_.count - first)); }

  // Reads what all blocks of the head share.
  HWY_ATTR void BeginRows() {
    LoadNormalizer(p_.initial_z, s_.state, head_, shape_.rows, row_, b_.z);
    reader_.Begin();
    if (!p_.causal) reader_.ReduceKeys();
  }

  HWY_NOINLINE HWY_ATTR void PrepareCausal(int64_t first, size_t n) {
    const BlockRows<T>& rows = b_.rows;
    const bool gated = p_.gate != Gate::kNone;
    QueriesAndKeys<T> for_tables = {};
    if (gated && !p_.normalize) {
      for_tables = reader_.ForTables(first, n, !states_alone_);
    } else {
      if (!states_alone_) reader_.Queries(first, n);
      reader_.Keys(first, n);
      const auto row = static_cast<ptrdiff_t>(row_);
      for_tables = {{rows.q, row}, {rows.k, row}};
    }
    if (!values_in_place_) reader_.Values(first, n, b_.v, value_row_);
    if (p_.normalize && states_alone_) {
      Denominators<false>(d_, rows.q, rows.k, reader_.NormalizerDecays(), n, row_, b_.z, b_.z, 0, b_.denominators);
    } else if (p_.normalize) {
      Denominators(d_, rows.q, rows.k, reader_.NormalizerDecays(), n, row_, b_.z, b_.z, 0, b_.denominators);
      InvertDenominators(n);
    }
    if (!gated) return;
    WithForm(p_, [&](auto form) HWY_ATTR {
      const Tables<T> tables = {rows.q, rows.k, rows.tile_decay, b_.pairs};
      if (states_alone_) {
        BlockTables<form.value, TablesOf::kKeys>(d_, for_tables, rows.decay, rows.bonus, n, row_, tables);
      } else {
        BlockTables<form.value, TablesOf::kAll>(d_, for_tables, rows.decay, rows.bonus, n, row_, tables);
      }
    });
    if (!p_.has_value_decay) return;
    reader_.ValueDecays(first, n, value_row_);
    BlockTables<Form::kKey, TablesOf::kKeys>(d_, {{}, {b_.v, static_cast<ptrdiff_t>(value_row_)}}, rows.value_decay,
                                             rows.bonus, n, value_row_,
                                             {nullptr, rows.value_write, rows.value_tile_decay, nullptr});
  }

  HWY_ATTR void InvertDenominators(size_t n) {
    for (size_t t = 0; t < n; ++t) {
      b_.denominators[t] = 1 / Denominator(p_, b_.rows, b_.denominators[t], t);
    }
  }

  HWY_NOINLINE HWY_ATTR void CausalBlock(int64_t first, size_t n) {
    const BlockRows<T>& rows = b_.rows;
    const bool gated = p_.gate != Gate::kNone;
    RowPrefetch prefetch =
        NextRows(first + static_cast<int64_t>(n), states_alone_ ? kKeys : kKeys | kQueries, NumPrefetches<T>(shape_));
    const auto value_stride = static_cast<ptrdiff_t>(value_row_);
    Product<T> x = {rows.q, rows.k, row_, b_.v, value_stride, b_.o, value_stride};
    if (values_in_place_) {
      x.lanes = RowAt<T>(p_.v, s_, head_, first);
      x.lane_stride = static_cast<ptrdiff_t>(p_.v.token_stride);
    }
    if (outputs_in_place_) {
      x.out = RowAt<T>(p_.o, s_, head_, first);
      x.out_stride = static_cast<ptrdiff_t>(p_.o.token_stride);
    }
    if (!gated) {
      Sweep<Decay::kNone>(x, n, prefetch);
    } else {
      x.row_decay = rows.tile_decay;
      x.pairs = b_.pairs;
      if (p_.has_value_decay) {
        ValueGatedProduct(n, x, prefetch);
      } else if (p_.gate == Gate::kScalar) {
        Sweep<Decay::kLanes>(x, n, prefetch);
      } else {
        Sweep<Decay::kRows>(x, n, prefetch);
      }
    }
    if (!outputs_in_place_ && !states_alone_) StoreOutputs(first, n);
  }

  template <Decay kDecay>
  HWY_INLINE void Sweep(const Product<T>& x, size_t n, RowPrefetch& prefetch) {
    const auto sweep = [&](auto read) HWY_ATTR {
      SweepColumnBlocks<kDecay, read.value>(d_, x, n, false, shape_.rows, shape_.begin, shape_.end, state_, prefetch);
    };
    states_alone_ ? sweep(std::false_type()) : sweep(std::true_type());
  }

  // With decays of columns, the pairs of a tile contribute to o as they do to dq in the backward pass, with decays
  // between the two tokens.
  HWY_NOINLINE HWY_ATTR void ValueGatedProduct(size_t n, Product<T> x, RowPrefetch& prefetch) {
    const BlockRows<T>& rows = b_.rows;
    x.lanes = rows.value_write;
    x.lane_decay = rows.value_tile_decay;
    Sweep<Decay::kRowsLanes>(x, n, prefetch);
    if (states_alone_) return;
    AddValuePairs(d_, b_.v, rows.value_decay, b_.pairs, n, value_row_, shape_.begin, shape_.end, b_.o);
    AddOwnPairs<PairsOf::kQueries>(d_, b_.v, b_.pairs, n, 0, value_row_, shape_.begin, shape_.end, b_.o);
  }

  // Returns the prefetches of the next block in this many calls: with kKeys the rows that update the state, with
  // kQueries those of q, o and the output gate. In stages another task reads what all columns need.
  enum RowsOf : unsigned { kKeys = 1, kQueries = 2 };
  HWY_ATTR RowPrefetch NextRows(int64_t first, unsigned which, size_t calls) const {
    RowPrefetch prefetch;
    if (first >= s_.count) return prefetch;
    const auto add = [&](const Rows& rows, int64_t head, int64_t size) {
      if (!in_stages_) AddRows(prefetch, rows, s_, head, first, 0, size);
    };
    // Prefetches only this task's columns: lines that another core writes would be transferred back and forth.
    const auto add_columns = [&](const Rows& rows) {
      AddRows(prefetch, rows, s_, head_, first, static_cast<int64_t>(shape_.begin),
              std::min(static_cast<int64_t>(shape_.end), p_.value_size));
    };
    const int64_t key_head = head_ / p_.group();
    if ((which & kKeys) != 0) {
      if (!p_.complement_keys) add(p_.k, key_head, p_.key_size);
      if (p_.gate == Gate::kKey) add(p_.log_decay, head_, p_.key_size);
      if (values_in_place_) {
        add_columns(p_.v);
      } else {
        add(p_.v, head_, p_.value_size);
      }
    }
    if ((which & kQueries) != 0) {
      add(p_.q, key_head, p_.key_size);
      add_columns(p_.o);
      if (p_.output_gate.data != nullptr) add_columns(p_.output_gate);
    }
    prefetch.Begin(static_cast<size_t>(std::min(kBlockTokens, s_.count - first)), calls);
    return prefetch;
  }

  // The first sweep of non-causal calls: S = sum_t k_t v_t^T and z = sum_t k_t.
  HWY_ATTR void PrepareSums(int64_t first, size_t n) {
    reader_.Keys(first, n);
    reader_.Values(first, n, b_.v, value_row_);
    for (size_t t = 0; t < n && p_.normalize; ++t) {
      for (size_t i = 0; i < row_; i += N) {
        hn::Store(hn::Add(hn::Load(d_, b_.z + i), hn::Load(d_, b_.rows.k + t * row_ + i)), d_, b_.z + i);
      }
    }
  }
  HWY_ATTR void AddBlock(int64_t first, size_t n) {
    RowPrefetch prefetch = NextRows(first + static_cast<int64_t>(n), kKeys, NumSumPrefetches<T>(shape_));
    AddOuterProducts(d_, b_.rows.k, row_, b_.v, value_row_, n, shape_, state_, prefetch);
  }

  // The second sweep of non-causal calls: o_t = S^T q_t.
  HWY_ATTR void PrepareReads(int64_t first, size_t n) {
    reader_.Queries(first, n);
    if (!p_.normalize) return;
    for (size_t t = 0; t < n; ++t) {
      auto sum = hn::Zero(d_);
      for (size_t i = 0; i < row_; i += N) {
        sum = hn::MulAdd(hn::Load(d_, b_.z + i), hn::Load(d_, b_.rows.q + t * row_ + i), sum);
      }
      b_.denominators[t] = hn::ReduceSum(d_, sum);
    }
    InvertDenominators(n);
  }
  HWY_ATTR void ReadBlock(int64_t first, size_t n) {
    RowPrefetch prefetch = NextRows(first + static_cast<int64_t>(n), kQueries, NumReadPrefetches<T>(shape_));
    ReadState(d_, b_.rows.q, row_, n, shape_, state_, b_.o, value_row_, prefetch);
    StoreOutputs(first, n);
  }

  HWY_ATTR void StoreOutputs(int64_t first, size_t n) {
    const size_t end = std::min(shape_.end, shape_.size);
    const OutputRows<T> rows(p_, s_, head_, first, n, b_.v, b_.gate, value_row_, shape_.begin, end);
    StoreRows(d_, b_.o, value_row_, p_.o, s_, head_, first, n, shape_.begin, end,
              [&](auto x, size_t t, size_t i) HWY_ATTR {
                if (p_.normalize) x = hn::Mul(x, hn::Set(d_, b_.denominators[t]));
                return rows.Finished(x, t, i);
              });
  }

  static constexpr size_t N = hn::MaxLanes(D());
  const D d_;
  const Problem& p_;
  const Sequence& s_;
  const int64_t head_;
  const ForwardBuffers<T>& b_;
  const RowReader<T> reader_;
  const size_t row_, value_row_;
  const bool first_part_, in_stages_, states_alone_, values_in_place_, outputs_in_place_;
  const StateShape shape_;
  T* const state_;  // of the part's columns
};

template <class T>
Stages ForwardStages(const Problem& p, int64_t threads) {
  return Stages(p, threads, p.value_size, kPartColumns, kBlockTokens, ForwardHead<T>::Sweeps(p));
}

template <class T>
int64_t ForwardWorkspace(const Context& ctx, const Problem& p) {
  const auto bytes = BytesOfHeads<ForwardBuffers<T>>(ForwardStages<T>(p, ctx.num_threads()), p);
  return bytes.per_thread + ShareOf(bytes.shared, ctx.num_threads());
}

template <class T>
void Forward(Context& ctx, const Problem& p) {
  Stages stages = ForwardStages<T>(p, ctx.num_threads());
  const auto bytes = BytesOfHeads<ForwardBuffers<T>>(stages, p);
  ctx.ReserveScratch(bytes.per_thread);
  ctx.ReserveShared(bytes.shared);
  RunHeads<ForwardBuffers<T>>(
      ctx, p, stages, ctx.Shared(),
      [&](const Task& task, const ForwardBuffers<T>& buffers, int, bool in_stages)
          HWY_ATTR { return ForwardHead<T>(p, task, buffers, in_stages); },
      p);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_FORWARD_INL_H_

// The backward recurrence, for one dtype of states.
//
// Compiled once per SIMD target. With D_t = q_t d_o_t^T + G_{t+1} .* D_{t+1} the gradient of S_t, and with both states
// also transposed, so that q and k are in lanes:
//
//   dq_t = S_t d_o_t      forward, on S^T
//   dk_t = D_t v_t        reversed, on D^T
//   dv_t = D_t^T k_t      reversed, on D
//
// Each is a pass of register_tile-inl.h with other operands: 12 K V flops per token. A task owns one value head of one
// sequence, and passes over the blocks of 64 tokens twice, forward for dq and reversed for dk and dv. Both sweeps widen
// rows and compute tables. If there are fewer heads than threads, tasks prepare blocks, pass ranges of columns over
// them, and finish them (stages.h). If only gradients of initial states are wanted, D alone is
// computed: 2 K V flops, and those of the forward pass if outputs are normalised.
//
// The gradient of a log decay is a sum of q .* dq - k .* dk over all later tokens. It is computed inside a block; the
// tokens after the block contribute <S, D> at its end, so that nothing cancels over long distances. For this the
// forward pass stores S^T after each block, and dq per token, or with scalar decays only <q, dq>. A token's own pair is
// in q .* dq and in k .* dk, often as their largest part, and cancels: it is added to dq and dk after that sum
// (gradients-inl.h).
//
// A decay of columns acts on products by value as a decay of rows acts on products by key. Its gradient is a sum of
// o .* d_o - v .* dv, for which o is recomputed: 16 K V flops per token.
//
// Value heads that share a key head add to its dq and dk in order (core/ticket.h), starting with the last block.
#if defined(HEED_ENGINES_RECURRENCE_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_BACKWARD_INL_H_
#undef HEED_ENGINES_RECURRENCE_BACKWARD_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "heed/core/context.h"
#include "heed/engines/recurrence/backward_buffers-inl.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/chunk_states.h"
#include "heed/engines/recurrence/gate_gradients-inl.h"
#include "heed/engines/recurrence/kernels.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/rows-inl.h"
#include "heed/engines/recurrence/shared_gradients-inl.h"
#include "heed/engines/recurrence/stages.h"
#include "heed/engines/recurrence/sums_backward-inl.h"
#include "heed/engines/recurrence/tasks.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

template <class T>
class BackwardHead : GateGradients<T> {
  using Base = GateGradients<T>;
  using typename Base::D;
  using Base::d_, Base::N, Base::p_, Base::g_, Base::s_, Base::task_, Base::head_, Base::b_, Base::shared_,
      Base::reader_, Base::dq_, Base::value_pairs_, Base::row_, Base::value_row_, Base::values_, Base::by_key_,
      Base::by_value_, Base::BoundaryShape, Base::TokensOf, Base::BoundaryState, Base::DTransposed, Base::DState;

 public:
  BackwardHead(const Problem& p, const Gradients& g, const Task& task, const BackwardBuffers<T>& buffers,
               const SharedBuffers<T>& shared, const ChunkStates& states, void* states_scratch, bool in_stages)
      : Base(p, g, task, buffers, shared), states_(states), states_scratch_(states_scratch), in_stages_(in_stages),
        gated_(p.gate != Gate::kNone), scalar_(p.gate == Gate::kScalar), states_alone_(OfStatesAlone(g)),
        needs_states_(NeedsStates(p, g)), lane_row_(static_cast<ptrdiff_t>(row_)),
        value_lane_row_(static_cast<ptrdiff_t>(value_row_)) {}

  // The first sweep computes dq and S^T, the second, reversed, dk, dv and D. Gradients of states alone may need D only.
  static StagesOf Sweeps(const Problem& p, const Gradients& g) {
    return {.sweeps = NeedsStates(p, g) ? 2 : 1,
            .prepares_in_order = p.normalize || p.has_bonus,
            .finishes = true,
            .finishes_in_order = p.has_bonus || p.constant_decay};
  }

  // Runs all stages of a head, which the task owns.
  HWY_NOINLINE HWY_ATTR void Compute() {
    reader_.Begin();
    if (p_.has_value_decay && g_.d_log_value_decay.data != nullptr) StoreAllOutputs();
    InOrder(*this, needs_states_ ? 2 : 1, NumBlocks(s_.count));
  }

  HWY_ATTR void Begin(int64_t sweep) {
    if (!IsReversed(sweep)) return LoadFirstState();
    LoadState(d_, g_.d_final, s_.state, head_, by_value_, DState());
    LoadState(d_, g_.d_final, s_.state, head_, by_key_, DTransposed());
    if (p_.normalize) LoadNormalizerRow();
  }

  HWY_ATTR void End(int64_t sweep) {
    if (!IsReversed(sweep)) return;
    StoreState(d_, DState(), by_value_, g_.d_initial, s_.state, head_);
    if (p_.normalize) StoreNormalizerRow();
  }

  HWY_NOINLINE HWY_ATTR void Prepare(int64_t sweep, int64_t step) {
    const int64_t block = BlockOf(sweep, step);
    TakeBlock(block);
    if (in_stages_ && sweep == 0 && step == 0) reader_.Begin();
    if (!IsReversed(sweep)) return PrepareQueries(block, TokensOf(block));
    // A task that owns the head has the rows of the last block from the forward sweep.
    const bool has_rows = !in_stages_ && needs_states_ && step == 0;
    if (!has_rows) states_alone_ ? PrepareStates(block, TokensOf(block)) : PrepareKeys(block, TokensOf(block));
    if (p_.normalize) PutNormalizer(TokensOf(block));
  }

  HWY_ATTR void Pass(int64_t sweep, int64_t step) {
    const int64_t block = BlockOf(sweep, step);
    TakeBlock(block);
    if (!IsReversed(sweep)) return QueryBlock(block, TokensOf(block));
    states_alone_ ? StateBlock(block, TokensOf(block)) : KeyBlock(block, TokensOf(block));
  }

  HWY_ATTR void Finish(int64_t sweep, int64_t step) {
    const int64_t block = BlockOf(sweep, step);
    TakeBlock(block);
    if (!IsReversed(sweep)) return FinishQueries(block, TokensOf(block));
    if (!states_alone_) FinishKeys(block, TokensOf(block));
  }

 private:
  // False if D depends on gates, queries and d_o alone, and nothing else is wanted.
  static bool NeedsStates(const Problem& p, const Gradients& g) {
    return !OfStatesAlone(g) || p.normalize || p.running_max();
  }
  bool IsReversed(int64_t sweep) const { return sweep == 1 || !needs_states_; }
  int64_t BlockOf(int64_t sweep, int64_t step) const {
    return IsReversed(sweep) ? NumBlocks(s_.count) - 1 - step : step;
  }

  // The normaliser's gradient is the last row of D^T: its value channel is 1.
  template <class F>
  HWY_INLINE void ForNormalizerRow(const States& states, const F& f) {
    T* z = states.data == nullptr ? nullptr : StateAt<T>(states, s_.state, head_);
    ForColumnBlocks<T>(by_key_, [&](size_t column, size_t width) HWY_ATTR {
      T* row = DTransposed() + by_key_.Offset(column) + values_ * width;
      for (size_t i = 0; i < width; ++i) {
        const bool exists = z != nullptr && column + i < by_key_.size;
        f(row[i], exists ? z + static_cast<int64_t>(column + i) * states.key_stride : nullptr);
      }
    });
  }
  HWY_ATTR void LoadNormalizerRow() {
    ForNormalizerRow(g_.d_final_z, [](T& x, const T* z) { x = z == nullptr ? 0 : *z; });
  }
  HWY_ATTR void StoreNormalizerRow() {
    ForNormalizerRow(g_.d_initial_z, [](const T& x, T* z) {
      if (z != nullptr) *z = x;
    });
  }

  // Loads S^T before the first block. A chunked kernel computes S^T before each block.
  HWY_NOINLINE HWY_ATTR void LoadFirstState() {
    if (s_.count == 0) return;
    const StateShape shape = BoundaryShape();
    if (states_.compute != nullptr) {
      states_.compute(p_, task_, states_scratch_,
                      [&](int64_t block, const float* state) { PutTransposed(state, shape, BoundaryState(block)); });
    } else {
      LoadState(d_, p_.initial, s_.state, head_, shape, BoundaryState(0));
    }
  }

  // Transposes S from column blocks of kPartColumns columns to column blocks of S^T.
  HWY_ATTR void PutTransposed(const float* state, const StateShape& shape, T* to) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      constexpr auto kWidth = static_cast<size_t>(kPartColumns);
      const size_t keys = (row_ + kWidth - 1) / kWidth * kWidth;
      ForColumnBlocks<T>(shape, [&](size_t column, size_t width) HWY_ATTR {
        T* column_block = to + shape.Offset(column);
        for (size_t c = 0; c < width; c += N) {
          for (size_t r = 0; r < shape.rows; r += N) {
            hn::Vec<D> v[N];
            for (size_t i = 0; i < N; ++i) {
              v[i] = hn::LoadU(d_, state + r / kWidth * kWidth * keys + (column + c + i) * kWidth + r % kWidth);
            }
            hs::Transpose(d_, v);
            for (size_t i = 0; i < HWY_MIN(N, shape.rows - r); ++i) {
              hn::Store(v[i], d_, column_block + (r + i) * width + c);
            }
          }
        }
      });
    }
  }

  // Computes decays of columns, and values with the decays to the ends of their tiles.
  HWY_ATTR void DecayValues(int64_t first, size_t n) {
    reader_.ValueDecays(first, n, value_row_);
    BlockTables<Form::kKey, TablesOf::kKeys>(d_, {{}, {b_.v, value_lane_row_}}, b_.rows.value_decay, b_.rows.bonus, n,
                                             value_row_,
                                             {nullptr, b_.rows.value_write, b_.rows.value_tile_decay, nullptr});
  }

  // Computes o of all tokens, which the gradient of the columns' decays needs.
  HWY_NOINLINE HWY_ATTR void StoreAllOutputs() {
    LoadState(d_, p_.initial, s_.state, head_, by_value_, b_.state);
    for (int64_t block = 0; block < NumBlocks(s_.count); ++block) {
      const int64_t first = block * kBlockTokens;
      const auto n = static_cast<size_t>(std::min(kBlockTokens, s_.count - first));
      reader_.Queries(first, n);
      reader_.Keys(first, n);
      reader_.Values(first, n, b_.v, value_row_);
      ComputeTables<TablesOf::kAll>(n);
      DecayValues(first, n);
      T* o = b_.outputs + static_cast<size_t>(first) * value_row_;
      Product<T> x = {b_.read, b_.write, row_, b_.rows.value_write, value_lane_row_, o, value_lane_row_};
      x.row_decay = b_.rows.tile_decay;
      x.lane_decay = b_.rows.value_tile_decay;
      RowPrefetch prefetch;
      SweepColumnBlocks<Decay::kRowsLanes>(d_, x, n, false, by_value_.rows, by_value_.begin, by_value_.end, b_.state,
                                           prefetch);
      AddValuePairs(d_, b_.v, b_.rows.value_decay, b_.pairs, n, value_row_, by_value_.begin, by_value_.end, o);
    }
  }

  template <TablesOf kOf>
  HWY_ATTR void ComputeTables(size_t n) {
    const Tables<T> tables = {b_.read, b_.write, b_.rows.tile_decay, b_.pairs, b_.reversed_pairs};
    WithForm(p_, [&](auto form) HWY_ATTR {
      BlockTables<form.value, kOf>(d_, {{b_.rows.q, lane_row_}, {b_.rows.k, lane_row_}}, b_.rows.decay, b_.rows.bonus,
                                   n, row_, tables);
    });
  }

  // Reads the rows of a block for the forward sweep, and advances z past it.
  HWY_NOINLINE HWY_ATTR void PrepareQueries(int64_t block, size_t n) {
    const int64_t first = block * kBlockTokens;
    if (ReadsQueries(block)) reader_.Queries(first, n);
    if (p_.running_max()) b_.boundary_m[block] = *reader_.max();
    reader_.Keys(first, n);
    reader_.Values(first, n, b_.v, value_row_);
    LoadRows(d_, g_.d_o, s_, head_, first, n, values_, b_.d_o, value_row_);
    if (p_.normalize && block == 0) {
      LoadNormalizer(p_.initial_z, s_.state, head_, by_key_.size, row_, b_.BoundaryZ(0));
    }
    if (p_.normalize) Normalize(block, n);
    if (gated_ && KeepsRows(block)) {
      ComputeTables<TablesOf::kAll>(n);
    } else if (gated_) {
      ComputeTables<TablesOf::kKeys>(n);
    }
    if (p_.has_value_decay) ValueTables<TablesOf::kAll>(first, n);
  }
  // True if the reversed sweep begins with the rows and tables of this block.
  bool KeepsRows(int64_t block) const { return !in_stages_ && block + 1 == NumBlocks(s_.count); }
  bool ForDecays() const { return scalar_ && g_.d_log_decay.data != nullptr; }
  bool ReadsQueries(int64_t block) const {
    return p_.normalize || ForDecays() || p_.feature != Feature::kIdentity || KeepsRows(block);
  }

  // The forward pass over a block: computes S d_o, and advances S^T past the block.
  HWY_NOINLINE HWY_ATTR void QueryBlock(int64_t block, size_t n) {
    RowPrefetch prefetch = LaterRows(block, ReadsQueries(block));
    const StateShape shape = BoundaryShape();
    T* state = BoundaryState(block);
    if (block > 0 && states_.compute == nullptr && b_.boundary_state_size != 0) {
      std::memcpy(state, BoundaryState(block - 1), shape.Offset(shape.end) * sizeof(T));
    }
    // u_t = S d_o_t.
    Product<T> x = {p_.has_value_decay ? b_.value_read : b_.d_o,
                    p_.has_value_decay ? b_.rows.value_write : b_.v,
                    value_row_,
                    gated_ ? b_.write : b_.rows.k,
                    lane_row_,
                    dq_,
                    lane_row_};
    x.row_decay = b_.rows.value_tile_decay;
    x.lane_decay = b_.rows.tile_decay;
    Run<Decay::kLanes>(x, n, false, shape, state, prefetch);
  }

  HWY_NOINLINE HWY_ATTR void FinishQueries(int64_t block, size_t n) {
    const int64_t first = block * kBlockTokens;
    if (gated_) this->QueryPairs(n);
    if (ForDecays()) this->AddQueryProducts(first, n);
    if (scalar_) this->OwnQueryPairs(n);
    if (p_.normalize) {
      this->AddNormalizer(n, b_.z, row_);
      for (size_t t = 0; t < n; ++t) {
        d_denominators_[t] = b_.d_o[t * value_row_ + values_];
      }
      if (ForDecays()) this->AddNormalizerProducts(first, n, b_.BoundaryZ(block), reader_.NormalizerDecays());
    }
    if (!KeepsQueryGradients() && !states_alone_) this->AddToHead(Base::kQueries, block, n);
  }

  // Reads the rows of a block for the reversed sweep if no gradient of a tensor is wanted.
  HWY_NOINLINE HWY_ATTR void PrepareStates(int64_t block, size_t n) {
    const int64_t first = block * kBlockTokens;
    if (p_.running_max()) *reader_.max() = b_.boundary_m[block];
    reader_.Queries(first, n);
    p_.running_max() ? reader_.Keys(first, n) : reader_.Decays(first, n);
    LoadRows(d_, g_.d_o, s_, head_, first, n, values_, b_.d_o, value_row_);
    if (p_.normalize) DivideByStoredDenominators(n);
    if (gated_) ComputeTables<TablesOf::kQueries>(n);
    if (p_.has_value_decay) ValueTables<TablesOf::kQueries>(first, n);
  }

  // The reversed pass over such a block: computes D before the block and, for the normaliser, D^T.
  HWY_NOINLINE HWY_ATTR void StateBlock(int64_t block, size_t n) {
    RowPrefetch prefetch;
    if (block > 0 && !in_stages_) {
      const Rows none = {};
      prefetch = this->RowsOf(block - 1, {&p_.q}, {}, {scalar_ ? &none : &p_.log_decay}, {&g_.d_o});
      prefetch.Begin(kBlock, NumPrefetches<T>(by_value_));
    }
    const T* read = gated_ ? b_.read : b_.rows.q;
    const T* value_read = p_.has_value_decay ? b_.value_read : b_.d_o;
    if (p_.normalize) {
      Product<T> x = {nullptr, value_read, value_row_, read, lane_row_, nullptr, 0};
      x.lane_decay = b_.rows.tile_decay;
      Run<Decay::kLanes, false>(x, n, true, by_key_, DTransposed(), prefetch);
    }
    Product<T> y = {nullptr, read, row_, value_read, value_lane_row_, nullptr, 0};
    y.row_decay = b_.rows.tile_decay;
    if (p_.has_value_decay) y.lane_decay = b_.rows.value_tile_decay;
    Run<Decay::kRows, false>(y, n, true, by_value_, DState(), prefetch);
  }

  // Reads the rows of a block for the reversed sweep.
  HWY_NOINLINE HWY_ATTR void PrepareKeys(int64_t block, size_t n) {
    const int64_t first = block * kBlockTokens;
    if (p_.running_max()) *reader_.max() = b_.boundary_m[block];
    reader_.Queries(first, n);
    reader_.Keys(first, n);
    reader_.Values(first, n, b_.v, value_row_);
    LoadRows(d_, g_.d_o, s_, head_, first, n, values_, b_.d_o, value_row_);
    if (p_.normalize) DivideByStoredDenominators(n);
    if (gated_) ComputeTables<TablesOf::kAll>(n);
    if (p_.has_value_decay) ValueTables<TablesOf::kAll>(first, n);
  }

  bool WantsValueDecay() const { return g_.d_log_value_decay.data != nullptr; }
  bool WantsValues() const { return g_.dv.data != nullptr || g_.d_initial.data != nullptr || WantsValueDecay(); }
  bool ValuesInPlace() const { return InPlace<T>(g_.dv, p_.value_size) && !p_.has_value_decay; }

  // The reversed pass over a block: computes D v and dv, and D and D^T before the block.
  HWY_NOINLINE HWY_ATTR void KeyBlock(int64_t block, size_t n) {
    RowPrefetch prefetch = EarlierRows(block);
    const bool wants_decays = g_.d_log_decay.data != nullptr || WantsValueDecay();
    if (gated_ && wants_decays) this->BoundaryProducts(block);
    const T* read = gated_ ? b_.read : b_.rows.q;
    const T* write = gated_ ? b_.write : b_.rows.k;
    const T* value_read = p_.has_value_decay ? b_.value_read : b_.d_o;
    const T* value_write = p_.has_value_decay ? b_.rows.value_write : b_.v;

    // x_t = D v_t.
    Product<T> x = {value_write, value_read, value_row_, read, lane_row_, b_.dk, lane_row_};
    x.row_decay = b_.rows.value_tile_decay;
    x.lane_decay = b_.rows.tile_decay;
    Run<Decay::kLanes>(x, n, true, by_key_, DTransposed(), prefetch);

    // dv_t = D^T k_t.
    if (!WantsValues()) return;
    Product<T> y = {write, read, row_, value_read, value_lane_row_, b_.dv, value_lane_row_};
    if (ValuesInPlace()) {
      y.out = RowAt<T>(g_.dv, s_, head_, block * kBlockTokens);
      y.out_stride = static_cast<ptrdiff_t>(g_.dv.token_stride);
    }
    y.row_decay = b_.rows.tile_decay;
    if (p_.has_value_decay) y.lane_decay = b_.rows.value_tile_decay;
    y.pairs = b_.reversed_pairs;
    Run<Decay::kRows>(y, n, true, by_value_, DState(), prefetch);
  }

  HWY_NOINLINE HWY_ATTR void FinishKeys(int64_t block, size_t n) {
    const int64_t first = block * kBlockTokens;
    if (gated_) {
      this->KeyPairs(n);
      if (scalar_) {
        this->ScalarDecayGradients(first, n);
      } else {
        this->DecayGradients(n);
      }
      this->OwnKeyPairs(n);
      if (!scalar_) {
        this->OwnQueryPairs(n);
        this->StoreDecayGradients(first, n);
      }
      if (p_.has_bonus) this->BonusGradients(n);
    }
    if (KeepsQueryGradients()) this->AddToHead(Base::kQueries, block, n);
    this->AddToHead(Base::kKeys, block, n);
    if (!WantsValues()) return;
    if (p_.has_value_decay) {
      this->ValuePairGradients(n);
      if (WantsValueDecay()) this->ValueDecayGradients(first, n);
      this->OwnValuePairs(n);
    }
    if (g_.dv.data != nullptr && !ValuesInPlace()) this->StoreValueGradients(first, n);
  }

  bool KeepsQueryGradients() const { return BackwardBuffers<T>::KeepsQueryGradients(p_); }

  // Sets the pointers to the data that the forward pass stores for the reversed pass.
  HWY_ATTR void TakeBlock(int64_t block) {
    const size_t first = static_cast<size_t>(block) * kBlock;
    if (KeepsQueryGradients()) dq_ = b_.dq + first * row_;
    value_pairs_ = b_.value_pairs + first * kTile;
    inverses_ = b_.inverses + first;
    d_denominators_ = b_.d_denominators + first;
  }

  // Computes the tables of decays of columns: d_o and v with their decays, and w_tj.
  template <TablesOf kOf>
  HWY_ATTR void ValueTables(int64_t first, size_t n) {
    reader_.ValueDecays(first, n, value_row_);
    BlockTables<Form::kKey, kOf>(d_, {{b_.d_o, value_lane_row_}, {b_.v, value_lane_row_}}, b_.rows.value_decay,
                                 b_.rows.value_decay, n, value_row_,
                                 {b_.value_read, b_.rows.value_write, b_.rows.value_tile_decay, value_pairs_});
  }

  template <Decay kDecay, bool kRead = true>
  HWY_INLINE void Run(const Product<T>& x, size_t n, bool reversed, const StateShape& shape, T* state,
                      RowPrefetch& prefetch) {
    const auto sweep = [&](auto decay) HWY_ATTR {
      SweepColumnBlocks<decay.value, kRead>(d_, x, n, reversed, shape.rows, shape.begin, shape.end, state, prefetch);
    };
    if (p_.has_value_decay) {
      sweep(std::integral_constant<Decay, kDecay == Decay::kLanes ? Decay::kLanesRows : Decay::kRowsLanes>());
    } else if (!gated_) {
      sweep(std::integral_constant<Decay, Decay::kNone>());
    } else if (scalar_) {
      sweep(std::integral_constant<Decay, Decay::kLanes>());
    } else {
      sweep(std::integral_constant<Decay, kDecay>());
    }
  }

  // Replaces d_o_t by d_o_t / d_t, with d_t the denominator.
  HWY_ATTR void Normalize(int64_t block, size_t n) {
    Denominators(d_, b_.rows.q, b_.rows.k, reader_.NormalizerDecays(), n, row_, b_.BoundaryZ(block), b_.z, row_,
                 b_.denominators);
    std::memcpy(b_.BoundaryZ(block + 1), b_.z + (n - 1) * row_, row_ * sizeof(T));
    this->DivideByDenominators(n, inverses_);
  }
  HWY_ATTR void DivideByStoredDenominators(size_t n) {
    for (size_t t = 0; t < n; ++t) this->ScaleRow(inverses_[t], b_.d_o + t * value_row_);
  }
  // Stores the gradient of z_t . q_t and 1 in the extra columns of d_o and v.
  HWY_ATTR void PutNormalizer(size_t n) {
    for (size_t t = 0; t < n; ++t) {
      b_.d_o[t * value_row_ + values_] = d_denominators_[t];
      b_.v[t * value_row_ + values_] = 1;
    }
  }

  // Adds prefetches of what the forward pass stores for the reversed pass.
  HWY_ATTR void AddStoredRows(int64_t block, RowPrefetch& prefetch) const {
    const size_t row = row_ * sizeof(T), state = static_cast<size_t>(b_.boundary_state_size) * sizeof(T) / kBlock;
    if (KeepsQueryGradients()) {
      prefetch.Add(b_.dq + static_cast<size_t>(block) * kBlock * row_, static_cast<int64_t>(row), row);
    }
    if (state != 0) prefetch.Add(BoundaryState(block), static_cast<int64_t>(state), state);
  }

  // The prefetches of the forward pass.
  HWY_ATTR RowPrefetch LaterRows(int64_t block, bool reads_queries) const {
    if (block + 1 >= NumBlocks(s_.count) || in_stages_) return {};
    const Rows none = {}, &q = reads_queries ? p_.q : none, &dq = KeepsQueryGradients() ? none : g_.dq;
    const Rows& decays = scalar_ ? none : p_.log_decay;
    RowPrefetch prefetch = this->RowsOf(block + 1, {&p_.k, &q}, {&dq}, {&decays}, {&p_.v, &g_.d_o});
    AddStoredRows(block + 1, prefetch);
    prefetch.Begin(TokensOf(block + 1), NumPrefetches<T>(BoundaryShape()));
    return prefetch;
  }

  // The prefetches of the reversed pass. If the rows and states of one block fill much of L2, prefetched lines would be
  // evicted before they are used.
  HWY_ATTR RowPrefetch EarlierRows(int64_t block) const {
    constexpr size_t kMost = size_t{512} << 10;
    const size_t elements = 3 * row_ * value_row_ + kBlock * (11 * row_ + 8 * value_row_);
    if (block == 0 || elements * sizeof(T) > kMost || in_stages_) return {};
    const Rows none = {}, &dq = KeepsQueryGradients() ? g_.dq : none;
    const Rows &decays = scalar_ ? none : p_.log_decay, &d_decays = scalar_ ? none : g_.d_log_decay;
    RowPrefetch prefetch =
        this->RowsOf(block - 1, {&p_.k, &p_.q}, {&g_.dk, &dq}, {&decays, &d_decays}, {&p_.v, &g_.d_o, &g_.dv});
    AddStoredRows(block - 1, prefetch);
    prefetch.Begin(kBlock, NumPrefetches<T>(by_key_) + NumPrefetches<T>(by_value_));
    return prefetch;
  }

  const ChunkStates& states_;
  void* const states_scratch_;
  const bool in_stages_, gated_, scalar_, states_alone_, needs_states_;
  const ptrdiff_t lane_row_, value_lane_row_;          // row_ and value_row_ as signed strides
  T *inverses_ = nullptr, *d_denominators_ = nullptr;  // of the current block
};

// True if heads that are fewer than threads are computed in stages. With decays of columns o is computed before, and
// the gradient of a projection is a sum over heads after them. Non-causal heads are divided by columns.
inline bool InStages(const Problem& p) { return p.causal && !p.has_value_decay && !IsRandom(p.feature); }

template <class T>
Stages BackwardStages(const Problem& p, const Gradients& g, int64_t threads) {
  return Stages(p, InStages(p) ? threads : 1, std::min(p.features(), p.value_size), kPartColumns, kBlockTokens,
                BackwardHead<T>::Sweeps(p, g));
}

// The number of columns that may be divided among tasks without stages: 0 if an intermediate result is a sum over all
// of them.
inline int64_t Separable(const Problem& p) {
  const bool whole =
      p.causal || p.normalize || p.feature == Feature::kSoftmax || p.feature == Feature::kTaylor || IsRandom(p.feature);
  return whole ? 0 : std::min(p.features(), p.value_size);
}

template <class T>
int64_t PartColumns(const Problem& p, const TaskQueue& queue) {
  const int64_t units = (p.features() + kPartColumns - 1) / kPartColumns;
  const auto row = static_cast<int64_t>(Padded<T>(p.features()));
  return std::min((units + queue.parts() - 1) / queue.parts() * kPartColumns, row);
}

// Stores gradients that are sums over heads or tokens, when all tasks have ended.
template <class T>
void SumShared(Context& ctx, const Problem& p, const Gradients& g, const SharedBuffers<T>& shared) {
  if (g.d_projection.data != nullptr) StoreProjectionGradient(p, g, shared.d_projection);
  StoreConstants(p, shared, shared.d_bonus, g.d_bonus);
  if (p.gate == Gate::kKey && p.constant_decay) StoreConstants(p, shared, shared.d_decay, g.d_log_decay);
  if (p.gate != Gate::kScalar || g.d_log_decay.data == nullptr) return;
  ctx.ParallelFor(p.value_heads, [&](int64_t head, int) HWY_ATTR { SumDecayGradients(p, g, shared, head); });
}

// `states` computes the states at block boundaries with a chunked kernel, or is empty.
template <class T>
BackwardBytes BackwardWorkspace(int64_t threads, const Problem& p, const Gradients& g, const ChunkStates& states) {
  const TaskQueue queue(p, threads, Separable(p));
  const Stages stages = BackwardStages<T>(p, g, threads);
  BackwardBytes bytes =
      BytesOfHeads<BackwardBuffers<T>>(stages, p, PartColumns<T>(p, queue), states.compute != nullptr);
  bytes.per_thread += states.bytes != nullptr ? states.bytes(p) : 0;
  bytes.shared += SharedBuffers<T>(p, queue).Bytes(p);
  return bytes;
}

template <class T>
void Backward(Context& ctx, const Problem& p, const Gradients& g, const ChunkStates& states) {
  const TaskQueue queue(p, ctx.num_threads(), Separable(p));
  const int64_t columns = PartColumns<T>(p, queue);
  const bool in_chunks = states.compute != nullptr;
  SharedBuffers<T> shared(p, queue);
  const BackwardBytes bytes = BackwardWorkspace<T>(ctx.num_threads(), p, g, states);
  ctx.ReserveScratch(bytes.per_thread);
  ctx.ReserveShared(bytes.shared);
  shared.Init(p, ctx.Shared());
  Stages stages = BackwardStages<T>(p, g, ctx.num_threads());
  if (stages.used()) {
    RunHeads<BackwardBuffers<T>>(
        ctx, p, stages, static_cast<char*>(ctx.Shared()) + shared.Bytes(p),
        [&](const Task& task, const BackwardBuffers<T>& buffers, int worker, bool in_stages)
            HWY_ATTR { return BackwardHead<T>(p, g, task, buffers, shared, states, ctx.Scratch(worker), in_stages); },
        p, columns, in_chunks);
    return SumShared(ctx, p, g, shared);
  }
  const int64_t own = BackwardBuffers<T>::Bytes(p, columns, in_chunks);
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<BackwardBuffers<T>*>(ctx.Scratch(worker))->Init(p, columns, in_chunks);
  }
  ctx.ParallelFor(queue.size(), [&](int64_t index, int worker) HWY_ATTR {
    const auto& buffers = *static_cast<const BackwardBuffers<T>*>(ctx.Scratch(worker));
    const Task task = queue.At(index);
    if (IsRandom(p.feature)) {
      PackProjection(p, buffers.rows.raw, buffers.projection);
      const auto size = ProjectionShape<T>(p);
      std::memset(buffers.d_projection, 0, size.Offset(size.end) * sizeof(T));
    }
    if (p.causal) {
      void* after = static_cast<char*>(ctx.Scratch(worker)) + own;
      BackwardHead<T>(p, g, task, buffers, shared, states, after, false).Compute();
    } else {
      SumsBackwardHead<T>(p, g, task, buffers, shared).Compute();
    }
    if (g.d_projection.data != nullptr) AddToProjection(p, task, buffers, shared);
  });
  SumShared(ctx, p, g, shared);
}

template <class T, ChunkStates (*kStates)(const Context&) = &NoChunkStates>
Passes BackwardPasses() {
  return {.backward = [](Context& ctx, const Problem& p, const Gradients& g) { Backward<T>(ctx, p, g, kStates(ctx)); },
          .backward_workspace =
              [](const Context& ctx, const Problem& p, const Gradients& g) {
                return BackwardWorkspace<T>(ctx.num_threads(), p, g, kStates(ctx));
              }};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_BACKWARD_INL_H_

// Delta rules backward, for one dtype of states.
//
// Compiled once per SIMD target. Let e_t = w_t - S~_t^T r_t be what token t writes, and D_t the gradient of S_t:
//
//   D_t  = q_t d_o_t^T + G_{t+1} .* (D_{t+1} - r_{t+1} de_{t+1}^T)       de_t = D_t^T k_t = dw_t
//   dq_t = S_t d_o_t,  dr_t = -S~_t de_t,  dk_t = D_t e_t
//
// If the state is read before the decay (RWKV-7), with x_t = S_{t-1}^T a_t:
//
//   D_t  = q_t d_o_t^T + G_{t+1} .* D_{t+1} + a_{t+1} dx_{t+1}^T         dx_t = D_t^T b_t
//   dq_t = S_t d_o_t,  dk_t = D_t v_t,  dv_t = D_t^T k_t,  da_t = S_{t-1} dx_t,  db_t = D_t x_t
//
// D does not depend on S, so the passes are, with S also transposed so that keys are in lanes:
//
//   1. forward: e_t or x_t of all tokens, and S^T at the boundaries of blocks of 64 writes
//   2. per block, the last first: de_t or dv_t, dx_t reversed on D, with dk_t and db_t as sums over lanes;
//      then dq_t and dr_t or da_t forward on S^T
//
// This takes 18 K V flops per token, as does any method that does not store the state of each token. If only the
// gradient of the initial state is wanted, D alone is computed.
//
// If there are fewer heads than threads (stages.h), the passes over S and D are divided by value columns, and the last
// pass over S^T, which begins at a stored boundary, is a task per block. Sums over lanes are then kept per column block
// and added in their order.
//
// The gradient of a log decay is a sum over later tokens of q .* dq + r .* dr - k .* dk inside a block, and <S, D> at
// its end. A read of a write with no decay in between is in two of these terms, often as their largest part, and
// cancels: a query reads its own token's write, and a_t that of the token before. So S is read before the token writes
// and D before it is written to, and these pairs are added to the gradients of q, k, a and b after that sum.
#if defined(HEED_ENGINES_RECURRENCE_DELTA_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_DELTA_BACKWARD_INL_H_
#undef HEED_ENGINES_RECURRENCE_DELTA_BACKWARD_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_DELTA_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/context.h"
#include "heed/core/ticket.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/delta-inl.h"
#include "heed/engines/recurrence/delta_backward_buffers-inl.h"
#include "heed/engines/recurrence/delta_rows-inl.h"
#include "heed/engines/recurrence/delta_token-inl.h"
#include "heed/engines/recurrence/gradients-inl.h"
#include "heed/engines/recurrence/kernels.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/stages.h"
#include "heed/engines/recurrence/tasks.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// Transposes a state from column blocks of one shape to column blocks of the other.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE HWY_ATTR void TransposeState(D d, const T* from, const DeltaShape& from_shape, const DeltaShape& to_shape,
                                          T* to) {
  constexpr size_t N = hn::MaxLanes(D());
  ForColumnBlocks<T>(from_shape, [&](size_t from_column, size_t from_width) HWY_ATTR {
    ForColumnBlocks<T>(to_shape, [&](size_t to_column, size_t to_width) HWY_ATTR {
      const T* HWY_RESTRICT column_block = from + from_shape.Offset(from_column);
      T* HWY_RESTRICT to_column_block = to + to_shape.Offset(to_column);
      for (size_t c = 0; c < from_width; c += N) {
        for (size_t r = 0; r < to_width; r += N) {
          hn::Vec<D> v[N];
          for (size_t i = 0; i < N; ++i) {
            const size_t at = to_column + r + i;
            v[i] = at < from_shape.rows ? hn::LoadU(d, column_block + at * from_width + c) : hn::Zero(d);
          }
          hs::Transpose(d, v);
          for (size_t i = 0; i < N && from_column + c + i < to_shape.rows; ++i) {
            hn::StoreU(v[i], d, to_column_block + (from_column + c + i) * to_width + r);
          }
        }
      }
    });
  });
}

template <class T>
class DeltaBackwardHead {
 public:
  DeltaBackwardHead(const Problem& p, const Gradients& g, const Task& task, const DeltaBackwardBuffers<T>& buffers,
                    const DeltaShared<T>& shared, bool in_stages)
      : p_(p), g_(g), s_(p.sequences[static_cast<size_t>(task.sequence)]), task_(task), head_(task.head), b_(buffers),
        shared_(shared), reader_(p, s_, task.head, b_.rows), row_(Padded<T>(p.key_size)),
        value_row_(Padded<T>(p.value_size)), keys_(static_cast<size_t>(p.key_size)),
        values_(static_cast<size_t>(p.value_size)), writes_(static_cast<size_t>(p.writes)),
        by_value_{keys_,
                  keys_,
                  FirstColumn(task.part, task.parts, value_row_, kDeltaPart<T>),
                  FirstColumn(task.part + 1, task.parts, value_row_, kDeltaPart<T>),
                  values_,
                  false},
        by_key_{values_, values_, 0, row_, keys_, true}, state_(b_.state + by_value_.begin * keys_),
        d_state_(b_.d_state + by_value_.begin * keys_), before_(p.delta == Delta::kBeforeDecay),
        states_alone_(OfStatesAlone(g)), wants_decay_(g.d_log_decay.data != nullptr), in_stages_(in_stages) {}

  // The first sweep computes S, e_t or x_t, the second, reversed, gradients. Gradients of states alone need one.
  static StagesOf Sweeps(const Gradients& g) {
    if (OfStatesAlone(g)) return {};
    return {.sweeps = 2, .finishes = true};
  }

  HWY_ATTR void Begin(int64_t sweep) {
    if (OfGradients(sweep)) return LoadState(d_, g_.d_final, s_.state, head_, by_value_, d_state_);
    LoadState(d_, p_.initial, s_.state, head_, by_value_, state_);
  }
  HWY_ATTR void End(int64_t sweep) {
    if (OfGradients(sweep)) StoreState(d_, d_state_, by_value_, g_.d_initial, s_.state, head_);
  }

  HWY_NOINLINE HWY_ATTR void Prepare(int64_t sweep, int64_t step) {
    const int64_t block = BlockOf(sweep, step), first = block * p_.block_tokens();
    if (OfGradients(sweep)) reader_.Queries(first, TokensOf(block));
    reader_.Writes(first, TokensOf(block));
    if (!OfGradients(sweep)) return;
    reader_.LoadTokens(g_.d_o, head_, first, TokensOf(block), values_, p_.writes - 1, b_.d_o, value_row_);
  }

  HWY_NOINLINE HWY_ATTR void Pass(int64_t sweep, int64_t step) {
    const int64_t block = BlockOf(sweep, step);
    const size_t n = TokensOf(block) * writes_;
    if (!OfGradients(sweep)) return PassStates(block, n);
    if (states_alone_) {
      if (!in_stages_) {
        prefetch_ = reader_.Prefetch((block - 1) * p_.block_tokens(), n * NumColumnBlocks<T>(by_value_), true,
                                     {{}, {}, {&g_.d_o, &p_.write}});
      }
      return ReversedPass<false>(n, nullptr, nullptr);
    }
    if (wants_decay_) TransposeState(d_, d_state_, by_value_, by_key_, b_.d_transposed);
    if (!in_stages_) prefetch_ = EarlierRows(block, n);
    ReversedPass<true>(n, KeptOf(block), WrittenOf(block));
  }

  HWY_NOINLINE HWY_ATTR void Finish(int64_t sweep, int64_t step) {
    if (!OfGradients(sweep) || states_alone_) return;
    const int64_t block = BlockOf(sweep, step), first = block * p_.block_tokens();
    const size_t tokens = TokensOf(block), n = tokens * writes_;
    const T *kept = KeptOf(block), *written = WrittenOf(block);
    if (in_stages_) AddLaterSums(n);
    ForwardPass(n, kept, written, b_.BoundaryState(block));
    if (wants_decay_) {
      StateProducts(d_, b_.BoundaryState(block), by_key_, b_.d_transposed, by_key_, b_.suffix);
      DecayGradients(first, tokens);
    }
    AddOwnPairs(n, kept, written);
    if (before_) {
      AddToHead(kOfReadKeys, g_.d_read_key, block, 1);
      AddToHead(kOfWriteKeys, g_.d_write_key, block, 1);
      StoreWrites(b_.d_written, value_row_, g_.dv, head_, first, tokens, values_);
    } else {
      FactorGradients(first, tokens);
      if (p_.read_key.data != nullptr) AddToHead(kOfReadKeys, g_.d_read_key, block, 1);
    }
    AddToHead(kOfQueries, g_.dq, block, p_.scale);
    AddToHead(kOfKeys, g_.dk, block, 1);
  }

 private:
  using D = hn::ScalableTag<T>;
  static constexpr size_t N = hn::MaxLanes(D());

  bool OfGradients(int64_t sweep) const { return states_alone_ || sweep == 1; }
  int64_t BlockOf(int64_t sweep, int64_t step) const {
    return OfGradients(sweep) ? DeltaBlocks(p_, s_.count) - 1 - step : step;
  }
  size_t TokensOf(int64_t block) const {
    return static_cast<size_t>(std::min(p_.block_tokens(), s_.count - block * p_.block_tokens()));
  }

  // e_t or x_t of the writes of a block, and its e_t or v_t.
  T* KeptOf(int64_t block) const { return b_.kept + static_cast<size_t>(block * p_.block_writes()) * value_row_; }
  const T* WrittenOf(int64_t block) const { return before_ ? b_.rows.v : KeptOf(block); }

  // Stores S^T before the block and e_t or x_t of its writes, and advances S.
  HWY_ATTR void PassStates(int64_t block, size_t n) {
    TransposeState(d_, state_, by_value_, by_key_, b_.BoundaryState(block));
    if (!in_stages_) {
      prefetch_ = reader_.Prefetch((block + 1) * p_.block_tokens(), NumTokenPrefetches<T>(by_value_, n + 1), true);
    }
    DeltaColumnBlocks<false>(d_, p_, DeltaBlock<T>{reader_, b_.rows, row_, value_row_, nullptr, b_.found, &prefetch_},
                             n, by_value_, state_);
    const T* from = before_ ? b_.found : b_.rows.w;
    if (by_value_.end - by_value_.begin == value_row_) {
      std::memcpy(KeptOf(block), from, n * value_row_ * sizeof(T));
      return;
    }
    for (size_t at = by_value_.begin; at < n * value_row_; at += value_row_) {
      std::memcpy(KeptOf(block) + at, from + at, (by_value_.end - by_value_.begin) * sizeof(T));
    }
  }

  // Sums over the lanes of the column block from column c on: dk and db. In stages each column block has its own. What
  // whole blocks leave of the columns is up to two blocks, the last of which has the last sums.
  HWY_INLINE T* LaneSumsOf(DeltaSum of, size_t c) const {
    constexpr auto kColumns = static_cast<size_t>(kDeltaBlockColumns<T>);
    if (!in_stages_ || c == 0) return b_.sums[of];
    T* later = b_.later_sums[of == kOfKeys ? 0 : 1];
    return later + (c / kColumns - (c % kColumns == 0 ? 1 : 0)) * static_cast<size_t>(p_.block_writes()) * row_;
  }
  HWY_NOINLINE HWY_ATTR void AddLaterSums(size_t n) const {
    for (DeltaSum of : {kOfKeys, kOfWriteKeys}) {
      if (of == kOfWriteKeys && !before_) continue;
      hs::ForTiles<kDeltaBlockVectors>(0, value_row_ / N, [&](auto, size_t vector) HWY_ATTR {
        if (vector == 0) return;
        const T* later = LaneSumsOf(of, vector * N);
        for (size_t i = 0; i < n * row_; i += N) {
          hn::Store(hn::Add(hn::Load(d_, b_.sums[of] + i), hn::Load(d_, later + i)), d_, b_.sums[of] + i);
        }
      });
    }
  }

  // The prefetches of the previous block, which is processed next. Outputs are prefetched because stores wait for their
  // lines too.
  HWY_ATTR RowPrefetch EarlierRows(int64_t block, size_t n) const {
    const Rows none = {};
    const bool finishes = (head_ + 1) % p_.group() == 0, by_channel = p_.gate == Gate::kKey;
    const auto if_mine = [&](const Rows& rows) { return finishes ? &rows : &none; };
    return reader_.Prefetch((block - 1) * p_.block_tokens(),
                            n * (NumColumnBlocks<T>(by_value_) + NumColumnBlocks<T>(by_key_)), true,
                            {{if_mine(g_.dq), if_mine(g_.dk), if_mine(g_.d_read_key), if_mine(g_.d_write_key)},
                             {by_channel ? &g_.d_log_decay : &none, &g_.d_erase},
                             {&g_.d_o, &g_.dv, &p_.write, &g_.d_write}});
  }

  // Passes over the writes of a block in reverse: computes de and dk, or dv, dx, dk and db, and D before the block.
  // Without kGradients only de or dx and D, with the same bits.
  template <bool kGradients>
  HWY_NOINLINE HWY_ATTR void ReversedPass(size_t n, const T* kept, const T* written) {
    const auto run = [&](auto before, auto decay) HWY_ATTR {
      constexpr bool kBefore = before.value;
      constexpr unsigned kAlone = kBefore ? kRead2 : kRead;
      constexpr unsigned kReads = !kGradients ? kAlone : kBefore ? kRead | kRead2 | kDot | kDot2 : kRead | kDot;
      constexpr unsigned kBack = kBefore ? kWrite2 : kErase;
      ForColumnBlockVectors<T>(by_value_, [&](auto vectors, size_t c) HWY_ATTR {
        constexpr size_t kWidth = vectors.value * N;
        T* column_block = d_state_ + by_value_.Offset(c);
        T *dk = nullptr, *db = nullptr;
        if constexpr (kGradients) {
          dk = LaneSumsOf(kOfKeys, c);
          if (kBefore) db = LaneSumsOf(kOfWriteKeys, c);
          if (in_stages_ || c == 0) {
            for (T* sums : {dk, db}) {
              if (sums != nullptr) std::memset(sums, 0, n * row_ * sizeof(T));
            }
          }
        }
        for (size_t t = n; t-- > 0;) {
          const size_t at = t * row_, value_at = t * value_row_ + c;
          Token<T> token = Back(t + 1, c);
          token.write_row = b_.rows.q + at;
          token.write_lanes = b_.d_o + value_at;
          token.read_row = b_.rows.k + at;
          token.read_out = b_.d_written + value_at;
          token.read2_row = b_.rows.write_key + at;
          token.read2_out = b_.d_found + value_at;
          if constexpr (kGradients) {
            token.dot_lanes = written + value_at;
            token.dot_out = dk + at;
          }
          if constexpr (kGradients && kBefore) {
            token.dot2_lanes = kept + value_at;
            token.dot2_out = db + at;
          }
          prefetch_.Issue();
          if (t + 1 == n) {
            PassBoundaryToken<kWrite | kReads, Decay::kNone, vectors.value>(d_, token, keys_, kWidth, column_block);
          } else {
            PassToken<kWrite | kReads | kBack, decay.value, vectors.value>(d_, b_.rows.kinds[t + 1], token, keys_,
                                                                           kWidth, column_block);
          }
        }
        PassBoundaryToken<kBack, decay.value, vectors.value>(d_, Back(0, c), keys_, kWidth, column_block);
      });
    };
    WithDelta<Decay::kRows>(p_, run);
  }

  // The operands that lead from D of a write to D of the write before it.
  HWY_INLINE Token<T> Back(size_t t, size_t c) const {
    Token<T> token;
    token.decay = reader_.DecayOf(t);
    token.erase_row = token.write2_row = b_.rows.read + t * row_;
    token.erase_lanes = token.write2_lanes = (before_ ? b_.d_found : b_.d_written) + t * value_row_ + c;
    return token;
  }

  // Passes over the writes of a block with S^T from the boundary state on: computes dq, and -dr or da.
  HWY_NOINLINE HWY_ATTR void ForwardPass(size_t n, const T* kept, const T* written, T* state) {
    const auto run = [&](auto before, auto decay) HWY_ATTR {
      constexpr bool kBefore = before.value;
      constexpr unsigned kReads = kReadBefore | kRead2Before, kWrites = kBefore ? kWrite | kWrite2 : kWrite;
      ForColumnBlockVectors<T>(by_key_, [&](auto vectors, size_t c) HWY_ATTR {
        constexpr size_t kWidth = vectors.value * N;
        T* column_block = state + by_key_.Offset(c);
        if constexpr (kBefore) {  // the first token's da; the others are computed in the pass of the token before
          Token<T> first;
          first.before_row = b_.d_found;
          first.before_out = b_.sums[kOfReadKeys] + c;
          PassBoundaryToken<kReadBefore, Decay::kNone, vectors.value>(d_, first, by_key_.rows, kWidth, column_block);
        }
        for (size_t t = 0; t < n; ++t) {
          const size_t at = t * row_ + c, value_at = t * value_row_;
          Token<T> token;
          token.decay = reader_.DecayOf(t, c);
          token.before_row = kBefore ? b_.d_found + (t + 1 < n ? t + 1 : t) * value_row_ : b_.d_written + value_at;
          token.before_out = b_.sums[kOfReadKeys] + (kBefore ? at + row_ : at);
          token.write_row = written + value_at;
          token.write_lanes = b_.rows.k + at;
          token.write2_row = kept + value_at;
          token.write2_lanes = b_.rows.write_key + at;
          token.read2_row = b_.d_o + value_at;
          token.read2_out = b_.sums[kOfQueries] + at;
          prefetch_.Issue();
          PassToken<kReads | kWrites, decay.value, vectors.value>(d_, b_.rows.kinds[t], token, by_key_.rows, kWidth,
                                                                  column_block);
        }
      });
    };
    WithDelta<Decay::kLanes>(p_, run);
    if (before_) return;
    T* dr = b_.sums[kOfReadKeys];
    for (size_t i = 0; i < n * row_; i += N) hn::Store(hn::Neg(hn::Load(d_, dr + i)), d_, dr + i);
  }

  // Adds to dq, dk, da and db the reads of writes with no decay in between.
  HWY_NOINLINE HWY_ATTR void AddOwnPairs(size_t n, const T* kept, const T* written) const {
    // Token t writes `values` under `keys`; token `reader` reads them with `reads`, and the gradient of what it reads
    // is `d_values`.
    const auto pair = [&](size_t t, const T* values, const T* keys, DeltaSum key_sum, size_t reader, const T* d_values,
                          const T* reads, DeltaSum read_sum) HWY_ATTR {
      auto sum = hn::Zero(d_);
      for (size_t j = 0; j < value_row_; j += N) {
        const auto d_value = hn::Load(d_, d_values + reader * value_row_ + j);
        sum = hn::MulAdd(d_value, hn::Load(d_, values + t * value_row_ + j), sum);
      }
      const auto product = hn::Set(d_, hn::ReduceSum(d_, sum));
      for (size_t i = 0; i < row_; i += N) {
        const size_t at = t * row_ + i, from = reader * row_ + i;
        T *d_key = b_.sums[key_sum] + at, *d_read = b_.sums[read_sum] + from;
        hn::Store(hn::MulAdd(product, hn::Load(d_, keys + at), hn::Load(d_, d_read)), d_, d_read);
        hn::Store(hn::MulAdd(product, hn::Load(d_, reads + from), hn::Load(d_, d_key)), d_, d_key);
      }
    };
    for (size_t t = 0; t < n; ++t) {
      pair(t, written, b_.rows.k, kOfKeys, t, b_.d_o, b_.rows.q, kOfQueries);
      if (!before_) continue;
      pair(t, kept, b_.rows.write_key, kOfWriteKeys, t, b_.d_o, b_.rows.q, kOfQueries);
      if (t + 1 == n) continue;
      pair(t, written, b_.rows.k, kOfKeys, t + 1, b_.d_found, b_.rows.read, kOfReadKeys);
      pair(t, kept, b_.rows.write_key, kOfWriteKeys, t + 1, b_.d_found, b_.rows.read, kOfReadKeys);
    }
  }

  // Computes gradients of log decays: sums over later tokens, per key channel. The read key of RWKV-7 reads after the
  // decay of the token before.
  HWY_NOINLINE HWY_ATTR void DecayGradients(int64_t first, size_t tokens) {
    const size_t n = tokens * writes_;
    T* to = b_.rows.decay;  // no longer needed
    const auto product = [&](const T* a, const T* b, size_t at)
                             HWY_ATTR { return hn::Mul(hn::Load(d_, a + at), hn::Load(d_, b + at)); };
    for (size_t i = 0; i < row_; i += N) {
      auto later = hn::Load(d_, b_.suffix + i);
      for (size_t t = n; t-- > 0;) {
        const size_t at = t * row_ + i;
        const auto read_product = product(b_.rows.read, b_.sums[kOfReadKeys], at);
        auto own = hn::Sub(product(b_.rows.q, b_.sums[kOfQueries], at), product(b_.rows.k, b_.sums[kOfKeys], at));
        if (before_) {
          own = hn::Sub(own, product(b_.rows.write_key, b_.sums[kOfWriteKeys], at));
        } else {
          own = hn::Add(own, read_product);
        }
        const auto gradient = hn::Add(later, own);
        later = before_ ? hn::Add(gradient, read_product) : gradient;
        hn::Store(gradient, d_, to + at);
      }
    }
    // A token decays before its first write.
    if (p_.gate == Gate::kKey) {
      return StoreRows(d_, to, writes_ * row_, g_.d_log_decay, s_, head_, first, tokens, 0, keys_,
                       [](auto v, size_t, size_t) HWY_ATTR { return v; });
    }
    for (size_t t = 0; t < tokens; ++t) {
      StoreNumber(g_.d_log_decay, s_, head_, first + static_cast<int64_t>(t),
                  static_cast<double>(Sum(to + t * writes_ * row_, keys_)));
    }
  }

  HWY_ATTR T Sum(const T* x, size_t size) const {
    auto sum = hn::Zero(d_);
    for (size_t i = 0; i < size; i += N) {
      sum = hn::Add(sum, i + N <= size ? hn::Load(d_, x + i) : hn::LoadN(d_, x + i, size - i));
    }
    return hn::ReduceSum(d_, sum);
  }

  // Computes the gradients of the factors of r = beta .* erase .* read_key and w = beta .* write .* v.
  HWY_NOINLINE HWY_ATTR void FactorGradients(int64_t first, size_t tokens) {
    const size_t n = tokens * writes_;
    reader_.ReadKeys(first, tokens);
    T* dr = b_.sums[kOfReadKeys];
    std::fill_n(b_.d_beta, n, T{0});
    FactorBackward(p_.erase, g_.d_erase, first, tokens, keys_, row_, b_.rows.read, dr, dr);
    if (p_.read_key.data == nullptr) {
      T* dk = b_.sums[kOfKeys];
      for (size_t i = 0; i < n * row_; i += N) {
        hn::Store(hn::Add(hn::Load(d_, dk + i), hn::Load(d_, dr + i)), d_, dk + i);
      }
    }
    FactorBackward(p_.write, g_.d_write, first, tokens, values_, value_row_, b_.rows.v, b_.d_written, b_.dv);
    StoreWrites(b_.dv, value_row_, g_.dv, head_, first, tokens, values_);
    for (size_t i = 0; g_.d_beta.data != nullptr && i < n; ++i) {
      StoreNumber(RowsOfWrite(g_.d_beta, static_cast<int64_t>(i % writes_)), s_, head_,
                  first + static_cast<int64_t>(i / writes_), static_cast<double>(b_.d_beta[i]));
    }
  }

  // With y = beta .* factors .* x, computes dx from dy, stores the gradient of `factors`, and adds that of beta to
  // d_beta.
  HWY_ATTR void FactorBackward(const Rows& factors, const Rows& d_factors, int64_t first, size_t tokens, size_t size,
                               size_t row, const T* x, const T* dy, T* dx) {
    const bool by_channel = factors.data != nullptr, by_token = p_.beta.data != nullptr;
    T* factor_rows = b_.rows.raw;
    if (by_channel) reader_.LoadWrites(factors, head_, first, tokens, size, factor_rows, row);
    for (size_t t = 0; t < tokens * writes_; ++t) {
      const auto beta = hn::Set(d_, by_token ? b_.rows.beta[t] : T{1});
      auto sum = hn::Zero(d_);
      for (size_t i = t * row; i < (t + 1) * row; i += N) {
        auto factor = by_channel ? hn::Load(d_, factor_rows + i) : hn::Set(d_, T{1});
        const auto product = hn::Mul(hn::Load(d_, dy + i), hn::Load(d_, x + i));
        sum = hn::MulAdd(factor, product, sum);
        hn::Store(hn::Mul(hn::Mul(beta, factor), hn::Load(d_, dy + i)), d_, dx + i);
        if (by_channel) hn::Store(hn::Mul(beta, product), d_, factor_rows + i);
      }
      b_.d_beta[t] += hn::ReduceSum(d_, sum);
    }
    if (by_channel) StoreWrites(factor_rows, row, d_factors, head_, first, tokens, size);
  }

  // Stores a row per write, times `factor`.
  HWY_ATTR void StoreWrites(const T* rows, size_t row, const Rows& to, int64_t head, int64_t first, size_t tokens,
                            size_t size, double factor = 1) const {
    if (to.data == nullptr) return;
    const auto times = hn::Set(d_, static_cast<T>(factor));
    for (size_t write = 0; write < writes_; ++write) {
      StoreRows(d_, rows + write * row, writes_ * row, RowsOfWrite(to, static_cast<int64_t>(write)), s_, head, first,
                tokens, 0, size, [&](auto v, size_t, size_t) HWY_ATTR { return hn::Mul(times, v); });
    }
  }

  // Adds rows to the sums of the key head's value heads, and stores them times `factor` after the last of them.
  HWY_NOINLINE HWY_ATTR void AddToHead(DeltaSum of, const Rows& to, int64_t block, double factor) {
    if (to.data == nullptr) return;
    const int64_t first = block * p_.block_tokens(), group = p_.group(), mine = head_ % group;
    const size_t tokens = TokensOf(block);
    T* rows = b_.sums[of];
    const auto finish = [&]() HWY_ATTR {
      if (of != kOfQueries) {
        return StoreWrites(rows, row_, to, head_ / group, first, tokens, keys_, factor);
      }
      const auto times = hn::Set(d_, static_cast<T>(factor));
      StoreRows(d_, rows + (writes_ - 1) * row_, writes_ * row_, to, s_, head_ / group, first, tokens, 0, keys_,
                [&](auto v, size_t, size_t) HWY_ATTR { return hn::Mul(times, v); });
    };
    if (group == 1) return finish();
    TicketCounter& counter = shared_.CounterOf(p_, task_, block, of);
    WaitForTicket(counter, mine);
    const auto row = static_cast<int64_t>(row_);
    for (size_t t = 0; t < tokens * writes_; ++t) {
      T* sums = shared_.sums[of] + shared_.RowOf(p_, task_, first * p_.writes + static_cast<int64_t>(t)) * row;
      for (size_t i = 0; i < row_; i += N) {
        auto sum = hn::Load(d_, rows + t * row_ + i);
        if (mine > 0) sum = hn::Add(hn::Load(d_, sums + i), sum);
        hn::Store(sum, d_, mine + 1 < group ? sums + i : rows + t * row_ + i);
      }
    }
    if (mine + 1 == group) finish();
    ReleaseTicket(counter);
  }

  const D d_;
  const Problem& p_;
  const Gradients& g_;
  const Sequence& s_;
  const Task& task_;
  const int64_t head_;
  const DeltaBackwardBuffers<T>& b_;
  const DeltaShared<T>& shared_;
  const DeltaReader<T> reader_;
  const size_t row_, value_row_, keys_, values_, writes_;
  const DeltaShape by_value_, by_key_;  // shapes of the part's S and D, and of S^T and D^T
  T *const state_, *const d_state_;     // S and D of the part
  const bool before_, states_alone_, wants_decay_, in_stages_;
  RowPrefetch prefetch_;  // in stages none: rows were prepared by another task
};

template <class T>
Stages DeltaBackwardStages(const Problem& p, const Gradients& g, int64_t threads) {
  return Stages(p, threads, p.value_size, kDeltaPart<T>, p.block_tokens(), DeltaBackwardHead<T>::Sweeps(g));
}

template <class T>
BackwardBytes DeltaBackwardBytes(const Context& ctx, const Problem& p, const Gradients& g) {
  BackwardBytes bytes = BytesOfHeads<DeltaBackwardBuffers<T>>(DeltaBackwardStages<T>(p, g, ctx.num_threads()), p);
  bytes.shared += DeltaShared<T>(p).Bytes(p);
  return bytes;
}

template <class T>
void DeltaBackward(Context& ctx, const Problem& p, const Gradients& g) {
  const BackwardBytes bytes = DeltaBackwardBytes<T>(ctx, p, g);
  ctx.ReserveScratch(bytes.per_thread);
  ctx.ReserveShared(bytes.shared);
  DeltaShared<T> shared(p);
  shared.Init(p, ctx.Shared());
  Stages stages = DeltaBackwardStages<T>(p, g, ctx.num_threads());
  RunHeads<DeltaBackwardBuffers<T>>(
      ctx, p, stages, static_cast<char*>(ctx.Shared()) + shared.Bytes(p),
      [&](const Task& task, const DeltaBackwardBuffers<T>& buffers, int, bool in_stages)
          HWY_ATTR { return DeltaBackwardHead<T>(p, g, task, buffers, shared, in_stages); },
      p);
}

template <class T>
Passes DeltaPasses() {
  return {.forward = &DeltaForward<T>,
          .workspace = &DeltaForwardBytes<T>,
          .step = &DeltaStep<T>,
          .backward = &DeltaBackward<T>,
          .backward_workspace = &DeltaBackwardBytes<T>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_DELTA_BACKWARD_INL_H_

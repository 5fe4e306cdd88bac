// The recurrence backward, for one dtype of states.
//
// Compiled once per SIMD target. With D_t = q_t d_o_t^T + G_{t+1} .* D_{t+1}, the
// gradient of S_t, and both states also transposed so that q and k stand in lanes:
//
//   dq_t = S_t d_o_t      forward in time on S^T
//   dk_t = D_t v_t        against time on D^T
//   dv_t = D_t^T k_t      against time on D
//
// each the product of register_tile-inl.h with other roles. A task owns one value head
// of one sequence, or a range of its columns:
//
//   forward in time: S^T at the border of every block of 64 tokens is kept
//   against time, per block: rows and tables once, then the three products, S^T again
//     from its border
//
// 14 K V flops per token, 12 of which any method needs that does not keep every state.
// The gradient of a log decay is a sum over all later tokens of q .* dq - k .* dk,
// taken inside a block; what comes from beyond it is <S, D> at the block's end, so that
// nothing cancels over long distances.
//
// A gate of columns is to the products by value what one of rows is to those by key, and its
// gradient a sum of o .* d_o - v .* dv, o computed once more: 18 K V flops then.
//
// Value heads that share a key head add to its dq and dk in turn, the last block first.
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

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/core/turn.h"
#include "heed/engines/recurrence/backward_buffers-inl.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/chunk_states.h"
#include "heed/engines/recurrence/gradients-inl.h"
#include "heed/engines/recurrence/head_gradients-inl.h"
#include "heed/engines/recurrence/kernels.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/rows-inl.h"
#include "heed/engines/recurrence/shared_gradients-inl.h"
#include "heed/engines/recurrence/sums_backward-inl.h"
#include "heed/engines/recurrence/tasks.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

template <class T>
class BackwardHead : HeadGradients<T> {
  using Base = HeadGradients<T>;
  using typename Base::D;
  using Base::d_, Base::N, Base::p_, Base::g_, Base::s_, Base::task_, Base::head_,
      Base::b_, Base::shared_, Base::reader_, Base::row_, Base::value_row_, Base::values_,
      Base::by_key_, Base::by_value_;

 public:
  BackwardHead(const Problem& p, const Gradients& g, const Task& task,
               const BackwardBuffers<T>& buffers, const SharedBuffers<T>& shared,
               const ChunkStates& states, void* states_scratch)
      : Base(p, g, task, buffers, shared), states_(states), states_scratch_(states_scratch),
        gated_(p.gate != Gate::kNone),
        scalar_(p.gate == Gate::kScalar), lane_row_(static_cast<ptrdiff_t>(row_)),
        value_lane_row_(static_cast<ptrdiff_t>(value_row_)) {}

  HWY_NOINLINE HWY_ATTR void Compute() {
    LoadState(d_, g_.d_final, s_.state, head_, by_value_, b_.d_state);
    LoadState(d_, g_.d_final, s_.state, head_, by_key_, b_.d_transposed);
    if (p_.normalize) LoadNormalizerRow();
    reader_.Begin();
    if (s_.count > 0) KeepBorders();
    if (p_.has_value_decay && g_.d_log_value_decay.data != nullptr) KeepOutputs();
    const int64_t num_blocks = NumBlocks(s_.count);
    for (int64_t block = num_blocks - 1; block >= 0; --block) {
      OneBlock(block, static_cast<size_t>(
                          std::min(kBlockTokens, s_.count - block * kBlockTokens)));
    }
    StoreState(d_, b_.d_state, by_value_, g_.d_initial, s_.state, head_);
    if (p_.normalize) StoreNormalizerRow();
  }

 private:
  // The normaliser is the last row of the transposed states: a value of 1.
  HWY_ATTR void LoadNormalizerRow() {
    LoadNormalizer(g_.d_final_z, s_.state, head_, by_key_.size, row_, b_.border_z);
    ForStripsOf<T>(by_key_, [&](size_t column, size_t width) HWY_ATTR {
      std::memcpy(b_.d_transposed + by_key_.Offset(column) + values_ * width,
                  b_.border_z + column, width * sizeof(T));
    });
  }
  HWY_ATTR void StoreNormalizerRow() {
    ForStripsOf<T>(by_key_, [&](size_t column, size_t width) HWY_ATTR {
      std::memcpy(b_.border_z + column,
                  b_.d_transposed + by_key_.Offset(column) + values_ * width,
                  width * sizeof(T));
    });
    StoreNormalizer(b_.border_z, g_.d_initial_z, s_.state, head_, by_key_.size);
  }

  // S^T and z before each block.
  HWY_NOINLINE HWY_ATTR void KeepBorders() {
    const StateShape shape = Borders();
    if (states_.compute != nullptr) {
      return states_.compute(p_, task_, states_scratch_,
                             [&](int64_t block, const float* state) {
                               PutTransposed(state, shape, b_.Border(block));
                             });
    }
    LoadState(d_, p_.initial, s_.state, head_, shape, b_.Border(0));
    if (p_.normalize) {
      LoadNormalizer(p_.initial_z, s_.state, head_, shape.size, row_, b_.BorderZ(0));
    }
    for (int64_t block = 0; block + 1 < NumBlocks(s_.count); ++block) {
      T* next = b_.Border(block + 1);
      if (p_.running_max()) b_.borders_m[block] = *reader_.max();
      reader_.Keys(block * kBlockTokens, kBlock);
      reader_.Values(block * kBlockTokens, kBlock, b_.v, value_row_);
      if (p_.normalize) {
        Denominators(d_, b_.rows.k, b_.rows.k, reader_.NormalizerDecays(), kBlock, row_,
                     b_.BorderZ(block), b_.BorderZ(block + 1), 0, b_.denominators);
      }
      std::memcpy(next, b_.Border(block),
                  shape.Offset(shape.end) * sizeof(T));
      if (gated_) {
        WithForm(p_, [&](auto form) HWY_ATTR {
          BlockKeyTables<form.value>(d_, b_.rows.k, b_.rows.decay, kBlock, row_, b_.write,
                                     b_.rows.tile_decay);
        });
        Product<T> x = {nullptr, b_.v, value_row_, b_.write, lane_row_, nullptr, 0};
        x.lane_decay = b_.rows.tile_decay;
        RowPrefetch prefetch = LaterKeys(block, NumAsks<T>(shape));
        if (p_.has_value_decay) {
          DecayValues(block * kBlockTokens, kBlock);
          x.write = b_.rows.value_write;
          x.row_decay = b_.rows.value_tile_decay;
          Strips<Decay::kLanesRows, false>(d_, x, kBlock, false, shape.rows, shape.begin,
                                           shape.end, next, prefetch);
        } else {
          Strips<Decay::kLanes, false>(d_, x, kBlock, false, shape.rows, shape.begin,
                                       shape.end, next, prefetch);
        }
      } else {
        AddOuterProducts(d_, b_.v, value_row_, b_.rows.k, row_, kBlock, shape, next,
                         LaterKeys(block, NumStrips<T>(shape) * shape.rows / 8));
      }
    }
    if (p_.running_max()) b_.borders_m[NumBlocks(s_.count) - 1] = *reader_.max();
  }

  // S^T as strips, from strips of S.
  HWY_ATTR void PutTransposed(const float* state, const StateShape& shape, T* to) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      constexpr auto kWidth = static_cast<size_t>(kPartColumns);
      const size_t keys = (row_ + kWidth - 1) / kWidth * kWidth;
      ForStripsOf<T>(shape, [&](size_t column, size_t width) HWY_ATTR {
        T* strip = to + shape.Offset(column);
        for (size_t c = 0; c < width; c += N) {
          for (size_t r = 0; r < shape.rows; r += N) {
            hn::Vec<D> v[N];
            for (size_t i = 0; i < N; ++i) {
              v[i] = hn::LoadU(d_, state + r / kWidth * kWidth * keys +
                                       (column + c + i) * kWidth + r % kWidth);
            }
            hs::Transpose(d_, v);
            for (size_t i = 0; i < HWY_MIN(N, shape.rows - r); ++i) {
              hn::Store(v[i], d_, strip + (r + i) * width + c);
            }
          }
        }
      });
    }
  }

  // The decays of columns, and values decayed to the ends of their tiles.
  HWY_ATTR void DecayValues(int64_t first, size_t n) {
    reader_.ValueDecays(first, n, value_row_);
    BlockKeyTables<Form::kKey>(d_, b_.v, b_.rows.value_decay, n, value_row_,
                               b_.rows.value_write, b_.rows.value_tile_decay);
  }

  // o of all tokens, where the gradient of the columns' decays needs it.
  HWY_NOINLINE HWY_ATTR void KeepOutputs() {
    LoadState(d_, p_.initial, s_.state, head_, by_value_, b_.state);
    for (int64_t block = 0; block < NumBlocks(s_.count); ++block) {
      const int64_t first = block * kBlockTokens;
      const auto n = static_cast<size_t>(std::min(kBlockTokens, s_.count - first));
      reader_.Queries(first, n);
      reader_.Keys(first, n);
      reader_.Values(first, n, b_.v, value_row_);
      KeyTables(n);
      DecayValues(first, n);
      T* o = b_.outputs + static_cast<size_t>(first) * value_row_;
      Product<T> x = {b_.read, b_.write, row_, b_.rows.value_write, value_lane_row_,
                      o, value_lane_row_};
      x.row_decay = b_.rows.tile_decay;
      x.lane_decay = b_.rows.value_tile_decay;
      RowPrefetch prefetch;
      Strips<Decay::kRowsLanes>(d_, x, n, false, by_value_.rows, by_value_.begin,
                                by_value_.end, b_.state, prefetch);
      AddValuePairs(d_, b_.v, b_.rows.value_decay, b_.pairs, n, value_row_, by_value_.begin,
                    by_value_.end, o);
    }
  }

  HWY_ATTR void KeyTables(size_t n) {
    const Tables<T> tables = {b_.read, b_.write, b_.rows.tile_decay, b_.pairs,
                              b_.pairs_against_time};
    WithForm(p_, [&](auto form) HWY_ATTR {
      BlockTables<form.value>(d_, b_.rows.q, b_.rows.k, b_.rows.decay, b_.rows.bonus, n,
                              row_, tables);
    });
  }

  StateShape Borders() const {
    return {values_, values_, by_key_.begin, by_key_.end, by_key_.size, true};
  }

  HWY_NOINLINE HWY_ATTR void OneBlock(int64_t block, size_t n) {
    const int64_t first = block * kBlockTokens;
    if (p_.running_max()) *reader_.max() = b_.borders_m[block];
    reader_.Queries(first, n);
    reader_.Keys(first, n);
    reader_.Values(first, n, b_.v, value_row_);
    LoadRows(d_, g_.d_o, s_, head_, first, n, values_, b_.d_o, value_row_);
    RowPrefetch prefetch = EarlierRows(block);
    if (p_.normalize) Normalize(block, n);
    if (gated_) {
      KeyTables(n);
      if (p_.has_value_decay) ValueTables(first, n);
    }
    const T* read = gated_ ? b_.read : b_.rows.q;
    const T* write = gated_ ? b_.write : b_.rows.k;
    const T* value_read = p_.has_value_decay ? b_.value_read : b_.d_o;
    const T* value_write = p_.has_value_decay ? b_.rows.value_write : b_.v;

    // u = S d_o, forward in time.
    Product<T> x = {value_read, value_write, value_row_, write, lane_row_, b_.dq,
                    lane_row_};
    x.row_decay = b_.rows.value_tile_decay;
    x.lane_decay = b_.rows.tile_decay;
    const StateShape borders = Borders();
    T* state = b_.Border(block);
    Run<Decay::kLanes>(x, n, false, borders, state, prefetch);
    if (gated_) {
      QueryPairs(n);
      BoundaryProducts(state, n);
    }
    if (p_.normalize) this->AddNormalizer(n, b_.z, row_);

    // D v, against time.
    x.read = value_write;
    x.write = value_read;
    x.lanes = read;
    x.out = b_.dk;
    Run<Decay::kLanes>(x, n, true, by_key_, b_.d_transposed, prefetch);
    if (gated_) {
      KeyPairs(n);
      if (scalar_) {
        ScalarDecayGradients(first, n);
      } else {
        DecayGradients(first, n);
      }
      if (p_.has_bonus) BonusGradients(n);
    }

    this->AddToHead(Base::kQueries, block, n);
    this->AddToHead(Base::kKeys, block, n);
    const bool of_value_decay = g_.d_log_value_decay.data != nullptr;
    if (g_.dv.data == nullptr && g_.d_initial.data == nullptr && !of_value_decay) return;

    // D^T k, against time.
    Product<T> y = {write, read, row_, value_read, value_lane_row_, b_.dv,
                    value_lane_row_};
    const bool in_place = InPlace<T>(g_.dv, p_.value_size) && !p_.has_value_decay;
    if (in_place) {
      y.out = RowAt<T>(g_.dv, s_, head_, first);
      y.out_stride = static_cast<ptrdiff_t>(g_.dv.token_stride);
    }
    y.row_decay = b_.rows.tile_decay;
    if (p_.has_value_decay) y.lane_decay = b_.rows.value_tile_decay;
    y.pairs = b_.pairs_against_time;
    Run<Decay::kRows>(y, n, true, by_value_, b_.d_state, prefetch);
    if (p_.has_value_decay) ValuePairGradients(n);
    if (of_value_decay) ValueDecayGradients(first, n);
    if (g_.dv.data == nullptr || in_place) return;
    this->StoreValueGradients(first, n);
  }

  // Computes, for a gate of columns, d_o and v as the tiles take them, and w_tj with its decays.
  HWY_ATTR void ValueTables(int64_t first, size_t n) {
    reader_.ValueDecays(first, n, value_row_);
    BlockTables<Form::kKey>(d_, b_.d_o, b_.v, b_.rows.value_decay, b_.rows.value_decay, n,
                            value_row_,
                            {b_.value_read, b_.rows.value_write, b_.rows.value_tile_decay,
                             b_.value_pairs});
  }

  HWY_NOINLINE HWY_ATTR void ValuePairGradients(size_t n) {
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      const size_t at = begin * value_row_;
      TileKeyGradients<tokens.value, Form::kKey>(
          d_, b_.d_o + at, b_.rows.value_decay + at, b_.pairs + tile * kTile * kTile,
          value_row_, by_value_.begin, by_value_.end, b_.dv + at);
    });
  }

  // Does as DecayGradients() by value: sums of o .* d_o - v .* dv over later tokens.
  HWY_ATTR void ValueDecayGradients(int64_t first, size_t n) {
    const T* o = b_.outputs + static_cast<size_t>(first) * value_row_;
    T* to = b_.value_read;  // has been used
    for (size_t i = by_value_.begin; i < by_value_.end; i += N) {
      auto later = hn::Load(d_, b_.value_suffix + i);
      for (size_t t = n; t-- > 0;) {
        const size_t at = t * value_row_ + i;
        const auto of_output = hn::Mul(hn::Load(d_, o + at), hn::Load(d_, b_.d_o + at));
        later = hn::Add(later, hn::NegMulAdd(hn::Load(d_, b_.v + at),
                                             hn::Load(d_, b_.dv + at), of_output));
        hn::Store(later, d_, to + at);
      }
    }
    StoreRows(d_, to, value_row_, g_.d_log_value_decay, s_, head_, first, n,
              by_value_.begin, std::min(by_value_.end, values_),
              [](auto v, size_t, size_t) HWY_ATTR { return v; });
  }

  template <Decay kDecay>
  HWY_INLINE void Run(const Product<T>& x, size_t n, bool against_time,
                      const StateShape& shape, T* state, RowPrefetch& prefetch) {
    const auto strips = [&](auto decay) HWY_ATTR {
      Strips<decay.value>(d_, x, n, against_time, shape.rows, shape.begin, shape.end, state, prefetch);
    };
    if (p_.has_value_decay) {
      strips(std::integral_constant<Decay, kDecay == Decay::kLanes ? Decay::kLanesRows : Decay::kRowsLanes>());
    } else if (!gated_) {
      strips(std::integral_constant<Decay, Decay::kNone>());
    } else if (scalar_) {
      strips(std::integral_constant<Decay, Decay::kLanes>());
    } else {
      strips(std::integral_constant<Decay, kDecay>());
    }
  }

  // d_o / d_t in place of d_o; 1 in the extra column of v.
  HWY_ATTR void Normalize(int64_t block, size_t n) {
    Denominators(d_, b_.rows.q, b_.rows.k, reader_.NormalizerDecays(), n, row_,
                 b_.BorderZ(block), b_.z, row_, b_.denominators);
    this->DivideByDenominators(n);
    for (size_t t = 0; t < n; ++t) b_.v[t * value_row_ + values_] = 1;
  }

  // What tokens of one tile add to each other's gradients. A normaliser shows in those of
  // keys alone: what it adds to queries is whole already.
  HWY_NOINLINE HWY_ATTR void QueryPairs(size_t n) {
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      constexpr int kTokens = tokens.value;
      T* pairs = b_.value_pairs + tile * kTile * kTile;
      if (!p_.has_value_decay) {
        ValuePairs<kTokens>(d_, b_.d_o + begin * value_row_, b_.v + begin * value_row_,
                            value_row_, pairs);
      }
      WithForm(p_, [&](auto form) HWY_ATTR {
        TileQueryGradients<kTokens, form.value>(
            d_, b_.rows.k + begin * row_, b_.rows.decay + begin * DecayRow(form.value, row_),
            pairs, row_, by_key_.begin, by_key_.end, b_.dq + begin * row_);
      });
    });
  }
  HWY_NOINLINE HWY_ATTR void KeyPairs(size_t n) {
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      constexpr int kTokens = tokens.value;
      T* pairs = b_.value_pairs + tile * kTile * kTile;
      if (p_.normalize) {
        ValuePairs<kTokens>(d_, b_.d_o + begin * value_row_, b_.v + begin * value_row_,
                            value_row_, pairs);
      }
      WithForm(p_, [&](auto form) HWY_ATTR {
        TileKeyGradients<kTokens, form.value>(
            d_, b_.rows.q + begin * row_, b_.rows.decay + begin * DecayRow(form.value, row_),
            pairs, row_, by_key_.begin, by_key_.end, b_.dk + begin * row_);
      });
    });
  }

  HWY_NOINLINE HWY_ATTR void BonusGradients(size_t n) {
    std::memset(b_.d_bonus, 0, row_ * sizeof(T));
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      const size_t at = begin * row_;
      TileBonusGradients<tokens.value>(d_, b_.rows.q + at, b_.rows.k + at, b_.rows.bonus,
                                       b_.value_pairs + tile * kTile * kTile, row_,
                                       by_key_.begin, by_key_.end, b_.dq + at, b_.dk + at,
                                       b_.d_bonus);
    });
    AddConstants(shared_.d_bonus, b_.d_bonus, 1);
  }

  // The sum of n rows to the gradients of what tokens share.
  HWY_ATTR void AddConstants(double* sums, const T* rows, size_t n) {
    double* to = shared_.ConstantsOf(sums, p_, task_.sequence, head_);
    for (size_t t = 0; t < n; ++t, rows += row_) {
      for (size_t i = by_key_.begin; i < by_key_.end; ++i) {
        to[i] += static_cast<double>(rows[i]);
      }
    }
  }

  // <S, D> at the end of the block, by key: the state is there after the product with
  // d_o, D not yet past it.
  HWY_ATTR void BoundaryProducts(const T* state, size_t n) {
    StateProducts(d_, state, Borders(), b_.d_transposed, by_key_, b_.suffix);
    if (p_.has_value_decay) {
      StateRowProducts(d_, state, Borders(), b_.d_transposed, by_key_, b_.value_suffix);
    }
    if (!p_.normalize) return;
    const T* z = b_.z + (n - 1) * row_;
    ForStripsOf<T>(by_key_, [&](size_t column, size_t width) HWY_ATTR {
      const T* dz = b_.d_transposed + by_key_.Offset(column) + values_ * width;
      for (size_t i = 0; i < width; i += N) {
        hn::Store(hn::MulAdd(hn::Load(d_, z + column + i), hn::Load(d_, dz + i),
                             hn::Load(d_, b_.suffix + column + i)),
                  d_, b_.suffix + column + i);
      }
    });
  }

  HWY_INLINE hn::Vec<D> DecayProduct(size_t at) const {
    return hn::NegMulAdd(hn::Load(d_, b_.rows.k + at), hn::Load(d_, b_.dk + at),
                         hn::Mul(hn::Load(d_, b_.rows.q + at), hn::Load(d_, b_.dq + at)));
  }

  HWY_ATTR void DecayGradients(int64_t first, size_t n) {
    if (g_.d_log_decay.data == nullptr) return;
    for (size_t i = by_key_.begin; i < by_key_.end; i += N) {
      auto later = hn::Load(d_, b_.suffix + i);
      for (size_t t = n; t-- > 0;) {
        const size_t at = t * row_ + i;
        const auto past_query = later;
        later = hn::Add(later, DecayProduct(at));
        auto gradient = later;
        if (p_.has_bonus) {  // its query does not see a token's decay
          gradient = hn::NegMulAdd(hn::Load(d_, b_.rows.k + at), hn::Load(d_, b_.dk + at),
                                   past_query);
        }
        if (p_.complement_keys) {
          gradient = hn::NegMulAdd(hn::Load(d_, b_.rows.decay + at),
                                   hn::Load(d_, b_.dk + at), gradient);
        }
        hn::Store(gradient, d_, b_.d_decay + at);
      }
    }
    if (p_.constant_decay) return AddConstants(shared_.d_decay, b_.d_decay, n);
    StoreRows(d_, b_.d_decay, row_, g_.d_log_decay, s_, head_, first, n, by_key_.begin,
              std::min(by_key_.end, by_key_.size),
              [](auto v, size_t, size_t) HWY_ATTR { return v; });
  }

  // Does so by units of columns, to be summed when all parts are there.
  HWY_ATTR void ScalarDecayGradients(int64_t first, size_t n) {
    if (g_.d_log_decay.data == nullptr) return;
    constexpr auto kUnit = static_cast<size_t>(kPartColumns);
    T* parts = shared_.DecayParts(p_, task_.sequence, head_) + first;
    for (size_t begin = by_key_.begin; begin < by_key_.end; begin += kUnit) {
      const size_t end = std::min(begin + kUnit, by_key_.end);
      T* to = parts + static_cast<int64_t>(begin / kUnit) * s_.count;
      for (size_t t = 0; t < n; ++t) {
        auto sum = hn::Zero(d_);
        for (size_t i = begin; i < end; i += N) {
          sum = hn::Add(sum, DecayProduct(t * row_ + i));
          if (t + 1 == n) sum = hn::Add(sum, hn::Load(d_, b_.suffix + i));
        }
        to[t] = hn::ReduceSum(d_, sum);
      }
    }
  }

  // Rows of keys and values, and with `all` the others that are read, from a block on.
  HWY_ATTR RowPrefetch RowsFrom(int64_t block, bool all) const {
    RowPrefetch prefetch;
    const int64_t first = block * kBlockTokens, key_head = head_ / p_.group();
    const auto add = [&](const Rows& rows, int64_t head, int64_t size) {
      if (rows.data != nullptr) AddRows(prefetch, rows, s_, head, first, size);
    };
    add(p_.k, key_head, p_.key_size);
    add(p_.v, head_, p_.value_size);
    if (!scalar_) add(p_.log_decay, head_, p_.key_size);
    if (!all) return prefetch;
    add(p_.q, key_head, p_.key_size);
    add(g_.d_o, head_, p_.value_size);
    return prefetch;
  }

  // The next block, in so many calls.
  HWY_ATTR RowPrefetch LaterKeys(int64_t block, size_t calls) const {
    if (block + 2 >= NumBlocks(s_.count)) return {};
    RowPrefetch prefetch = RowsFrom(block + 1, false);
    prefetch.Begin(kBlock, calls);
    return prefetch;
  }

  // The block before, which is the next. Where the rows and states of one block fill much of
  // a core's second cache, what is asked for early is gone when it is needed.
  HWY_ATTR RowPrefetch EarlierRows(int64_t block) const {
    constexpr size_t kMost = size_t{512} << 10;
    const size_t elements = 3 * row_ * value_row_ + kBlock * (11 * row_ + 8 * value_row_);
    if (block == 0 || elements * sizeof(T) > kMost) return {};
    RowPrefetch prefetch = RowsFrom(block - 1, true);
    prefetch.Begin(kBlock, 2 * NumAsks<T>(by_key_) + NumAsks<T>(by_value_));
    return prefetch;
  }

  const ChunkStates& states_;
  void* const states_scratch_;
  const bool gated_, scalar_;
  const ptrdiff_t lane_row_, value_lane_row_;  // row_ and value_row_ as strides of lanes
};

// Columns that a task may leave to another: none where a sum over all of them is needed
// on the way.
inline int64_t Separable(const Problem& p) {
  const bool whole = p.normalize || p.has_value_decay || p.feature == Feature::kSoftmax ||
                     p.feature == Feature::kTaylor || IsRandom(p.feature);
  return whole ? 0 : std::min(p.features(), p.value_size);
}

template <class T>
int64_t PartColumns(const Problem& p, const TaskQueue& queue) {
  const int64_t units = (p.features() + kPartColumns - 1) / kPartColumns;
  const auto row = static_cast<int64_t>(Padded<T>(p.features()));
  return std::min((units + queue.parts() - 1) / queue.parts() * kPartColumns, row);
}

// `states`: of the borders of blocks, where a kernel of chunks computes them; or none.
template <class T>
BackwardBytes BackwardWorkspace(int64_t threads, const Problem& p, const ChunkStates& states) {
  const TaskQueue queue(p, threads, Separable(p));
  const int64_t bytes = BackwardBuffers<T>::Bytes(p, PartColumns<T>(p, queue));
  return {bytes + (states.bytes != nullptr ? states.bytes(p) : 0), SharedBuffers<T>(p, queue).Bytes(p)};
}

template <class T>
void Backward(Context& ctx, const Problem& p, const Gradients& g, const ChunkStates& states) {
  const TaskQueue queue(p, ctx.num_threads(), Separable(p));
  const int64_t columns = PartColumns<T>(p, queue);
  SharedBuffers<T> shared(p, queue);
  const int64_t bytes = BackwardBuffers<T>::Bytes(p, columns);
  ctx.ReserveScratch(static_cast<size_t>(BackwardWorkspace<T>(ctx.num_threads(), p, states).per_thread));
  ctx.ReserveShared(static_cast<size_t>(shared.Bytes(p)));
  shared.Init(p, ctx.Shared());
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<BackwardBuffers<T>*>(ctx.Scratch(worker))->Init(p, columns);
  }
  ctx.ParallelFor(queue.size(), [&](int64_t index, int worker) HWY_ATTR {
    const auto& buffers = *static_cast<const BackwardBuffers<T>*>(ctx.Scratch(worker));
    const Task task = queue.At(index);
    const bool of_projection = g.d_projection.data != nullptr;
    if (IsRandom(p.feature)) {
      PackProjection(p, buffers.rows.raw, buffers.projection);
      const auto size = ProjectionShape<T>(p);
      std::memset(buffers.d_projection, 0, size.Offset(size.end) * sizeof(T));
    }
    if (p.causal) {
      void* after = static_cast<char*>(ctx.Scratch(worker)) + bytes;
      BackwardHead<T>(p, g, task, buffers, shared, states, after).Compute();
    } else {
      SumsBackwardHead<T>(p, g, task, buffers, shared).Compute();
    }
    if (of_projection) AddToProjection(p, task, buffers, shared);
  });
  if (g.d_projection.data != nullptr) StoreProjectionGradient(p, g, shared.d_projection);
  StoreConstants(p, shared, shared.d_bonus, g.d_bonus);
  if (p.gate == Gate::kKey && p.constant_decay) StoreConstants(p, shared, shared.d_decay, g.d_log_decay);
  if (p.gate != Gate::kScalar || g.d_log_decay.data == nullptr) return;
  ctx.ParallelFor(p.value_heads, [&](int64_t head, int) HWY_ATTR { SumDecayGradients(p, g, shared, head); });
}

template <class T, ChunkStates (*kStates)(const Context&) = &NoChunkStates>
Passes BackwardPasses() {
  return {.backward = [](Context& ctx, const Problem& p, const Gradients& g) { Backward<T>(ctx, p, g, kStates(ctx)); },
          .backward_workspace = [](const Context& ctx, const Problem& p, const Gradients&) {
            return BackwardWorkspace<T>(ctx.num_threads(), p, kStates(ctx));
          }};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_BACKWARD_INL_H_

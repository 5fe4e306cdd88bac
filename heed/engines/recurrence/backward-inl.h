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

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/core/turn.h"
#include "heed/engines/recurrence/backward_buffers-inl.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/gradients-inl.h"
#include "heed/engines/recurrence/head_gradients-inl.h"
#include "heed/engines/recurrence/passes.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/rows-inl.h"
#include "heed/engines/recurrence/sums_backward-inl.h"
#include "heed/engines/recurrence/tasks.h"
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
               const BackwardBuffers<T>& buffers, const SharedBuffers<T>& shared)
      : Base(p, g, task, buffers, shared), gated_(p.gate != Gate::kNone),
        scalar_(p.gate == Gate::kScalar) {}

  HWY_NOINLINE HWY_ATTR void Compute() {
    LoadState(d_, g_.d_final, s_.state, head_, by_value_, b_.d_state);
    LoadState(d_, g_.d_final, s_.state, head_, by_key_, b_.d_transposed);
    if (p_.normalize) LoadNormalizerRow();
    reader_.Begin();
    if (s_.count > 0) KeepBorders();
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
        Denominators(d_, b_.rows.k, b_.rows.k, gated_ ? b_.rows.decay : nullptr, scalar_,
                     kBlock, row_, b_.BorderZ(block), b_.BorderZ(block + 1), 0,
                     b_.denominators);
      }
      std::memcpy(next, b_.Border(block),
                  shape.Offset(shape.end) * sizeof(T));
      if (gated_) {
        KeyTables();
        Product<T> x = {nullptr, b_.v, value_row_, b_.write, nullptr, row_};
        x.decay = b_.rows.tile_decay;
        x.decay_stride = row_;
        RowPrefetch prefetch;
        Strips<Decay::kLanes, false>(d_, x, kBlock, false, shape.rows, shape.begin,
                                     shape.end, next, prefetch);
      } else {
        AddOuterProducts(d_, b_.v, value_row_, b_.rows.k, row_, kBlock, shape, next);
      }
    }
    if (p_.running_max()) b_.borders_m[NumBlocks(s_.count) - 1] = *reader_.max();
  }

  // Keys decayed to the ends of their tiles, of a whole block.
  HWY_ATTR void KeyTables() {
    for (size_t tile = 0; tile < kBlock / kTile; ++tile) {
      const size_t begin = tile * kTile, at = begin * row_;
      WithForm(p_, [&](auto form) HWY_ATTR {
        TileKeyTables<kTile, form.value>(
            d_, b_.rows.k + at, b_.rows.decay + begin * DecayRow(form.value, row_), row_,
            b_.write + at, b_.rows.tile_decay + tile * row_);
      });
    }
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
      const Tables<T> tables = {b_.read, b_.write, b_.rows.tile_decay, b_.pairs,
                                b_.pairs_against_time};
      WithForm(p_, [&](auto form) HWY_ATTR {
        BlockTables<form.value>(d_, b_.rows.q, b_.rows.k, b_.rows.decay, b_.rows.bonus, n,
                                row_, tables);
      });
    }
    const T* read = gated_ ? b_.read : b_.rows.q;
    const T* write = gated_ ? b_.write : b_.rows.k;

    // u = S d_o, forward in time.
    Product<T> x = {b_.d_o, b_.v, value_row_, write, b_.dq, row_};
    x.decay = b_.rows.tile_decay;
    x.decay_stride = row_;
    const StateShape borders = Borders();
    T* state = b_.Border(block);
    Run<Decay::kLanes>(x, n, false, borders, state, prefetch);
    if (gated_) {
      QueryPairs(n);
      BoundaryProducts(state, n);
    }
    if (p_.normalize) this->AddNormalizer(n, b_.z, row_);

    // D v, against time.
    x.read = b_.v;
    x.write = b_.d_o;
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
    if (g_.dv.data == nullptr && g_.d_initial.data == nullptr) return;

    // D^T k, against time.
    Product<T> y = {write, read, row_, b_.d_o, b_.dv, value_row_};
    y.decay = b_.rows.tile_decay;
    y.decay_stride = row_;
    y.pairs = b_.pairs_against_time;
    Run<Decay::kRows>(y, n, true, by_value_, b_.d_state, prefetch);
    if (g_.dv.data == nullptr) return;
    this->StoreValueGradients(first, n);
  }

  template <Decay kDecay>
  HWY_INLINE void Run(const Product<T>& x, size_t n, bool against_time,
                      const StateShape& shape, T* state, RowPrefetch& prefetch) {
    if (gated_) {
      Strips<kDecay>(d_, x, n, against_time, shape.rows, shape.begin, shape.end, state,
                     prefetch);
    } else {
      Strips<Decay::kNone>(d_, x, n, against_time, shape.rows, shape.begin, shape.end,
                           state, prefetch);
    }
  }

  // d_o / d_t in place of d_o; 1 in the extra column of v.
  HWY_ATTR void Normalize(int64_t block, size_t n) {
    Denominators(d_, b_.rows.q, b_.rows.k, gated_ ? b_.rows.decay : nullptr, scalar_, n,
                 row_, b_.BorderZ(block), b_.z, row_, b_.denominators);
    this->DivideByDenominators(n);
    for (size_t t = 0; t < n; ++t) b_.v[t * value_row_ + values_] = 1;
  }

  // What tokens of one tile add to each other's gradients. A normaliser shows in those of
  // keys alone: what it adds to queries is whole already.
  HWY_NOINLINE HWY_ATTR void QueryPairs(size_t n) {
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      constexpr int kTokens = tokens.value;
      T* pairs = b_.value_pairs + tile * kTile * kTile;
      ValuePairs<kTokens>(d_, b_.d_o + begin * value_row_, b_.v + begin * value_row_,
                          value_row_, pairs);
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

  // The same by units of columns, to be summed when all parts are there.
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

  // The rows of the block before, which is the next.
  HWY_ATTR RowPrefetch EarlierRows(int64_t block) const {
    RowPrefetch prefetch;
    if (block == 0) return prefetch;
    const int64_t first = (block - 1) * kBlockTokens, key_head = head_ / p_.group();
    const auto add = [&](const Rows& rows, int64_t head, int64_t size) {
      if (rows.data != nullptr) AddRows(prefetch, rows, s_, head, first, size);
    };
    add(p_.q, key_head, p_.key_size);
    add(p_.k, key_head, p_.key_size);
    if (!scalar_) add(p_.log_decay, head_, p_.key_size);
    add(p_.v, head_, p_.value_size);
    add(g_.d_o, head_, p_.value_size);
    add(g_.dq, key_head, p_.key_size);
    add(g_.dk, key_head, p_.key_size);
    add(g_.dv, head_, p_.value_size);
    const auto strips = [](const StateShape& shape) {
      return (shape.end - shape.begin + kMaxStrip * N - 1) / (kMaxStrip * N);
    };
    prefetch.Begin(kBlock, (2 * strips(by_key_) + strips(by_value_)) * (kBlock / kTile));
    return prefetch;
  }

  const bool gated_, scalar_;
};

// The gradient of scalar decays from its parts: of one head over all sequences.
template <class T>
HWY_NOINLINE HWY_ATTR void SumDecayGradients(const Problem& p, const Gradients& g,
                                             const SharedBuffers<T>& shared,
                                             int64_t head) {
  double total = 0;
  for (size_t i = 0; i < p.sequences.size(); ++i) {
    const Sequence& s = p.sequences[i];
    const T* parts = shared.DecayParts(p, static_cast<int64_t>(i), head);
    for (int64_t block = NumBlocks(s.count) - 1; block >= 0; --block) {
      const int64_t begin = block * kBlockTokens;
      T later = 0;
      for (int64_t t = std::min(begin + kBlockTokens, s.count) - 1; t >= begin; --t) {
        T sum = 0;
        for (int64_t unit = 0; unit < shared.units; ++unit) {
          sum += parts[unit * s.count + t];
        }
        later += sum;
        if (p.constant_decay) {
          total += static_cast<double>(later);
        } else {
          hs::WithStorage<T>(g.d_log_decay.dtype, [&](auto stored) HWY_ATTR {
            const hn::CappedTag<T, 1> d1;
            hs::StoreRounded(d1, hn::Set(d1, later),
                             RowAt<decltype(stored)>(g.d_log_decay, s, head, t), 1);
          });
        }
      }
    }
  }
  if (p.constant_decay) {
    StoreDouble(g.d_log_decay.dtype, const_cast<void*>(g.d_log_decay.data),
                head * g.d_log_decay.head_stride, total);
  }
}

// Columns that a task may leave to another: none where a sum over all of them is needed
// on the way.
inline int64_t Separable(const Problem& p) {
  const bool whole = p.normalize || p.feature == Feature::kSoftmax ||
                     p.feature == Feature::kTaylor || IsRandom(p.feature);
  return whole ? 0 : std::min(p.features(), p.value_size);
}

template <class T>
int64_t PartColumns(const Problem& p, const TaskQueue& queue) {
  const int64_t units = (p.features() + kPartColumns - 1) / kPartColumns;
  const auto row = static_cast<int64_t>(Padded<T>(p.features()));
  return std::min((units + queue.parts() - 1) / queue.parts() * kPartColumns, row);
}

template <class T>
BackwardBytes BackwardWorkspace(int64_t threads, const Problem& p) {
  const TaskQueue queue(p, threads, Separable(p));
  return {BackwardBuffers<T>::Bytes(p, PartColumns<T>(p, queue)),
          SharedBuffers<T>(p, queue).Bytes(p)};
}

// What one head adds to the gradient of the projection, in the order of tasks: the last
// value head of a key head has it.
template <class T>
HWY_NOINLINE HWY_ATTR void AddToProjection(const Problem& p, const Task& task,
                                           const BackwardBuffers<T>& b,
                                           const SharedBuffers<T>& shared) {
  if ((task.head + 1) % p.group() != 0) return;
  WaitForTurn(*shared.projection_turn,
              task.place * p.key_heads + task.head / p.group());
  ForStateElements(hn::ScalableTag<T>(), ProjectionShape<T>(p),
                   [&](size_t i, size_t r, size_t c) HWY_ATTR {
                     shared.d_projection[r * static_cast<size_t>(p.key_size) + c] +=
                         static_cast<double>(b.d_projection[i]);
                   });
  EndTurn(*shared.projection_turn);
}

inline void StoreProjectionGradient(const Problem& p, const Gradients& g,
                                    const double* sums) {
  for (int64_t r = 0; r < p.projection_rows; ++r) {
    for (int64_t c = 0; c < p.key_size; ++c) {
      StoreDouble(g.d_projection.dtype, const_cast<void*>(g.d_projection.data),
                  r * g.d_projection.token_stride + c, sums[r * p.key_size + c]);
    }
  }
}

// The gradient `to` of what has rows over value heads alone: sums over sequences.
template <class T>
void StoreConstants(const Problem& p, const SharedBuffers<T>& shared, double* sums,
                    const Rows& to) {
  for (int64_t head = 0; to.data != nullptr && head < p.value_heads; ++head) {
    for (int64_t i = 0; i < p.key_size; ++i) {
      double total = 0;
      for (size_t s = 0; s < p.sequences.size(); ++s) {
        total += shared.ConstantsOf(sums, p, static_cast<int64_t>(s), head)[i];
      }
      StoreDouble(to.dtype, const_cast<void*>(to.data), head * to.head_stride + i, total);
    }
  }
}

template <class T>
void Backward(Context& ctx, const Problem& p, const Gradients& g) {
  const TaskQueue queue(p, ctx.num_threads(), Separable(p));
  const int64_t columns = PartColumns<T>(p, queue);
  SharedBuffers<T> shared(p, queue);
  ctx.ReserveScratch(static_cast<size_t>(BackwardBuffers<T>::Bytes(p, columns)));
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
      BackwardHead<T>(p, g, task, buffers, shared).Compute();
    } else {
      SumsBackwardHead<T>(p, g, task, buffers, shared).Compute();
    }
    if (of_projection) AddToProjection(p, task, buffers, shared);
  });
  if (g.d_projection.data != nullptr) StoreProjectionGradient(p, g, shared.d_projection);
  StoreConstants(p, shared, shared.d_bonus, g.d_bonus);
  if (p.gate == Gate::kKey && p.constant_decay) {
    StoreConstants(p, shared, shared.d_decay, g.d_log_decay);
  }
  if (p.gate != Gate::kScalar || g.d_log_decay.data == nullptr) return;
  ctx.ParallelFor(p.value_heads, [&](int64_t head, int) HWY_ATTR {
    SumDecayGradients(p, g, shared, head);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_BACKWARD_INL_H_

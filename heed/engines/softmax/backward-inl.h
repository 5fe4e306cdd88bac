// Exact attention backward: recomputed logits, all gradients in one pass.
//
// Compiled once per SIMD target and dtype. With w = sigmoid(lse - sink), or 1, and
// Z the dropout keep bits:
//
//   P_ij  = exp(S_ij - lse_i)
//   g_i   = w_i / (1 - dropout),  delta_i = w_i <do_i, o_i> - dlse_i
//   dP_ij = g_i Z_ij <do_i, v_j>
//   dS_ij = P_ij (dP_ij - delta_i)
//   dv_j  = sum_i g_i Z_ij P_ij do_i
//   dk_j  = scale sum_i dS_ij S'_ij q_i,  dq_i = scale sum_j dS_ij S'_ij k_j
//
// with S' the slope of the soft cap; dS itself is the gradient of a bias. A task
// owns a group of keys. It walks over the blocks of W = C N rows that see them,
// from the last to the first:
//
//   q, do as rows and, transposed, in lanes; dq = 0
//   per visited tile of 64 keys:
//     S[key][lane] = K Q^T, dP[key][lane] = V dO^T    as in the forward pass
//     P, dS        in place of S and dP
//     dv += P dO,  dk += dS Q,  dq += dS^T K          rows of vectors, sums in cache
//   in the block's turn: dq of the caller += scale dq
//
// Five products of equal size, 10 D flops per pair if Dv = D, against one
// exponential: FMA is the bound. P and dS are read as broadcasts in two of the last
// three products and by columns in the third, so that nothing is transposed.
//
// Canonical order: dk and dv are one chain over rows, the last head and query
// first; dq is one chain over the keys of a group, then over groups. Descending
// rows, because under a causal mask two tasks of one head then meet at the rows
// that both see and follow each other by a block. Rows and keys that do not see each
// other add exact zeros, so that a chain is the same however rows fill blocks.
#if defined(HEED_ENGINES_SOFTMAX_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BACKWARD_INL_H_
#undef HEED_ENGINES_SOFTMAX_BACKWARD_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "heed/core/context.h"
#include "heed/engines/softmax/backward.h"
#include "heed/engines/softmax/block-inl.h"
#include "heed/engines/softmax/gradient_buffers-inl.h"
#include "heed/engines/softmax/gradient_operands-inl.h"
#include "heed/engines/softmax/gradient_rows-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// out[r] += sum_i a[r][i] b[i] for rows of `depth` elements, as the tiles of O do. Not
// inlined: three products are one function.
template <class O, bool kSkipMasked>
HWY_NOINLINE void AccumulateRows(const typename O::Word* a, ptrdiff_t a_row,
                                 ptrdiff_t a_step, const typename O::Word* b,
                                 ptrdiff_t b_step, size_t count,
                                 typename O::Compute* out, ptrdiff_t out_row,
                                 size_t num_rows, int64_t depth, RowPrefetch& prefetch) {
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<typename O::Compute>());
  const size_t vectors = (static_cast<size_t>(depth) + N - 1) / N;
  hs::ForTiles<kMaxVectors>(0, vectors, [&](auto columns, size_t c) HWY_ATTR {
    hs::ForTiles<hs::TileRows<columns.value>()>(
        0, num_rows, [&](auto rows, size_t r) HWY_ATTR {
          const auto at = static_cast<ptrdiff_t>(r);
          prefetch.Some();
          O::template Accumulate<rows.value, columns.value, kSkipMasked>(
              a + at * a_row, a_row, a_step, b + c * N, b_step, count,
              out + at * out_row + c * N, out_row);
        });
  });
}

// A group of keys of a head: what its blocks share.
template <class O>
struct Group {
  using T = typename O::Compute;
  Interval keys;
  int64_t index, sequence;
  Operand<typename O::Key> values;  // read as the keys are
  bool finite;                      // keys
};

template <class O>
class BackwardBlock : Block<O, kMaxVectors> {
  using Base = Block<O, kMaxVectors>;
  using typename Base::T;
  using typename Base::V;
  using Base::d_, Base::N, Base::W, Base::p_, Base::s_, Base::grid_, Base::block_,
      Base::key_head_, Base::num_rows_, Base::lanes_, Base::w_, Base::rows_,
      Base::runs_;

 public:
  BackwardBlock(const Problem& p, const Sequence& s, const BlockGrid& grid,
                int64_t key_head, int64_t block, const Head<O>& head,
                const Gradients& gradients, const SharedGradients<T>& shared,
                const Group<O>& group, GradientBuffers<O>& buffers)
      : Base(p, s, grid, key_head, block, buffers.block, head), g_(gradients),
        shared_(shared), group_(group), b_(buffers), prefetch_(grid, block - 1) {
    const auto tensor = [&](RowPrefetch::Tensor& t, const Rows& rows, int64_t depth) {
      const auto size = static_cast<int64_t>(SizeOf(p.dtype));
      t = {SourceOf(rows, p.dtype, s.batch, s.first_q, key_head * grid.heads).data,
           rows.head_stride * size, rows.token_stride * size, depth * size};
    };
    tensor(prefetch_.tensors[0], p.q, p.depth);
    tensor(prefetch_.tensors[1], g_.d_o, p.value_depth);
    if (shared.dq_sums == nullptr && shared.wants.dq) {
      tensor(prefetch_.tensors[2], g_.dq, p.depth);
    }
  }

  HWY_NOINLINE HWY_ATTR void Compute() {
    this->FindKeys();
    const GroupVisits visits(s_, {runs_, num_rows_});
    if (!visits.Contains(group_.index)) return;
    this->KeepKeys(group_.keys);
    PrepareGradients();
    this->ForTiles([&](const Tile& tile) HWY_ATTR { OneTile(tile); });
    if (!shared_.wants.any_row_sum) return;
    Turn& turn = shared_.turns[shared_.index->first_turn[static_cast<size_t>(
                                   group_.sequence)] +
                               key_head_ * grid_.blocks + block_];
    WaitForTurn(turn, visits.NumBefore(group_.index));
    AddRowSums();
    EndTurn(turn);
  }

 private:
  static constexpr int C = kMaxVectors;

  HWY_INLINE void PrepareGradients() {
    const void *q[W], *d_o[W];
    this->SetLanes(q);
    for (size_t lane = 0; lane < W; ++lane) {
      shift_[lane] = std::numeric_limits<T>::infinity();
      delta_[lane] = gain_[lane] = 0;
      bias_sums_[lane] = alibi_sums_[lane] = 0;
      if (lane >= num_rows_) continue;
      const int64_t head = Head(lane), query = rows_[lane].query;
      const int64_t row = shared_.index->Row(p_, group_.sequence, head, query);
      row_index_[lane] = row;
      shift_[lane] = shared_.shift[row];
      delta_[lane] = shared_.delta[row];
      gain_[lane] = shared_.gain[row];
      d_o[lane] = SourceOf(g_.d_o, p_.dtype, s_.batch, s_.first_q + query, head).data;
      if (g_.dbias.data != nullptr) {
        dbias_[lane] = shared_.dbias.data + s_.batch * shared_.dbias.batch_stride +
                       head * shared_.dbias.head_stride +
                       query * shared_.dbias.query_stride;
      }
    }
    bool finite = O::ToWords(p_.dtype, q, num_rows_, p_.depth, b_.q_rows);
    finite = O::ToWords(p_.dtype, d_o, num_rows_, p_.value_depth, b_.d_o_rows) && finite;
    skip_masked_ = !(finite && group_.finite);
    DType dtype = O::PointToRows(p_.dtype, b_.q_rows, num_rows_, p_.depth, q);
    this->PackQueries(dtype, q);
    dtype = O::PointToRows(p_.dtype, b_.d_o_rows, num_rows_, p_.value_depth, d_o);
    O::PackQueries(dtype, d_o, num_rows_, static_cast<size_t>(p_.value_depth), 1, W,
                   b_.d_o);
    std::fill(b_.dq, b_.dq + static_cast<int64_t>(num_rows_) * row_, T{0});
  }

  int64_t Head(size_t lane) const { return key_head_ * grid_.heads + rows_[lane].head; }

  HWY_INLINE void OneTile(const Tile& tile) {
    Run runs[2 * C + 1];
    const int num_runs = this->SplitTile(tile, runs);
    const int64_t origin = tile.keys.begin;
    V unused[C];
    for (int c = 0; c < C; ++c) unused[c] = hn::Zero(d_);
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      this->template Logits</*kFlagMasked=*/true>(run, tile, unused);
      if (shared_.wants.d_logits) {
        this->WithVectors(run.c1 - run.c0, [&](auto vectors) HWY_ATTR {
          V max[vectors.value];
          for (int c = 0; c < vectors.value; ++c) max[c] = hn::Zero(d_);
          this->template Products<vectors.value>(
              run, b_.d_o, group_.values, p_.value_depth, GradientAt(run, origin), max,
              [&](size_t, size_t) HWY_ATTR { prefetch_.Some(); },
              [](V x, int64_t, int) HWY_ATTR { return x; });
        });
      }
      if (p_.dropout > 0) {
        Differentiate<true>(run, origin);
      } else {
        Differentiate<false>(run, origin);
      }
      if (shared_.wants.bias_pairs) AddBias(run, origin);
      if (shared_.wants.bias_rows || shared_.wants.alibi) SumRows(run, tile);
      if (p_.softcap > 0 && (shared_.wants.dq || shared_.wants.dk)) {
        ApplySlopes(run, origin);
      }
      if (skip_masked_) {
        Accumulate<true>(run, origin);
      } else {
        Accumulate<false>(run, origin);
      }
    }
  }

  T* GradientAt(const Run& run, int64_t origin) const {
    return b_.d_logits + (this->At(run, origin) - w_.logits);
  }

  // Of a run: g Z P in place of S, dS in place of dP. Masked pairs become -0 in
  // both, and no other dS does.
  template <bool kDropout>
  HWY_INLINE void Differentiate(const Run& run, int64_t origin) {
    const V minus_inf = hn::Set(d_, -std::numeric_limits<T>::infinity());
    const V masked_zero = hn::Set(d_, T{-0.0});
    for (size_t c = run.c0; c < run.c1; ++c) {
      const V shift = hn::Load(d_, shift_ + c * N), delta = hn::Load(d_, delta_ + c * N),
              gain = hn::Load(d_, gain_ + c * N);
      Keep<kDropout> keep(p_, lanes_, c);
      for (int64_t j = run.begin; j < run.end; ++j) {
        const size_t at = static_cast<size_t>(j - origin) * W + c * N;
        const V s = hn::Load(d_, w_.logits + at);
        const V dp = hn::Load(d_, b_.d_logits + at);
        const auto masked = hn::Eq(s, minus_inf);
        const V p = Weight(d_, hn::Sub(s, shift));
        const V kept = keep(gain, j);
        const V ds = hn::Mul(p, hn::MulSub(kept, dp, delta));
        hn::Store(hn::IfThenElse(masked, masked_zero, hn::Mul(p, kept)), d_,
                  w_.logits + at);
        hn::Store(hn::IfThenElse(masked, masked_zero, hn::Add(ds, hn::Zero(d_))), d_,
                  b_.d_logits + at);
      }
    }
  }

  // x where the pair is kept, else 0, keys ascending.
  template <bool kDropout>
  struct Keep {
    const Problem& p;
    const Lanes<T, W>& lanes;
    size_t c;
    int64_t group = -1;
    HWY_ALIGN uint32_t words[4][N];

    HWY_INLINE Keep(const Problem& problem, const Lanes<T, W>& of, size_t vector)
        : p(problem), lanes(of), c(vector) {}

    HWY_INLINE V operator()(V x, int64_t key) {
      if constexpr (!kDropout) {
        return x;
      } else {
        const hn::Rebind<uint32_t, decltype(d_)> du;
        if (key >> 2 != group) {
          group = key >> 2;
          hn::Vec<decltype(du)> w[4];
          hs::Philox(du, static_cast<uint32_t>(group),
                     hn::Load(du, lanes.position_low + c * N),
                     hn::Load(du, lanes.head_row + c * N), p.dropout_offset, p.key_low,
                     p.key_high, w);
          for (int i = 0; i < 4; ++i) hn::Store(w[i], du, words[i]);
        }
        HWY_ALIGN T kept[N];
        hn::Store(x, d_, kept);
        for (size_t i = 0; i < N; ++i) {
          if (words[key & 3][i] >= p.keep_below) kept[i] = 0;
        }
        return hn::Load(d_, kept);
      }
    }
  };

  // dS into the gradient of the bias, row by row, the last row first: rows that
  // share a bias are one and the same there.
  HWY_INLINE void AddBias(const Run& run, int64_t origin) {
    for (size_t c = run.c1; c-- > run.c0;) {
      for (int64_t j = run.begin; j < run.end; j += int64_t{N}) {
        const size_t columns = static_cast<size_t>(std::min<int64_t>(N, run.end - j));
        V v[N];
        for (size_t i = 0; i < N; ++i) {
          v[i] = i < columns
                     ? hn::Load(d_, b_.d_logits +
                                        (static_cast<size_t>(j - origin) + i) * W + c * N)
                     : hn::Zero(d_);
        }
        hs::Transpose(d_, v);
        for (size_t i = std::min(N, num_rows_ - std::min(num_rows_, c * N)); i-- > 0;) {
          T* at = dbias_[c * N + i] + j;
          if (columns == N) {
            hn::StoreU(hn::Add(hn::LoadU(d_, at), v[i]), d_, at);
          } else {
            hn::StoreN(hn::Add(hn::LoadN(d_, at, columns), v[i]), d_, at, columns);
          }
        }
      }
    }
  }

  // Sums over keys by row: of dS, and of dS times the distance.
  HWY_INLINE void SumRows(const Run& run, const Tile& tile) {
    for (size_t c = run.c0; c < run.c1; ++c) {
      HWY_ALIGN T from_grid[N];
      for (size_t i = 0; i < N; ++i) {
        from_grid[i] = static_cast<T>(lanes_.position[c * N + i] - tile.grid);
      }
      const V base = hn::Load(d_, from_grid);
      V sum = hn::Load(d_, bias_sums_ + c * N), by_distance = hn::Load(d_, alibi_sums_ + c * N);
      for (int64_t j = run.begin; j < run.end; ++j) {
        const V ds = hn::Load(d_, b_.d_logits +
                                      static_cast<size_t>(j - tile.keys.begin) * W + c * N);
        const V at = hn::Set(d_, static_cast<T>(j - tile.grid));
        sum = hn::Add(sum, ds);
        by_distance = hn::NegMulAdd(hn::Abs(hn::Sub(base, at)), ds, by_distance);
      }
      hn::Store(sum, d_, bias_sums_ + c * N);
      hn::Store(by_distance, d_, alibi_sums_ + c * N);
    }
  }

  HWY_INLINE void ApplySlopes(const Run& run, int64_t origin) {
    const V masked_zero = hn::Set(d_, T{-0.0});
    for (int64_t j = run.begin; j < run.end; ++j) {
      for (size_t c = run.c0; c < run.c1; ++c) {
        const size_t at = static_cast<size_t>(j - origin) * W + c * N;
        const V ds = hn::Load(d_, b_.d_logits + at);
        const V sloped = hn::Add(hn::Mul(ds, hn::Load(d_, b_.slopes + at)), hn::Zero(d_));
        const hn::RebindToUnsigned<decltype(d_)> du;
        const auto masked = hn::RebindMask(
            d_, hn::Eq(hn::BitCast(du, ds), hn::BitCast(du, masked_zero)));
        hn::Store(hn::IfThenElse(masked, masked_zero, sloped), d_, b_.d_logits + at);
      }
    }
  }

  template <bool kSkipMasked>
  HWY_INLINE void Accumulate(const Run& run, int64_t origin) {
    constexpr size_t kStep = O::kStep;
    const size_t first = run.c0 * N, end = std::min(num_rows_, run.c1 * N);
    const auto keys = static_cast<size_t>(run.end - run.begin);
    const auto tile_key = static_cast<size_t>(run.begin - origin);
    const int64_t key = run.begin - group_.keys.begin;
    const size_t words = (end - first + kStep - 1) / kStep;
    const size_t last = first / kStep + words - 1;  // word of the last rows
    using Word = typename O::Word;
    T* p = w_.logits + tile_key * W;
    T* ds = b_.d_logits + tile_key * W;
    T* columns = b_.columns + tile_key / kStep * W;
    if (end % kStep != 0) {  // a word's second row that there is not: never NaN
      for (size_t j = 0; j < keys; ++j) p[j * W + end] = ds[j * W + end] = T{-0.0};
    }
    O::RoundWeights(keys, run.c0, run.c1, W, p, ds, columns);
    const auto* p_words = reinterpret_cast<const Word*>(p);
    const auto* ds_words = reinterpret_cast<const Word*>(ds);
    if (shared_.wants.dv) {
      AccumulateRows<O, kSkipMasked>(
          p_words + last, W, -1, b_.d_o_rows + static_cast<int64_t>(last) * value_row_,
          -value_row_, words, b_.dv + key * value_row_, value_row_, keys, p_.value_depth,
          prefetch_);
    }
    if (shared_.wants.dk) {
      AccumulateRows<O, kSkipMasked>(
          ds_words + last, W, -1, b_.q_rows + static_cast<int64_t>(last) * row_, -row_,
          words, b_.dk + key * row_, row_, keys, p_.depth, prefetch_);
    }
    if (shared_.wants.dq) {
      AccumulateRows<O, kSkipMasked>(
          O::Columns(ds_words, reinterpret_cast<const Word*>(columns)) + first, 1, W,
          b_.key_rows + key / int64_t{kStep} * row_, row_, (keys + kStep - 1) / kStep,
          b_.dq + static_cast<int64_t>(first) * row_, row_, end - first, p_.depth,
          prefetch_);
    }
  }

  HWY_INLINE void AddRowSums() {
    const V scale = hn::Set(d_, static_cast<T>(p_.scale));
    const auto depth = static_cast<size_t>(p_.depth);
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      const int64_t row = row_index_[lane];
      if (shared_.wants.bias_rows) shared_.bias_rows[row] += bias_sums_[lane];
      if (shared_.wants.alibi) shared_.alibi_rows[row] += alibi_sums_[lane];
      if (!shared_.wants.dq) continue;
      const T* from = b_.dq + static_cast<int64_t>(lane) * row_;
      T* to = shared_.DqRow(p_, g_, group_.sequence, Head(lane), rows_[lane].query);
      size_t e = 0;
      for (; e + N <= depth; e += N) {
        hn::StoreU(hn::MulAdd(hn::Load(d_, from + e), scale, hn::LoadU(d_, to + e)), d_,
                   to + e);
      }
      if (e < depth) {
        hn::StoreN(hn::MulAdd(hn::Load(d_, from + e), scale,
                              hn::LoadN(d_, to + e, depth - e)),
                   d_, to + e, depth - e);
      }
    }
  }

  const Gradients& g_;
  const SharedGradients<T>& shared_;
  const Group<O>& group_;
  GradientBuffers<O>& b_;
  const int64_t row_ = PaddedRow<T>(p_.depth), value_row_ = PaddedRow<T>(p_.value_depth);
  RowPrefetch prefetch_;
  bool skip_masked_ = false;
  int64_t row_index_[W];
  T* dbias_[W];
  HWY_ALIGN T shift_[W], delta_[W], gain_[W], bias_sums_[W], alibi_sums_[W];
};

// One group of keys of one head.
template <class O>
HWY_INLINE void GroupGradients(const Problem& p, const Gradients& g, const Plan& plan,
                               const SharedGradients<typename O::Compute>& shared,
                               int64_t sequence, int64_t key_head, int64_t index,
                               GradientBuffers<O>& b) {
  using T = typename O::Compute;
  const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
  const int64_t begin = s.key_begin + index * kGroupKeys;
  const Interval keys = {begin, std::min(begin + kGroupKeys, s.key_end)};
  const int64_t row = PaddedRow<T>(p.depth), value_row = PaddedRow<T>(p.value_depth);
  Head<O> head;
  head.key_source = SourceOf(p.k, p.dtype, s.batch, s.first_k, key_head);
  head.keys_at = head.values_at = Place::kHead;
  head.keys = {b.keys, static_cast<ptrdiff_t>(O::KeyRow(p.depth)), keys.begin};
  const SourceRows values = SourceOf(p.v, p.dtype, s.batch, s.first_k, key_head);
  Group<O> group = {keys, index, sequence,
                    {b.values, static_cast<ptrdiff_t>(O::KeyRow(p.value_depth)),
                     keys.begin},
                    true};
  if constexpr (!O::kKeysAreWords) O::CopyGroup(head.key_source, keys, p.depth, b.keys);
  group.finite = O::ToWords(head.key_source, keys, p.depth, b.key_rows);
  O::CopyGroup(values, keys, p.value_depth, b.values);
  std::fill(b.dk, b.dk + keys.size() * row, T{0});
  std::fill(b.dv, b.dv + keys.size() * value_row, T{0});

  const BlockGrid grid(p, s, plan.lanes, O::kFuseHeads);
  for (int64_t block = grid.blocks; block-- > 0;) {
    BackwardBlock<O>(p, s, grid, key_head, block, head, g, shared, group, b).Compute();
  }
  const auto store = [&](const Rows& to, const T* from, int64_t depth, int64_t stride,
                         double factor) HWY_ATTR {
    if (to.data == nullptr) return;
    StoreTokens<T>(SourceOf(to, p.dtype, s.batch, s.first_k, key_head), keys, depth,
                   static_cast<T>(factor), from, stride);
  };
  store(g.dk, b.dk, p.depth, row, p.scale);
  store(g.dv, b.dv, p.value_depth, value_row, 1);
}

template <class O>
Plan BackwardPlan(const Problem& p) {
  Plan plan = MakePlan<O>(p, kMaxVectors);
  plan.outputs = plan.keys = plan.values = 0;
  return plan;
}

template <class O>
BackwardBytes BytesOfBackward(const Problem& p, const Gradients& g) {
  using T = typename O::Compute;
  const Plan plan = BackwardPlan<O>(p);
  const RowIndex index(p, plan.lanes, O::kFuseHeads);
  SharedGradients<T> shared(p, g, index);
  return {GradientBuffers<O>::Bytes(p, plan), shared.LayOut(p, g, nullptr)};
}

template <class O>
void Backward(Context& ctx, const Problem& p, const Gradients& g) {
  using T = typename O::Compute;
  const Plan plan = BackwardPlan<O>(p);
  const RowIndex index(p, plan.lanes, O::kFuseHeads);
  SharedGradients<T> shared(p, g, index);
  ctx.ReserveShared(static_cast<size_t>(shared.LayOut(p, g, nullptr)));
  shared.LayOut(p, g, ctx.Shared());
  ctx.ReserveScratch(static_cast<size_t>(GradientBuffers<O>::Bytes(p, plan)));
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<GradientBuffers<O>*>(ctx.Scratch(worker))->Init(p, plan);
  }
  shared.Begin(ctx, p, g);
  if (!shared.wants.any) return shared.Finish(ctx, p, g);
  const GroupQueue queue(p, g);
  const auto sequences = static_cast<int64_t>(p.sequences.size());
  // The one that a task names, or all of them.
  const auto range = [](int64_t one, int64_t count) {
    return one == GroupQueue::kAll ? Interval{0, count}
                                   : Interval{one, std::min(one + 1, count)};
  };
  ctx.ParallelFor(queue.size(), [&](int64_t task_index, int worker) HWY_ATTR {
    auto& buffers = *static_cast<GradientBuffers<O>*>(ctx.Scratch(worker));
    const GroupQueue::Task task = queue.At(task_index);
    const Interval some = range(task.sequence, sequences);
    for (int64_t s = some.begin; s < some.end; ++s) {
      const Interval heads = range(task.key_head, p.key_heads);
      const Interval groups =
          range(task.group, NumGroups(p.sequences[static_cast<size_t>(s)]));
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        for (int64_t group = groups.begin; group < groups.end; ++group) {
          GroupGradients<O>(p, g, plan, shared, s, h, group, buffers);
        }
      }
    }
  });
  shared.Finish(ctx, p, g);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_INL_H_

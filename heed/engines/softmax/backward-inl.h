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
// with S' the slope of the soft cap; dS itself is the gradient of a bias, and its sum over
// the pairs j < s <= p that of a log decay at s. A task owns a group of keys. It walks over
// the blocks of W = C N rows that see them, from the last to the first:
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
#include <optional>

#include "heed/core/context.h"
#include "heed/engines/softmax/backward.h"
#include "heed/engines/softmax/block-inl.h"
#include "heed/engines/softmax/decay_gradients-inl.h"
#include "heed/engines/softmax/gradient_buffers-inl.h"
#include "heed/engines/softmax/gradient_rows-inl.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/problem.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/philox-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// A group of keys of a head: what its blocks share.
template <class P>
struct Group {
  Interval keys;
  int64_t index, sequence;
  P products;
  std::optional<GroupQueue::Task> next = {};  // what this thread is likely to compute then
};

template <class P>
Interval KeysOfGroup(const Sequence& s, int64_t group) {
  const int64_t begin = s.key_begin + group * P::kGroupKeys;
  return {begin, std::min(begin + P::kGroupKeys, s.key_end)};
}

template <class P>
class BackwardBlock : Block<typename P::Operands, P::kVectors> {
  using O = typename P::Operands;
  using Base = Block<O, P::kVectors>;
  using typename Base::T;
  using typename Base::V;
  using Base::d_, Base::N, Base::W, Base::p_, Base::s_, Base::grid_, Base::block_, Base::key_head_, Base::num_rows_,
      Base::lanes_, Base::w_, Base::rows_, Base::runs_;

 public:
  BackwardBlock(const Problem& p, const Sequence& s, const BlockGrid& grid, int64_t key_head, int64_t block,
                const Head<O>& head, const Gradients& gradients, const SharedGradients<T>& shared, Group<P>& group,
                GradientBuffers<P>& buffers)
      : Base(p, s, grid, key_head, block, buffers.block, head), g_(gradients), shared_(shared), group_(group),
        b_(buffers) {}

  HWY_NOINLINE HWY_ATTR void Compute() {
    if (!this->MayKeep(group_.keys)) return;
    this->FindKeys();
    const GroupVisits visits(s_, {runs_, num_rows_}, P::kGroupKeys);
    if (!visits.Contains(group_.index)) return;
    const int64_t turns_before = s_.kept == nullptr ? visits.NumBefore(group_.index)
                                                    : this->KeptGroupsBefore(group_.keys.begin, visits, P::kGroupKeys);
    this->KeepKeys(group_.keys);
    PrepareGradients();
    LookAhead();
    EachTile();
    group_.products.EndBlock();
    if (!shared_.wants.any_row_sum) return;
    Turn& turn =
        shared_
            .turns[shared_.index->first_turn[static_cast<size_t>(group_.sequence)] + key_head_ * grid_.blocks + block_];
    WaitForTurn(turn, turns_before);
    AddRowSums();
    EndTurn(turn);
  }

  // One tile of the group's, for rows that keep it; dq[lane] is what the keys before have added to a row's, and goes
  // on.
  HWY_NOINLINE HWY_ATTR void ComputeTile(int64_t begin, const uint64_t (*words)[O::kGrid.tile / Visits::kKeys],
                                         T* const* dq) {
    this->FindKeys();
    this->KeepKeys({begin, begin + O::kGrid.tile});
    if (!this->SeesAny()) return;
    PrepareGradients();
    const int64_t row = P::Row(p_.depth);
    for (size_t lane = 0; lane < num_rows_; ++lane) std::copy_n(dq[lane], row, group_.products.Dq(lane));
    this->ForTile(begin, words, [&](const Tile& tile) HWY_ATTR { OneTile(tile); });
    group_.products.EndBlock();
    for (size_t lane = 0; lane < num_rows_; ++lane) std::copy_n(group_.products.Dq(lane), row, dq[lane]);
  }

 private:
  static constexpr int C = P::kVectors;

  // What is read and written soon: the rows of the next block; and with the last blocks of a group, as many keys each,
  // where its gradients go and what the next group begins with.
  HWY_INLINE void LookAhead() {
    RowPrefetch& ahead = b_.block.ahead;
    ahead.Clear();
    if (block_ > 0) AddRows(s_, key_head_, grid_, block_ - 1, ahead);
    if constexpr (O::kUsesAmx) return ahead.Spread(std::numeric_limits<int64_t>::max());
    const int64_t last = std::min<int64_t>(grid_.blocks, kLastBlocks);
    if (block_ < last) {
      const auto share = [&](const Interval& all) {
        return Interval{all.begin + all.size() * (last - 1 - block_) / last,
                        all.begin + all.size() * (last - block_) / last};
      };
      AddKeys(g_.dk, g_.dv, SharedGradients<T>::StoredAs(p_, g_), s_, key_head_, share(group_.keys), ahead);
      if (group_.next && group_.next->sequence != GroupQueue::kAll && group_.next->key_head != GroupQueue::kAll) {
        const GroupQueue::Task& next = *group_.next;
        const Sequence& s = p_.sequences[static_cast<size_t>(next.sequence)];
        AddKeys(p_.k, p_.v, p_.dtype, s, next.key_head, share(KeysOfGroup<P>(s, next.group)), ahead);
        const BlockGrid grid(p_, s, grid_.lanes, P::kFuseHeads);
        for (int64_t block = grid.blocks - 1; block >= 0; --block) {
          const bool wanted = shared_.terms_by_group ? block % last == block_ : block_ == 0 && block == grid.blocks - 1;
          if (!wanted) continue;
          AddRows(s, next.key_head, grid, block, ahead);
          if (shared_.terms_by_group) ahead.Add(p_.o, p_.dtype, p_.value_depth, s, next.key_head, grid, block);
        }
      }
    }
    ahead.Spread(kProducts * this->SeenKeys() * Base::kParts / hs::TileRows<C>());
  }
  static constexpr int64_t kLastBlocks = 4, kProducts = 5;

  HWY_INLINE void AddRows(const Sequence& s, int64_t key_head, const BlockGrid& grid, int64_t block,
                          RowPrefetch& ahead) const {
    ahead.Add(p_.q, p_.dtype, p_.depth, s, key_head, grid, block);
    ahead.Add(g_.d_o, p_.dtype, p_.value_depth, s, key_head, grid, block);
    if (shared_.dq_sums == nullptr) ahead.Add(g_.dq, DTypeOf<T>::value, p_.depth, s, key_head, grid, block);
  }
  HWY_INLINE void AddKeys(const Rows& k, const Rows& v, DType dtype, const Sequence& s, int64_t key_head,
                          const Interval& keys, RowPrefetch& ahead) const {
    ahead.Add(k, dtype, p_.depth, s, s.first_k, key_head, keys);
    ahead.Add(v, dtype, p_.value_depth, s, s.first_k, key_head, keys);
  }

  HWY_INLINE void PrepareGradients() {
    const void *q[W], *d_o[W];
    this->SetLanes(q);
    decay_gradients_.Begin();
    for (size_t lane = 0; lane < W; ++lane) {
      shift_[lane] = std::numeric_limits<T>::infinity();
      delta_[lane] = gain_[lane] = 0;
      bias_sums_[lane] = alibi_sums_[lane] = 0;
      if (lane >= num_rows_) continue;
      const int64_t head = Head(lane), query = rows_[lane].query;
      const int64_t row = shared_.index->Row(p_, group_.sequence, head, query);
      row_index_[lane] = row;
      shift_[lane] = P::Shift(shared_.shift[row]);
      delta_[lane] = shared_.delta[row];
      gain_[lane] = shared_.gain[row];
      d_o[lane] = SourceOf(g_.d_o, p_.dtype, s_.batch, s_.first_q + query, head).data;
      if (g_.dbias.data != nullptr) {
        dbias_[lane] = shared_.dbias.data + s_.batch * shared_.dbias.batch_stride + head * shared_.dbias.head_stride +
                       query * shared_.dbias.query_stride;
      }
    }
    const DType dtype = group_.products.BeginBlock(num_rows_, q, d_o);
    this->PackQueries(dtype, q);
    PackOutputGradients(dtype, d_o);
    exponent_ = static_cast<T>((this->raw_ ? this->factor_.of_logits : 1) * hs::kLog2E);
    if constexpr (P::kScalesShift) FindLargeShifts();
  }

  // Rows whose shift is so large that its rounding would be seen, or that it is infinite.
  HWY_INLINE void FindLargeShifts() {
    constexpr T kLarge = 1 << 14;
    large_shift_ = false;
    for (size_t lane = 0; lane < W; ++lane) {
      far_lse_[lane] = std::numeric_limits<T>::quiet_NaN();
      if (lane >= num_rows_) continue;
      const T lse = shared_.shift[row_index_[lane]];
      if (!(std::abs(lse) >= kLarge) || std::isinf(lse)) continue;
      large_shift_ = true;
      far_lse_[lane] = this->raw_ ? lse / static_cast<T>(this->factor_.of_logits) : lse;
    }
  }

  HWY_INLINE void PackOutputGradients(DType dtype, const void* const* d_o) {
    const auto depth = static_cast<size_t>(p_.value_depth);
    if constexpr (O::kUsesAmx) {
      const bool finite = O::PackQueries(dtype, d_o, num_rows_, depth, 1, W, b_.d_o);
      d_logits_finite_ = finite && group_.products.ValuesAreFinite();
    } else {
      O::PackQueries(dtype, d_o, num_rows_, depth, 1, W, b_.d_o);
    }
  }

  int64_t Head(size_t lane) const { return key_head_ * grid_.heads + rows_[lane].head; }

  HWY_INLINE void EachTile() {
    if constexpr (O::kUsesAmx) {
      Interval plain;  // keys
      const auto add_plain = [&] {
        if (plain.empty()) return;
        const auto add = [&](auto&& tiles) HWY_ATTR {
          group_.products.AddPlain(plain, w_.queries, b_.d_o, exponent_, {shift_, delta_, gain_}, w_.logits,
                                   b_.d_logits, b_.block.ahead, tiles);
        };
        if (p_.forgets) {
          add(TilesThatForget{*this, {}});
        } else {
          add(nullptr);
        }
        plain = {};
      };
      this->ForTiles([&](const Tile& tile) HWY_ATTR {
        const bool is_plain = IsPlain(tile);
        if (!is_plain || tile.keys.begin != plain.end) add_plain();
        if (!is_plain) return OneTile(tile);
        plain = {plain.empty() ? tile.keys.begin : plain.begin, tile.keys.end};
      });
      add_plain();
    } else {
      this->ForTiles([&](const Tile& tile) HWY_ATTR { OneTile(tile); });
    }
  }

  HWY_INLINE void OneTile(const Tile& tile) {
    Run runs[2 * C + 1];
    const int num_runs = this->SplitTile(tile, runs);
    const int64_t origin = tile.keys.begin;
    V unused[C];
    for (int c = 0; c < C; ++c) unused[c] = hn::Zero(d_);
    this->BeginLogits(tile);
    if (shared_.wants.decays && !this->IsWhole(tile, runs, num_runs)) {
      std::fill(b_.d_logits, b_.d_logits + static_cast<size_t>(tile.keys.size()) * W, T{0});
    }
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      this->Logits(run, tile, /*flag_masked=*/true, unused);
      if (shared_.wants.d_logits) DLogits(run, origin);
      if (p_.dropout > 0) {
        Differentiate<true>(run, origin);
      } else {
        Differentiate<false>(run, origin);
      }
      if (shared_.wants.bias_pairs) AddBias(run, origin);
      if (shared_.wants.bias_rows || shared_.wants.alibi) SumRows(run, tile);
    }
    if (shared_.wants.decays) decay_gradients_.Add(tile, s_, b_.d_logits, num_rows_);
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      if (p_.softcap > 0 && (shared_.wants.dq || shared_.wants.dk)) {
        ApplySlopes(run, origin);
      }
      group_.products.Add(run, origin, w_.logits, b_.d_logits, b_.block.ahead);
    }
  }

  // dP of a run.
  HWY_INLINE void DLogits(const Run& run, int64_t origin) {
    const Operand<typename O::Key> values = group_.products.Values();
    if constexpr (O::kUsesAmx) {
      this->AmxProducts(b_.d_o, values, run, p_.value_depth, GradientAt(run, origin), d_logits_finite_);
    } else {
      this->ForParts(run, [&](auto vectors, const Run& part) HWY_ATTR {
        V max[vectors.value];
        for (int c = 0; c < vectors.value; ++c) max[c] = hn::Zero(d_);
        this->template Products<vectors.value>(
            part, b_.d_o, values, p_.value_depth, GradientAt(part, origin), max,
            [&](size_t, size_t) HWY_ATTR { b_.block.ahead.Some(); }, [](V x, int64_t, int) HWY_ATTR { return x; });
      });
    }
  }

  // Whether nothing is wanted of a tile but its products, and every pair of it is kept.
  HWY_INLINE bool IsPlain(const Tile& tile) const {
    const Wants& wants = shared_.wants;
    return tile.full && !large_shift_ && wants.d_logits && this->raw_ && p_.dropout == 0 && !this->partial_ &&
           tile.keys.size() % O::kGrid.step == 0 && !wants.bias_rows && !wants.alibi &&
           (!p_.forgets || this->decays_.IsPlain(s_, tile)) && this->queries_finite_ && w_.keys_finite &&
           d_logits_finite_;
  }

  // What is subtracted from the logits of a tile.
  HWY_INLINE V ShiftOf(size_t c) const {
    const V shift = hn::Load(d_, shift_ + c * N);
    return p_.forgets ? hn::Sub(shift, P::RowPart(this->decays_.OfRow(c), hn::Set(d_, exponent_))) : shift;
  }

  T* GradientAt(const Run& run, int64_t origin) const { return b_.d_logits + (this->At(run, origin) - w_.logits); }

  // Puts g Z P of a run in place of its S, dS in place of dP. Masked pairs become -0 in
  // both, and no other dS does.
  template <bool kDropout>
  HWY_INLINE void Differentiate(const Run& run, int64_t origin) {
    const V minus_inf = hn::Set(d_, -std::numeric_limits<T>::infinity());
    const V masked_zero = hn::Set(d_, T{-0.0}), exponent = hn::Set(d_, exponent_);
    const int64_t end = run.end;
    for (size_t c = run.c0; c < run.c1; ++c) {
      const V shift = ShiftOf(c), delta = hn::Load(d_, delta_ + c * N), gain = hn::Load(d_, gain_ + c * N);
      [[maybe_unused]] const V far = this->WithoutRow(hn::Load(d_, far_lse_ + c * N), c);
      [[maybe_unused]] const auto absent = hn::Not(hn::FirstN(d_, num_rows_ - std::min(num_rows_, c * N)));
      Keep<kDropout> keep(p_, lanes_, c);
      const size_t first = static_cast<size_t>(run.begin - origin) * W + c * N;
      T* HWY_RESTRICT logit = w_.logits + first;
      T* HWY_RESTRICT d_logit = b_.d_logits + first;
      for (int64_t j = run.begin; j < end; ++j, logit += W, d_logit += W) {
        const V s = hn::Load(d_, logit);
        const V dp = hn::Load(d_, d_logit);
        auto masked = hn::Eq(s, minus_inf);
        if constexpr (O::kUsesAmx) masked = hn::Or(masked, absent);
        V p = P::Weight(s, shift, exponent);
        if constexpr (P::kScalesShift) {
          if (large_shift_) p = hn::IfThenElse(hn::IsNaN(far), p, P::FarWeight(s, far, exponent));
        }
        const V kept = keep(gain, j);
        const V ds = hn::Mul(p, hn::MulSub(kept, dp, delta));
        hn::Store(hn::IfThenElse(masked, masked_zero, hn::Mul(p, kept)), d_, logit);
        hn::Store(hn::IfThenElse(masked, masked_zero, hn::Add(ds, hn::Zero(d_))), d_, d_logit);
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

    HWY_INLINE Keep(const Problem& problem, const Lanes<T, W>& of, size_t vector) : p(problem), lanes(of), c(vector) {}

    HWY_INLINE V operator()(V x, int64_t key) {
      if constexpr (!kDropout) {
        return x;
      } else {
        const hn::Rebind<uint32_t, decltype(d_)> du;
        if (key >> 2 != group) {
          group = key >> 2;
          hn::Vec<decltype(du)> w[4];
          hs::Philox(du, static_cast<uint32_t>(group), hn::Load(du, lanes.position_low + c * N),
                     hn::Load(du, lanes.head_row + c * N), p.dropout_offset, p.key_low, p.key_high, w);
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
          v[i] = i < columns ? hn::Load(d_, b_.d_logits + (static_cast<size_t>(j - origin) + i) * W + c * N)
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
        const V ds = hn::Load(d_, b_.d_logits + static_cast<size_t>(j - tile.keys.begin) * W + c * N);
        const V at = hn::Set(d_, static_cast<T>(j - tile.grid));
        sum = hn::Add(sum, ds);
        by_distance = hn::NegMulAdd(hn::Abs(hn::Sub(base, at)), ds, by_distance);
      }
      hn::Store(sum, d_, bias_sums_ + c * N);
      hn::Store(by_distance, d_, alibi_sums_ + c * N);
    }
  }

  // What a pipeline of tiles needs where rows forget.
  struct TilesThatForget {
    BackwardBlock& block;
    typename P::TileTerms terms;

    HWY_INLINE void Begin(int64_t first) {
      Tile tile;
      tile.grid = first;
      tile.keys = {first, first + O::kGrid.tile};
      block.BeginLogits(tile);
      for (int c = 0; c < C; ++c) terms.shift[c] = block.ShiftOf(static_cast<size_t>(c));
      terms.of_key = block.decays_.OfKeys();
    }
    HWY_INLINE void End() {
      if (!block.shared_.wants.decays) return;
      block.decay_gradients_.AddPlain(terms.key_sums, terms.row_sums, block.num_rows_);
    }
  };

  HWY_INLINE void ApplySlopes(const Run& run, int64_t origin) {
    const V masked_zero = hn::Set(d_, T{-0.0});
    for (int64_t j = run.begin; j < run.end; ++j) {
      for (size_t c = run.c0; c < run.c1; ++c) {
        const size_t at = static_cast<size_t>(j - origin) * W + c * N;
        const V ds = hn::Load(d_, b_.d_logits + at);
        const V sloped = hn::Add(hn::Mul(ds, hn::Load(d_, b_.slopes + at)), hn::Zero(d_));
        const hn::RebindToUnsigned<decltype(d_)> du;
        const auto masked = hn::RebindMask(d_, hn::Eq(hn::BitCast(du, ds), hn::BitCast(du, masked_zero)));
        hn::Store(hn::IfThenElse(masked, masked_zero, sloped), d_, b_.d_logits + at);
      }
    }
  }

  HWY_INLINE void AddRowSums() {
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      const int64_t row = row_index_[lane];
      if (shared_.wants.bias_rows) shared_.bias_rows[row] += bias_sums_[lane];
      if (shared_.wants.alibi) shared_.alibi_rows[row] += alibi_sums_[lane];
      if (shared_.wants.decays) shared_.decay_rows[row].Add(decay_gradients_.OfRow(lane));
      if (!shared_.wants.dq) continue;
      AddScaledRow(static_cast<T>(p_.scale), group_.products.Dq(lane), p_.depth,
                   shared_.DqRow(p_, g_, group_.sequence, Head(lane), rows_[lane].query));
    }
  }

  const Gradients& g_;
  const SharedGradients<T>& shared_;
  Group<P>& group_;
  GradientBuffers<P>& b_;
  bool d_logits_finite_ = true;  // what dP is a product of, where tiles are multiplied
  T exponent_ = 0;               // times a logit
  int64_t row_index_[W];
  T* dbias_[W];
  HWY_ALIGN T shift_[W], delta_[W], gain_[W], bias_sums_[W], alibi_sums_[W];
  HWY_ALIGN T far_lse_[W] = {};  // of rows with large shifts, where those are scaled, else NaN
  bool large_shift_ = false;
  DecayGradients<O, C> decay_gradients_{this->decays_, shared_.decay_keys, shared_.decay_tiles};
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_INL_H_

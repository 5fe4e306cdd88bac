// Exact attention, backward: the logits are recomputed, and one pass gives all gradients.
//
// Compiled once per SIMD target and dtype. With w = sigmoid(lse - sink), or 1 without a sink, and Z the keep bits of
// dropout:
//
//   P_ij  = exp(S_ij - lse_i)
//   g_i   = w_i / (1 - dropout),  delta_i = w_i <do_i, o_i> - dlse_i
//   dP_ij = g_i Z_ij <do_i, v_j>
//   dS_ij = P_ij (dP_ij - delta_i)
//   dv_j  = sum_i g_i Z_ij P_ij do_i
//   dk_j  = scale sum_i dS_ij S'_ij q_i,  dq_i = scale sum_j dS_ij S'_ij k_j
//
// S' is the slope of the soft cap. dS is the gradient of a bias, and the sum of dS over the pairs with j < s <= p is
// the gradient of the log decay at s, where p is the position of the query.
//
// A task owns a group of keys of one key head. It passes over the blocks of W = C N query rows that see these keys,
// from the last block to the first (C vectors of N lanes, a query per lane). Per block:
//
//   pack q and do: as rows and, transposed, with a query per lane; dq = 0
//   per tile of 64 keys in which some row sees a key:
//     S[key][lane] = K Q^T, dP[key][lane] = V dO^T    as in the forward pass
//     P, dS        in place of S and dP
//     dv += P dO,  dk += dS Q,  dq += dS^T K          vectors along the channels, sums in cache
//   when the block's ticket comes up (ordered reduction): dq of the caller += scale dq
//
// The five products have the same size, 10 D flops per pair if Dv = D, against one exponential, so the bound is FMA
// throughput. Of the last three products, two read P and dS as broadcasts along rows and one reads dS by columns, so
// nothing is transposed.
//
// The order of the sums is fixed. dk and dv are one chain over query rows, from the last head and query to the first.
// dq is one chain over the keys of a group and then over the groups. Rows descend because of the causal diagonal: two
// tasks of one head then begin at rows that both of them see, and the second follows the first at the distance of one
// block. A row and a key that does not see it add exact zeros, so a chain does not depend on how rows are divided into
// blocks.
#if defined(HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_INL_H_
#undef HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>

#include "heed/core/context.h"
#include "heed/engines/softmax/backward/backward.h"
#include "heed/engines/softmax/block/block-inl.h"
#include "heed/engines/softmax/backward/decay_gradients-inl.h"
#include "heed/engines/softmax/backward/gradient_buffers-inl.h"
#include "heed/engines/softmax/backward/gradient_rows-inl.h"
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

// A group of keys of one key head, with the state that its blocks share.
template <class P>
struct Group {
  Interval keys;
  int64_t index, sequence;
  P products;
  std::optional<GroupQueue::Task> next = {};  // the task that this thread probably takes next
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
    const VisibleGroups groups(s_, {runs_, num_rows_}, P::kGroupKeys);
    if (!groups.Contains(group_.index)) return;
    const int64_t tickets_before = s_.kept == nullptr
                                       ? groups.NumBefore(group_.index)
                                       : this->KeptGroupsBefore(group_.keys.begin, groups, P::kGroupKeys);
    this->KeepKeys(group_.keys);
    PrepareGradients();
    PrefetchNext();
    EachTile();
    group_.products.EndBlock();
    if (!shared_.wants.any_row_sum) return;
    TicketCounter& ticket = shared_.tickets[shared_.index->first_ticket[static_cast<size_t>(group_.sequence)] +
                                            key_head_ * grid_.blocks + block_];
    WaitForTicket(ticket, tickets_before);
    AddRowSums();
    ReleaseTicket(ticket);
  }

  // Computes one tile of the group for gathered rows, which keep some of it. dq[lane] is the row's running sum over the
  // keys before; it is read and written back.
  HWY_NOINLINE HWY_ATTR void ComputeTile(int64_t begin, const uint64_t (*words)[O::kGrid.tile / BlockSparseMask::kKeys],
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

  // Prefetches the rows of the next block. The last kLastBlocks blocks of a group also prefetch, in equal shares, the
  // destination of dk and dv and the first operands of the next group.
  HWY_INLINE void PrefetchNext() {
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

  // Finds rows with an lse so large that the rounding of the scaled shift would show in P, or that the scaled shift is
  // infinite. An lse that is itself infinite needs no care.
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
      Interval plain;  // full tiles without masks, computed together by the pipeline
      const auto add_plain = [&] {
        if (plain.empty()) return;
        const auto add = [&](auto&& tiles) HWY_ATTR {
          group_.products.AddPlain(plain, w_.queries, b_.d_o, exponent_, {shift_, delta_, gain_}, w_.logits,
                                   b_.d_logits, b_.block.ahead, tiles);
        };
        if (p_.forgets) {
          add(TilesWithDecay{*this, {}});
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
      if (shared_.wants.relative) AddRelative(run, origin);
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

  // Computes dP of a run.
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

  // Returns whether all pairs of a tile are kept and nothing but its products is needed, so that the pipeline can take
  // it.
  HWY_INLINE bool IsPlain(const Tile& tile) const {
    const Wants& wants = shared_.wants;
    return tile.full && !large_shift_ && wants.d_logits && this->raw_ && p_.dropout == 0 && !this->partial_ &&
           tile.keys.size() % O::kGrid.step == 0 && !wants.bias_rows && !wants.alibi &&
           (!p_.forgets || this->decays_.IsPlain(s_, tile)) && this->queries_finite_ && w_.keys_finite &&
           d_logits_finite_;
  }

  // Returns the number to subtract from the logits of a tile.
  HWY_INLINE V ShiftOf(size_t c) const {
    const V shift = hn::Load(d_, shift_ + c * N);
    return p_.forgets ? hn::Sub(shift, P::RowPart(this->decays_.OfRow(c), hn::Set(d_, exponent_))) : shift;
  }

  T* GradientAt(const Run& run, int64_t origin) const { return b_.d_logits + (this->At(run, origin) - w_.logits); }

  // Replaces S of a run by g Z P, and dP by dS. Masked pairs become -0 in both; no other element of dS is -0.
  template <bool kDropout>
  HWY_INLINE void Differentiate(const Run& run, int64_t origin) {
    const V minus_inf = hn::Set(d_, -std::numeric_limits<T>::infinity());
    const V masked_zero = hn::Set(d_, T{-0.0}), exponent = hn::Set(d_, exponent_);
    const int64_t end = run.end;
    const typename P::Weight weight;
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
        V p = weight(s, shift, exponent);
        if constexpr (P::kScalesShift) {
          if (large_shift_) p = hn::IfThenElse(hn::IsNaN(far), p, weight.Far(s, far, exponent));
        }
        const V kept = keep(gain, j);
        const V ds = hn::Mul(p, hn::MulSub(kept, dp, delta));
        hn::Store(hn::IfThenElse(masked, masked_zero, hn::Mul(p, kept)), d_, logit);
        hn::Store(hn::IfThenElse(masked, masked_zero, hn::Add(ds, hn::Zero(d_))), d_, d_logit);
      }
    }
  }

  // Returns x where dropout keeps the pair, else 0. It is called with ascending keys.
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

  // Adds dS to the gradient of the bias, from the last row to the first. Rows that share a bias have the same
  // destination, so the order of rows is the order of the sum.
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

  // Adds dS to the group's part of the gradient of the relative bias. In a vector of consecutive positions, a sum of dS
  // over pairs of one distance moves up by one lane per key. Each key's sums are stored one element below those of the
  // key before, so that those that leave the vector stay in memory.
  HWY_INLINE void AddRelative(const Run& run, int64_t origin) {
    constexpr auto kLanes = static_cast<int64_t>(N);
    HWY_ALIGN T sums[O::kGrid.tile + 2 * kLanes];
    const int64_t span = p_.relative_bias.span, stride = SharedGradients<T>::RelativeRow(p_);
    for (size_t c = run.c0; c < run.c1; ++c) {
      const size_t rows = std::min(N, num_rows_ - std::min(num_rows_, c * N));
      if (rows == 0) break;
      const auto line = [&](size_t lane) { return b_.relative + rows_[lane].head * stride + RelativeBias::kPad; };
      // dS of the row in the first lane and key j
      const auto of_key = [&](int64_t j) { return b_.d_logits + static_cast<size_t>(j - origin) * W + c * N; };
      if ((lanes_.in_order >> c & 1) == 0) {
        for (size_t i = 0; i < rows; ++i) {
          const int64_t position = lanes_.position[c * N + i];
          const int64_t end = std::min(run.end, position + 1);
          T* HWY_RESTRICT to = line(c * N + i);
          for (int64_t j = std::max(run.begin, position - span + 1); j < end; ++j) to[position - j] += of_key(j)[i];
        }
        continue;
      }
      const int64_t first = lanes_.position[c * N];
      const int64_t begin = std::max(run.begin, first - span + 1), end = std::min(run.end, first + kLanes);
      if (begin >= end) continue;
      const auto present = hn::FirstN(d_, rows);
      V sum = hn::Zero(d_);
      for (int64_t j = begin; j < end; ++j) {
        sum = hn::Add(hn::Slide1Up(d_, sum), hn::IfThenElseZero(present, hn::Load(d_, of_key(j))));
        hn::StoreU(sum, d_, sums + (end - 1 - j));
      }
      const int64_t count = end - 1 - begin + kLanes;
      hn::StoreU(hn::Zero(d_), d_, sums + count);
      T* HWY_RESTRICT to = line(c * N) + (first - end + 1);
      for (int64_t i = 0; i < count; i += kLanes) {
        hn::StoreU(hn::Add(hn::LoadU(d_, to + i), hn::Load(d_, sums + i)), d_, to + i);
      }
    }
  }

  // Adds to the sums over keys of each row: dS, and dS times the distance to the key.
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

  // The callbacks of the AMX tile pipeline for rows with log decays.
  struct TilesWithDecay {
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
  bool d_logits_finite_ = true;  // of do and V, the factors of dP; known for AMX only
  T exponent_ = 0;               // the factor from a logit to an exponent of 2
  int64_t row_index_[W];
  T* dbias_[W];
  HWY_ALIGN T shift_[W], delta_[W], gain_[W], bias_sums_[W], alibi_sums_[W];
  HWY_ALIGN T far_lse_[W] = {};  // lse of rows with large scaled shifts; NaN for other rows
  bool large_shift_ = false;
  DecayGradients<O, C> decay_gradients_{this->decays_, shared_.decay_keys, shared_.decay_tiles};
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_INL_H_

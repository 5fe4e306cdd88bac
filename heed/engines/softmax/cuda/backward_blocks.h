// Attention backward on a GPU. Kernels compute terms of each row (term_blocks.h), gradients of keys and values, of
// queries, and of a bias (bias_gradients.h).
//
//   P_ij = exp(s_ij - lse_i),  dP_ij = <d_o_i, v_j>,  dS_ij = P_ij (factor_i Z_ij dP_ij - delta_i)
//   dv_j = sum_i factor_i Z_ij P_ij d_o_i,  dk_j = scale sum_i dS_ij q_i,  dq_i = scale sum_j dS_ij k_j
//
// Z is the dropout mask, w_i the probability that a learned sink leaves, factor_i = w_i / (1 - dropout) and delta_i =
// w_i <d_o_i, o_i> - d_lse_i. A row adds -sum_j dS_ij |p_i - j|, with dS before the soft cap's derivative, to the
// gradient of its slope.
//
// A block owns 64 keys (dk, dv) or 64 rows (dq), of which each of four warps owns 16. Beyond 128 channels it has eight
// warps: two share 16 rows and own half of the output channels each, because registers do not hold all of them. A key
// block sweeps the rows of all query heads that see its keys; a row block sweeps the keys that its rows see. P and dS
// leave the first products as operands of the next ones, keys by rows in key blocks and rows by keys in row blocks, so
// that they stay in registers and each gradient is summed in one order. Computing P and dS twice costs two of seven
// products. As in the forward pass, P of a masked pair is -0.
//
// On Hopper the four warps are a warpgroup. Two blocks per SM overlap the WGMMA of one with the softmax of the other,
// and the next tile is loaded during the last products of a tile.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_BLOCKS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_BLOCKS_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/elements.h"
#include "heed/cuda/machine.h"
#include "heed/engines/softmax/cuda/backward_params.h"
#include "heed/engines/softmax/cuda/forward_block.h"
#include "heed/engines/softmax/cuda/block_mask.h"
#include "heed/engines/softmax/cuda/pair_logits.h"
#include "heed/engines/softmax/cuda/row_products.h"
#include "heed/engines/softmax/cuda/weighted_sums.h"

namespace heed::softmax::cuda {

inline constexpr int kBackwardTile = 64;  // keys or rows

// Terms and masks of a row.
struct RowState {
  RowTerms terms = {};
  KeyRuns runs;
  uint64_t mask_word = 0;  // the block mask of the tile's keys
};

template <DType kOf, int kDepth, int kValueDepth, bool kWgmma = false>
struct BackwardShape {
  static constexpr DType kDType = kOf;
  static constexpr bool kUsesWgmma = kWgmma;
  using Element = heed::cuda::Element<kDType>;
  static constexpr int kChannels = kDepth, kValueChannels = kValueDepth;
  static constexpr int kNWarps = kDepth > 128 ? 2 : 1;  // warps that share rows
  static constexpr int kThreads = 4 * kNWarps * heed::cuda::kWarp;
  static constexpr int kBlocks = kWgmma ? 2 : 1;  // blocks per SM, which limits registers
  static constexpr int kStages = kWgmma ? 2 : 1;  // stages of the tiles in the sweep
  using Rows = SharedTile<kBackwardTile, kDepth, Element>;
  using ValueRows = SharedTile<kBackwardTile, kValueDepth, Element>;
  // Shared memory holds the block's own tiles and the stages of the sweep.
  static constexpr int kTileBytes = Rows::kBytes + ValueRows::kBytes;
  static constexpr int kMarksAt = (1 + kStages) * kTileBytes, kSharedBytes = kMarksAt + kBackwardTile;
};

// Code that all gradient blocks share: tiles of keys, values, queries and d_o, softmax gradients, and sums.
template <class M, class Shape, bool kGeneral>
class BackwardBlock {
 protected:
  using Element = typename Shape::Element;
  static constexpr DType kDType = Shape::kDType;
  static constexpr int kDepth = Shape::kChannels, kValueDepth = Shape::kValueChannels, kNWarps = Shape::kNWarps;
  static constexpr int kTiles = kBackwardTile / 8;
  using Products = float[1][kTiles][4];
  // Sums over the warp's channels.
  using Of = WarpSums<1, kTiles, kDepth / 8 / kNWarps>;
  using OfValues = WarpSums<1, kTiles, kValueDepth / 8 / kNWarps>;
  // Scales rows by powers of two, as gradients may exceed the range of f16.
  static constexpr bool kHasPowers = kDType == DType::kF16;

  HEED_DEVICE BackwardBlock(M& m, const BackwardParams& p)
      : BackwardBlock(m, p, p.forward.sequences[m.block(2)], p.gradients[m.block(2)]) {}
  HEED_DEVICE BackwardBlock(M& m, const BackwardParams& p, const DeviceSequence& s, const DeviceGradients& g)
      : m_(m), p_(p), f_(p.forward), s_(s), g_(g), lane_(m.thread() % heed::cuda::kWarp),
        warp_(m.thread() / heed::cuda::kWarp / kNWarps), n_warp_(m.thread() / heed::cuda::kWarp % kNWarps),
        of_pairs_(f_, s_), block_mask_(f_, s_) {}

  // A pair of tiles, keys and values or queries and d_o: the block's own, or those of a stage.
  struct Tiles {
    typename Shape::Rows rows;
    typename Shape::ValueRows values;
  };
  HEED_DEVICE Tiles OwnTiles() const { return TilesAt(0); }
  HEED_DEVICE Tiles TilesOf(int stage) const { return TilesAt((1 + stage) * Shape::kTileBytes); }

  HEED_DEVICE const Element* KeyAt(int64_t key, int key_head) const {
    return static_cast<const Element*>(f_.k) + s_.k + key_head * f_.k_strides.head + key * f_.k_strides.token;
  }
  HEED_DEVICE const Element* ValueAt(int64_t key, int key_head) const {
    return static_cast<const Element*>(f_.v) + s_.v + key_head * f_.v_strides.head + key * f_.v_strides.token;
  }
  HEED_DEVICE const Element* QueryAt(int query, int head) const {
    return static_cast<const Element*>(f_.q) + s_.q + head * f_.q_strides.head + query * f_.q_strides.token;
  }
  HEED_DEVICE const Element* OutputGradientAt(int query, int head) const {
    return static_cast<const Element*>(p_.d_o) + g_.d_o + head * p_.d_o_strides.head + query * p_.d_o_strides.token;
  }

  HEED_DEVICE void CopyKeys(const Tiles& to, int64_t first, int count, int key_head) const {
    Copy(to.rows, f_.depth, count, KeyAt(first, key_head), f_.k_strides);
    Copy(to.values, f_.value_depth, count, ValueAt(first, key_head), f_.v_strides);
  }
  HEED_DEVICE void CopyRows(const Tiles& to, int first, int count, int head) const {
    Copy(to.rows, f_.depth, count, QueryAt(first, head), f_.q_strides);
    Copy(to.values, f_.value_depth, count, OutputGradientAt(first, head), p_.d_o_strides);
  }
  template <class Tile>
  HEED_DEVICE void Copy(const Tile& to, int channels, int count, const Element* first, const Strides& strides) const {
    to.template CopyRows<Shape::kThreads>(m_, f_.aligned, channels, count, first, strides.token);
  }
  // Waits until all copies have landed for all threads.
  HEED_DEVICE void Wait() const {
    m_.CommitCopies();
    m_.template WaitCopies<0>();
    FenceAndSync();
  }
  HEED_DEVICE void FenceAndSync() const {
    if constexpr (Shape::kUsesWgmma) m_.FenceProxyAsync();
    m_.Sync();
  }

  // Multiplies this warp's 16 rows of the block's own tiles with all rows of a stage: q k^T and d_o v^T, or their
  // transposes.
  HEED_DEVICE void Multiply(int stage, Products& of_rows, Products& of_values) const {
    const Tiles own = OwnTiles(), other = TilesOf(stage);
    if constexpr (Shape::kUsesWgmma) {
      m_.WgmmaFence(of_rows, of_values);
      Wgmma<kDepth>(own.rows, other.rows, of_rows);
      Wgmma<kValueDepth>(own.values, other.values, of_values);
      m_.WgmmaCommit();
      m_.template WgmmaWait<0>(of_rows, of_values);
    } else {
      using Rows = RowProducts<kDType, 1, kTiles>;
      Rows::template Multiply<kDepth>(m_, own.rows, 16 * warp_, other.rows, 0, of_rows);
      Rows::template Multiply<kValueDepth>(m_, own.values, 16 * warp_, other.values, 0, of_values);
    }
  }

  // True if the block mask keeps a pair of 64 rows and a tile of keys. Sets block_mask_ to these rows and keys.
  HEED_DEVICE bool Keeps(int head, int first, const Interval& keys) {
    if constexpr (kGeneral) {
      block_mask_.Choose(head, first, first);
      block_mask_.SkipTo(keys.begin);
      if (block_mask_.From(keys.begin) != keys.begin) return false;
      block_mask_.Begin(keys.begin);
    }
    return true;
  }
  // True if each of 64 rows sees all of these keys.
  HEED_DEVICE bool IsFull(const BlockKeys& seen, const Interval& keys, int count) const {
    return !(kGeneral && (of_pairs_.ByPair() || !block_mask_.KeepsAll())) && count == kBackwardTile &&
           seen.common.Contains(keys);
  }
  HEED_DEVICE RowState StateOf(const Row& at, bool exists, bool full) const {
    RowState row;
    if (!exists) return row;
    row.terms = p_.terms[p_.TermAt(g_, at.query, at.head)];
    if (!full) row.runs = KeyRunsOf(f_, s_, at.query);
    if constexpr (kGeneral) row.mask_word = block_mask_.WordOf(at.query);
    return row;
  }

  // Replaces one pair's logit by the factor of d_o in dv, and its dP by dS. Returns dS before the soft cap's
  // derivative.
  HEED_DEVICE float SoftmaxGradient(const Row& at, const RowState& row, int64_t key, bool full, float& product,
                                    float& dp) const {
    float x = product, capped = 0;
    if constexpr (kGeneral) {
      x = of_pairs_.OfProduct(x, at, key, row.terms.slope, &capped);
    } else {
      x *= f_.scale;
    }
    if (!full && !Sees(row.runs, key)) x = -INFINITY;
    if constexpr (kGeneral) {
      if (!full && (row.mask_word >> (key - block_mask_.tile()) & 1) == 0) x = -INFINITY;
      if (!full && x != -INFINITY) x = of_pairs_.WithPair(x, at, key);
    }
    if (!full && x == -INFINITY) {
      product = dp = -0.0f;
      return 0;
    }
    const float p = M::Exp2((x - row.terms.lse) * kLog2E);
    float factor = row.terms.factor;
    if constexpr (kGeneral) {
      if (f_.dropout > 0 && !of_pairs_.Keeps(at, key)) factor = 0;
    }
    product = p * factor;
    const float ds = p * (factor * dp - row.terms.delta);
    dp = ds;
    if constexpr (kGeneral) {
      if (f_.softcap > 0) dp *= 1 - capped * capped;
    }
    dp += 0.0f;  // -0 marks masked pairs
    return ds;
  }
  // Applies SoftmaxGradient() to the warp's 16 rows and all keys of a tile, and calls f(half, j, i, row, key, dS) for
  // each pair.
  template <class F>
  HEED_DEVICE void SoftmaxGradientRows(int first, int count, int head, int64_t first_key, bool full, Products& p,
                                       Products& ds, const F& f) const {
    HEED_DEVICE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * warp_ + lane_ / 4 + 8 * half;
      const Row at = {first + row, head};
      const RowState state = StateOf(at, row < count, full);
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kTiles; ++j) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int64_t key = first_key + 8 * j + lane_ % 4 * 2 + i;
          f(half, j, i, at, key, SoftmaxGradient(at, state, key, full, p[0][j][2 * half + i], ds[0][j][2 * half + i]));
        }
      }
    }
  }

  // Adds the rows of a tile, `count` of which exist, times P or dS. Called by all threads of the block. With WGMMA,
  // sums are complete after WaitForSums().
  template <class Sums, class Tile, class RowOf>
  HEED_DEVICE void Add(bool full, Products& weights, const Tile& tile, int count, int channels, const RowOf& row,
                       RowPowers<1>& powers, typename Sums::Sums& sums) const {
    if constexpr (kHasPowers) powers.Apply(m_, weights, sums);
    char* const marks = m_.shared() + Shape::kMarksAt;
    if constexpr (Shape::kUsesWgmma) {
      if (!full && tile.template FindNotFinite<kDType>(m_, marks)) {
        Sums::template TakeMarkedRows<kDType>(m_, weights, tile, count, channels, row, marks, sums);
        FenceAndSync();
      }
      AddWgmma(weights, tile, sums);
    } else if (full && heed::cuda::kSplitTermsOf<kDType> == 1) {
      Sums::template Add<kDType>(m_, weights, tile, sums, FirstChannel<Sums>());
    } else {
      Sums::template AddSeen<kDType>(m_, weights, tile, count, channels, row, marks, sums, FirstChannel<Sums>());
    }
  }
  template <class... Sums>
  HEED_DEVICE void WaitForSums(Sums&... sums) const {
    if constexpr (Shape::kUsesWgmma) m_.template WgmmaWait<0>(sums...);
  }

  // Stores this warp's 16 rows of sums. `count` rows of the block exist.
  template <class Sums, class RowOf>
  HEED_DEVICE void Store(const typename Sums::Sums& sums, const RowPowers<1>& powers, float factor, int count,
                         int channels, const RowOf& row_of) const {
    HEED_DEVICE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * warp_ + lane_ / 4 + 8 * half;
      if (row >= count) continue;
      Element* to = row_of(row);
      const float power = kHasPowers ? powers.FactorOf(0, half) : 1;
      HEED_DEVICE_UNROLL
      for (int e = 0; e < Sums::kChannelTiles; ++e) {
        const int channel = FirstChannel<Sums>() + 8 * e + lane_ % 4 * 2;
        const float* x = sums[0][e] + 2 * half;
        heed::cuda::StorePair<M, kDType>(to, channel, channels, factor * (power * x[0]), factor * (power * x[1]));
      }
    }
  }
  template <class Sums>
  HEED_DEVICE int FirstChannel() const {
    return 8 * n_warp_ * Sums::kChannelTiles;
  }

  M& m_;
  const BackwardParams& p_;
  const ForwardParams& f_;
  const DeviceSequence& s_;
  const DeviceGradients& g_;
  const int lane_, warp_, n_warp_;
  const PairLogits<M> of_pairs_;
  BlockMask<1> block_mask_;

 private:
  HEED_DEVICE Tiles TilesAt(int bytes) const {
    char* const at = m_.shared() + bytes;
    return {typename Shape::Rows(at), typename Shape::ValueRows(at + Shape::Rows::kBytes)};
  }
  template <int kChannels, class Tile>
  HEED_DEVICE void Wgmma(const Tile& a, const Tile& b, Products& products) const {
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kChannels; e += 16) {
      m_.template Wgmma<kDType, false>(a.KMajor(0, e), b.KMajor(0, e), products[0], e > 0);
    }
  }
  template <class Tile, class Sums>
  HEED_DEVICE void AddWgmma(const Products& weights, const Tile& tile, Sums& sums) const {
    uint32_t operands[kBackwardTile / 16][1][4];
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kTiles; j += 2) {
      heed::cuda::SplitResults<M, kDType, /*kFinite=*/true>(weights[0][j], weights[0][j + 1], operands[j / 2]);
    }
    m_.WgmmaFence(operands, sums);
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kBackwardTile; j += 16) {
      m_.template Wgmma<kDType, true>(operands[j / 16][0], tile.MnMajor(j), sums[0], true);
    }
    m_.WgmmaCommit();
  }
};

// Computes dk and dv of 64 keys of a key head.
template <class M, class Shape, bool kGeneral>
class KeyGradientsBlock : BackwardBlock<M, Shape, kGeneral> {
  using Base = BackwardBlock<M, Shape, kGeneral>;
  using Base::m_, Base::p_, Base::f_, Base::s_, Base::g_, Base::lane_, Base::kTiles;
  using Element = typename Shape::Element;
  using Of = typename Base::Of;
  using OfValues = typename Base::OfValues;

 public:
  HEED_DEVICE KeyGradientsBlock(M& m, const BackwardParams& p) : Base(m, p) {}

  HEED_DEVICE void Run() {
    first_ = int64_t{m_.block(0)} * kBackwardTile;  // keys beyond the sequence's length included: their gradients are 0
    if (first_ >= s_.num_keys) return;
    count_ = static_cast<int>(s_.num_keys - first_ < kBackwardTile ? s_.num_keys - first_ : kBackwardTile);
    const int key_head = m_.block(1);
    this->CopyKeys(this->OwnTiles(), first_, count_, key_head);
    RowTile next = {key_head * f_.group, 0};
    Find(next);
    if (Shape::kStages > 1) CopyRows(next, 0);
    for (int stage = 0; next.count > 0; stage = (stage + 1) % Shape::kStages) {
      const RowTile tile = next;
      if (Shape::kStages == 1) {
        m_.Sync();  // all threads have read the previous rows
        CopyRows(tile, stage);
      }
      this->Wait();
      typename Base::Products p, ds;  // keys by rows
      this->Multiply(stage, p, ds);
      SoftmaxGradient(tile, p, ds);
      next.first += kBackwardTile;
      Find(next);
      if (Shape::kStages > 1) CopyRows(next, 1 - stage);
      const typename Base::Tiles rows = this->TilesOf(stage);
      this->template Add<OfValues>(
          tile.full, p, rows.values, tile.count, f_.value_depth,
          [&](int i) { return this->OutputGradientAt(tile.first + i, tile.head); }, v_powers_, dv_);
      this->template Add<Of>(
          tile.full, ds, rows.rows, tile.count, f_.depth,
          [&](int i) { return this->QueryAt(tile.first + i, tile.head); }, k_powers_, dk_);
      this->WaitForSums(dv_, dk_);
    }
    this->Wait();
    if (p_.dk != nullptr) {
      this->template Store<Of>(dk_, k_powers_, f_.scale, count_, f_.depth, [&](int i) {
        return static_cast<Element*>(p_.dk) + g_.dk + (first_ + i) * p_.dk_strides.token +
               key_head * p_.dk_strides.head;
      });
    }
    if (p_.dv != nullptr) {
      this->template Store<OfValues>(dv_, v_powers_, 1, count_, f_.value_depth, [&](int i) {
        return static_cast<Element*>(p_.dv) + g_.dv + (first_ + i) * p_.dv_strides.token +
               key_head * p_.dv_strides.head;
      });
    }
  }

 private:
  struct RowTile {
    int head, first;
    int count = 0;      // rows; 0 after the last tile
    bool full = false;  // every row sees every key of the block
  };

  // Advances to the next tile of rows that see some of the block's keys.
  HEED_DEVICE void Find(RowTile& tile) {
    const Interval keys = {first_, first_ + kBackwardTile};
    for (; tile.head < (m_.block(1) + 1) * f_.group; ++tile.head, tile.first = 0) {
      for (; tile.first < s_.num_queries; tile.first += kBackwardTile) {
        tile.count = s_.num_queries - tile.first < kBackwardTile ? s_.num_queries - tile.first : kBackwardTile;
        const BlockKeys seen = KeysOf(f_, s_, tile.first, tile.first + tile.count - 1);
        if (seen.Skips(keys) || !this->Keeps(tile.head, tile.first, keys)) continue;
        tile.full = this->IsFull(seen, keys, tile.count);
        return;
      }
    }
    tile.count = 0;
  }
  HEED_DEVICE void CopyRows(const RowTile& tile, int stage) const {
    if (tile.count > 0) Base::CopyRows(this->TilesOf(stage), tile.first, tile.count, tile.head);
  }
  HEED_DEVICE void SoftmaxGradient(const RowTile& tile, typename Base::Products& p, typename Base::Products& ds) const {
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * j + lane_ % 4 * 2 + i;
        const Row at = {tile.first + row, tile.head};
        const RowState state = this->StateOf(at, row < tile.count, tile.full);
        HEED_DEVICE_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int64_t key = first_ + 16 * this->warp_ + lane_ / 4 + 8 * half;
          Base::SoftmaxGradient(at, state, key, tile.full, p[0][j][2 * half + i], ds[0][j][2 * half + i]);
        }
      }
    }
  }

  int64_t first_ = 0;
  int count_ = 0;
  RowPowers<1> k_powers_, v_powers_;
  typename Of::Sums dk_ = {};
  typename OfValues::Sums dv_ = {};
};

// Computes dq of 64 rows of a query head, and their terms of the slope's gradient.
template <class M, class Shape, bool kGeneral>
class QueryGradientsBlock : BackwardBlock<M, Shape, kGeneral> {
  using Base = BackwardBlock<M, Shape, kGeneral>;
  using Base::m_, Base::p_, Base::f_, Base::s_, Base::g_, Base::lane_, Base::of_pairs_;
  using Element = typename Shape::Element;
  using Of = typename Base::Of;

 public:
  HEED_DEVICE QueryGradientsBlock(M& m, const BackwardParams& p) : Base(m, p) {}

  HEED_DEVICE void Run() {
    const int blocks = (s_.num_queries + kBackwardTile - 1) / kBackwardTile;
    if (m_.block(0) >= blocks) return;
    first_ = (blocks - 1 - m_.block(0)) * kBackwardTile;  // longest rows first
    count_ = s_.num_queries - first_ < kBackwardTile ? s_.num_queries - first_ : kBackwardTile;
    const int head = m_.block(1), key_head = head / f_.group;
    this->CopyRows(this->OwnTiles(), first_, count_, head);
    seen_ = KeysOf(f_, s_, first_, first_ + count_ - 1);
    KeyTile next = {s_.key_begin + (seen_.begin - s_.key_begin) / kBackwardTile * kBackwardTile};
    if constexpr (kGeneral) {
      this->block_mask_.Choose(head, first_, first_);
      this->block_mask_.SkipTo(next.first);
    }
    Find(next);
    if (Shape::kStages > 1) CopyKeys(next, 0);
    for (int stage = 0; next.count > 0; stage = (stage + 1) % Shape::kStages) {
      const KeyTile tile = next;
      if (Shape::kStages == 1) {
        m_.Sync();  // all threads have read the previous keys
        CopyKeys(tile, stage);
      }
      this->Wait();
      typename Base::Products p, ds;  // rows by keys
      this->Multiply(stage, p, ds);
      this->SoftmaxGradientRows(first_, count_, head, tile.first, tile.full, p, ds,
                                [&](int half, int, int, const Row& at, int64_t key, float of_pair) {
                                  if constexpr (kGeneral) {
                                    if (p_.slope_terms != nullptr)
                                      slope_terms_[half] -= of_pair * of_pairs_.DistanceOf(at, key);
                                  }
                                });
      next.first += kBackwardTile;
      Find(next);
      if (Shape::kStages > 1) CopyKeys(next, 1 - stage);
      this->template Add<Of>(
          tile.full, ds, this->TilesOf(stage).rows, tile.count, f_.depth,
          [&](int i) { return this->KeyAt(tile.first + i, key_head); }, powers_, dq_);
      this->WaitForSums(dq_);
    }
    this->Wait();
    if (p_.dq != nullptr) {
      this->template Store<Of>(dq_, powers_, f_.scale, count_, f_.depth, [&](int i) {
        return static_cast<Element*>(p_.dq) + g_.dq + (first_ + i) * p_.dq_strides.token + head * p_.dq_strides.head;
      });
    }
    if constexpr (kGeneral) StoreSlopeTerms(head);
  }

 private:
  struct KeyTile {
    int64_t first;
    int count = 0;  // keys; 0 after the last tile
    bool full = false;
  };

  // Advances to the next tile of keys that some row sees.
  HEED_DEVICE void Find(KeyTile& tile) {
    tile.count = 0;
    for (; tile.first < seen_.end; tile.first += kBackwardTile) {
      if constexpr (kGeneral) {
        tile.first = this->block_mask_.From(tile.first);
        if (tile.first >= seen_.end) return;
        this->block_mask_.Begin(tile.first);
      }
      const Interval keys = {tile.first, tile.first + kBackwardTile};
      if (seen_.Skips(keys)) continue;
      tile.count = static_cast<int>(s_.key_end < keys.end ? s_.key_end - keys.begin : kBackwardTile);
      tile.full = this->IsFull(seen_, keys, count_);
      return;
    }
  }
  HEED_DEVICE void CopyKeys(const KeyTile& tile, int stage) const {
    if (tile.count > 0) Base::CopyKeys(this->TilesOf(stage), tile.first, tile.count, m_.block(1) / f_.group);
  }

  HEED_DEVICE void StoreSlopeTerms(int head) {
    if (p_.slope_terms == nullptr) return;
    HEED_DEVICE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float sum = slope_terms_[half];
      sum += m_.ShuffleXor(sum, 1);
      sum += m_.ShuffleXor(sum, 2);
      const int row = 16 * this->warp_ + lane_ / 4 + 8 * half;
      if (row < count_ && lane_ % 4 == 0 && this->n_warp_ == 0) p_.slope_terms[p_.TermAt(g_, first_ + row, head)] = sum;
    }
  }

  int first_ = 0, count_ = 0;
  BlockKeys seen_;
  RowPowers<1> powers_;
  typename Of::Sums dq_ = {};
  float slope_terms_[2] = {};
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_BLOCKS_H_

// Attention forward on a GPU: one block of query rows of one head, with mma.sync m16n8k16 on 16-bit operands or on
// bf16 splits of f32.
//
// Four or eight warps own 16 or 32 rows each and sweep tiles of 64 keys, counted from the first valid key. The next
// tile's keys are loaded during P V of the current tile, its values during Q K^T. Logits and outputs stay in registers;
// P becomes an operand of P V in place. A row's bits depend on its own query and keys, never on its block's other rows.
//
// Each segment of 512 keys has a softmax state of its own, merged with that of the keys before (row_states.h). Where
// rows are few, segments are blocks of their own (split-KV), whose states CombineBlock merges.
//
// On Hopper eight warps are two warpgroups: WGMMA overlaps the softmax of a tile with P V of the tile before.
//
// Four warps share a block of 16 rows: each computes the logits of a quarter of a tile's keys and the outputs of a
// quarter of the channels. Every sum is that of the other blocks.
//
// Masks are intervals of keys per row: tiles outside those of all rows are skipped, tiles inside all of them are not
// masked, unless a mask or a bias differs by pair. Masked tiles take values that are not finite out of the product, as
// 0 NaN is NaN, and add them for the rows that see them; -0 is the probability of a masked pair.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_FORWARD_BLOCK_H_
#define HEED_ENGINES_SOFTMAX_CUDA_FORWARD_BLOCK_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/elements.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/softmax/cuda/block_shape.h"
#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/cuda/key_tiles.h"
#include "heed/engines/softmax/cuda/pair_logits.h"
#include "heed/engines/softmax/cuda/row_products.h"
#include "heed/engines/softmax/cuda/row_states.h"
#include "heed/engines/softmax/cuda/weighted_sums.h"
#include "heed/engines/softmax/key_runs.h"

namespace heed::softmax::cuda {

// `kGeneral`: logits are more than scale > 0 times a product, or there is dropout; other kernels have registers to
// spare. Small-M and f32 kernels are all general and test at run time.
template <class M, class Shape, bool kGeneral>
class ForwardBlock {
  using Element = typename Shape::Element;
  static constexpr DType kDType = Shape::kDType;
  static constexpr int kDepth = Shape::kChannels, kValueDepth = Shape::kValueChannels;
  static constexpr int kMFragments = Shape::kMFragments, kRows = Shape::kRows, kNWarps = Shape::kNWarps,
                       kStages = Shape::kStages;
  static constexpr bool kIsSmallM = Shape::kIsSmallM, kAsks = kIsSmallM || kDType == DType::kF32;
  static constexpr float kProbabilityPower = ProbabilityPower(kDType);
  static constexpr int kKeyTiles = kTileKeys / 8, kChannelTiles = kValueDepth / 8 / kNWarps;  // of 8 columns
  static constexpr int kOwnKeyTiles = kKeyTiles / kNWarps;  // of which a warp computes the logits
  using OwnLogits = RowProducts<kDType, kMFragments, kOwnKeyTiles>;
  using Sums = WarpSums<kMFragments, kKeyTiles, kChannelTiles>;

 public:
  HEED_DEVICE ForwardBlock(M& m, const ForwardParams& p)
      : m_(m), p_(p), s_(p.sequences[m.block(2)]), lane_(m.thread() % heed::cuda::kWarp),
        warp_(m.thread() / heed::cuda::kWarp / kNWarps), n_warp_(m.thread() / heed::cuda::kWarp % kNWarps),
        queries_(m.shared()), general_(kGeneral && (!kAsks || IsGeneral(p))), unit_(general_ ? 1 : p.scale),
        of_pairs_(p, s_), tiles_(m, p, s_, p.fused ? m.block(1) : m.block(1) / p.group) {}

  HEED_DEVICE void Run() {
    const int rows = p_.fused ? s_.num_queries * p_.group : s_.num_queries;
    const int blocks = (rows - 1) / kRows + (rows > 0), block = m_.block(0) % p_.row_blocks;
    segment_ = m_.block(0) / p_.row_blocks;
    segments_ = p_.split_states != nullptr ? SegmentsOf(s_) : 1;
    if (block >= blocks || (segment_ > 0 && segment_ >= segments_)) return;
    first_row_ = (blocks - 1 - block) * kRows;  // longest rows first
    num_rows_ = rows - first_row_ < kRows ? rows - first_row_ : kRows;
    const bool is_split = segments_ > 1;
    tiles_.Choose(
        p_.fused ? KeysOf(p_, s_, 0, s_.num_queries - 1) : KeysOf(p_, s_, first_row_, first_row_ + num_rows_ - 1),
        segment_, is_split);
    if (is_split && tiles_.first() >= tiles_.end()) return;  // no row sees it, and CombineBlock does not read it
    if (general_) {
      const Row first = RowAt(0), last = RowAt(num_rows_ - 1);
      tiles_.Keep(first.head, p_.fused ? 0 : first.query, p_.fused ? s_.num_queries - 1 : last.query);
    }
    CopyQueries();
    next_keys_ = next_values_ = tiles_.first();
    BeginState();
    ClearOutputs();
    if constexpr (Shape::kUsesWgmma) {
      SweepWgmma();
    } else {
      Sweep();
    }
    m_.template WaitCopies<0>();
    is_split ? StoreSplit() : Finish();
  }

 private:
  HEED_DEVICE void Sweep() {
    for (int stage = 0; stage < kStages; ++stage) {
      CopyNextKeys(stage);
      if (stage + 1 < kStages) CopyNextValues(stage);
    }
    int64_t tile = tiles_.first();
    int stage = 0;
    for (bool is_first = true; tile < tiles_.end(); is_first = false) {
      if constexpr (!kIsSmallM) {
        if (!is_first) SaveState();
      }
      const int64_t segment_end = SegmentEnd(tile);
      for (; tile < tiles_.end() && tile < segment_end; tile = tiles_.From(tile + kTileKeys)) {
        ProcessTile(tile, stage);
        stage = (stage + 1) % kStages;
      }
      EndState();
      AddUpSums();
      if constexpr (!kIsSmallM) {
        if (!is_first) MergeState();
      }
    }
  }
  HEED_DEVICE void ProcessTile(int64_t tile, int stage) {
    // Keys and values of the other stages' tiles may still be in flight.
    m_.template WaitCopies<2 * (kStages - 1)>();
    m_.Sync();
    CopyNextValues((stage + kStages - 1) % kStages);
    Logits(stage);
    const bool full = BeginTile(tile);
    if constexpr (!kIsSmallM) Softmax(full, tile);
    m_.template WaitCopies<2 * (kStages - 1)>();
    m_.Sync();
    CopyNextKeys(stage);
    if constexpr (kIsSmallM) {
      TakeLogits();
      Softmax(full, tile);
    }
    Rescale();
    // O += P V.
    const typename Shape::Values values = ValueTile(stage);
    if (full && heed::cuda::kSplitTermsOf<kDType> == 1) {
      Sums::template Add<kDType>(m_, logits_, values, outputs_, FirstChannel());
    } else {
      Sums::template AddSeen<kDType>(
          m_, logits_, values, tiles_.CountOf(tile), p_.value_depth,
          [&](int key) { return tiles_.ValueAt(tile + key); }, Marks(), outputs_, FirstChannel());
    }
  }

  // Warpgroups: the softmax of the next tile overlaps P V of this one.
  HEED_DEVICE void SweepWgmma() {
    int64_t tile = tiles_.first();
    if (tile >= tiles_.end()) return;
    if (p_.uses_tma) {
      if (m_.thread() == 0) m_.MbarrierInit(Mbarrier());
      m_.Sync();
    }
    CopyNext(0, /*values=*/false);
    WaitForCopies();
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kDepth; e += 16) queries_.LoadRows(m_, FirstRow(0), e, rows_[e / 16]);
    CopyNext(1, /*values=*/true);
    m_.WgmmaFence(rows_, logits_);
    MultiplyKeys(0);
    m_.template WgmmaWait<0>(logits_);
    bool full = BeginTile(tile), is_first = true;
    Softmax(full, tile);
    int64_t segment_end = SegmentEnd(tile);
    int stage = 0;
    for (int64_t next; (next = tiles_.From(tile + kTileKeys)) < tiles_.end(); tile = next, stage = 1 - stage) {
      BeginValues(tile, stage, full);
      m_.WgmmaFence(rows_, p_operands_, logits_, outputs_);
      MultiplyKeys(1 - stage);
      MultiplyValues(stage);
      const bool ends_segment = next >= segment_end;
      if (ends_segment) EndState();
      m_.template WgmmaWait<1>(logits_);
      full = BeginTile(next);
      Softmax(full, next);
      m_.template WgmmaWait<0>(outputs_);
      if (ends_segment) {
        AddUpSums();
        if (!is_first) MergeState();
        SaveState();
        is_first = false;
        segment_end = SegmentEnd(next);
      } else {
        Rescale();
      }
    }
    BeginValues(tile, stage, full);
    m_.WgmmaFence(p_operands_, outputs_);
    MultiplyValues(stage);
    m_.template WgmmaWait<0>(outputs_);
    EndState();
    AddUpSums();
    if (!is_first) MergeState();
  }
  // Turns P of a tile into operands, once its values and the next tile's keys have landed.
  HEED_DEVICE void BeginValues(int64_t tile, int stage, bool full) {
    WaitForCopies();
    CopyNext(stage, /*values=*/true);
    const typename Shape::Values values = ValueTile(stage);
    if (!full && values.template FindNotFinite<kDType>(m_, Marks())) {  // the product leaves these out
      Sums::template TakeMarkedRows<kDType>(
          m_, logits_, values, tiles_.CountOf(tile), p_.value_depth,
          [&](int key) { return tiles_.ValueAt(tile + key); }, Marks(), outputs_);
      FenceAndSync();
    }
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; j += 2) {
      heed::cuda::SplitResults<M, kDType, /*kFinite=*/true>(logits_[0][j], logits_[0][j + 1], p_operands_[j / 2]);
    }
  }
  // Waits until all copies have landed, visible to WGMMA, and until all threads have read the stage to fill next.
  HEED_DEVICE void WaitForCopies() {
    if (p_.uses_tma) {
      m_.MbarrierWait(Mbarrier(), phase_);
      phase_ = 1 - phase_;
    }
    m_.template WaitCopies<0>();
    FenceAndSync();
  }
  HEED_DEVICE void FenceAndSync() {
    m_.FenceProxyAsync();
    m_.Sync();
  }
  // Loads the next tile's keys to a stage, and the next tile's values to the other stage.
  HEED_DEVICE void CopyNext(int stage, bool values) {
    if (!p_.uses_tma) {
      CopyNextKeys(stage);
      if (values) CopyNextValues(1 - stage);
      return;
    }
    m_.CommitCopies();  // of the queries
    if (m_.thread() == 0) {
      tiles_.TmaLoad(next_keys_, KeyTile(stage), values ? next_values_ : tiles_.end(), ValueTile(1 - stage),
                     Mbarrier());
    }
    next_keys_ = tiles_.From(next_keys_ + kTileKeys);
    if (values) next_values_ = tiles_.From(next_values_ + kTileKeys);
  }
  HEED_DEVICE uint64_t* Mbarrier() const { return reinterpret_cast<uint64_t*>(m_.shared() + Shape::kMbarrierAt); }
  // S = Q K^T as one WGMMA group.
  HEED_DEVICE void MultiplyKeys(int stage) {
    const typename Shape::Keys keys = KeyTile(stage);
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kDepth; e += 16) {
      m_.template Wgmma<kDType, false>(rows_[e / 16], keys.KMajor(0, e), logits_[0], e > 0);
    }
    m_.WgmmaCommit();
  }
  // O += P V as one WGMMA group.
  HEED_DEVICE void MultiplyValues(int stage) {
    const typename Shape::Values values = ValueTile(stage);
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kTileKeys; j += 16) {
      m_.template Wgmma<kDType, true>(p_operands_[j / 16][0], values.MnMajor(j), outputs_[0], true);
    }
    m_.WgmmaCommit();
  }

  HEED_DEVICE int64_t SegmentEnd(int64_t tile) const {
    return tile + kSegmentKeys - (tile - s_.key_begin) % kSegmentKeys;
  }
  // Selects the tile of the next softmax; true if every row sees all of its keys.
  HEED_DEVICE bool BeginTile(int64_t tile) {
    const bool full = tiles_.IsCommon(tile);
    if (!general_) return full;
    tiles_.block_mask().Begin(tile);
    return full && !of_pairs_.ByPair() && tiles_.block_mask().KeepsAll();
  }

  // The query and head of row `row` of the block.
  HEED_DEVICE Row RowAt(int row) const {
    const int at = first_row_ + row, y = m_.block(1);
    if (!p_.fused) return {at, y};
    return {at % s_.num_queries, y * p_.group + at / s_.num_queries};
  }

  HEED_DEVICE void CopyQueries() {
    queries_.Copy(m_, p_.aligned, p_.depth, num_rows_, [&](int row) {
      const Row at = RowAt(row);
      return static_cast<const Element*>(p_.q) + s_.q + at.query * p_.q_strides.token + at.head * p_.q_strides.head;
    });
  }
  HEED_DEVICE typename Shape::Keys KeyTile(int stage) const {
    return typename Shape::Keys(m_.shared() + Shape::kKeysAt + stage * Shape::Keys::kBytes);
  }
  HEED_DEVICE typename Shape::Values ValueTile(int stage) const {
    return typename Shape::Values(m_.shared() + Shape::kValuesAt + stage * Shape::Values::kBytes);
  }
  // Each commits a group of copies, even an empty one.
  HEED_DEVICE void CopyNextKeys(int stage) {
    tiles_.CopyKeys(next_keys_, KeyTile(stage));
    m_.CommitCopies();
    next_keys_ = tiles_.From(next_keys_ + kTileKeys);
  }
  HEED_DEVICE void CopyNextValues(int stage) {
    tiles_.CopyValues(next_values_, ValueTile(stage));
    m_.CommitCopies();
    next_values_ = tiles_.From(next_values_ + kTileKeys);
  }
  HEED_DEVICE char* Marks() const { return m_.shared() + Shape::kMarksAt; }

  // S = Q K^T for the warp's keys; small-M warps share their logits in shared memory.
  HEED_DEVICE void Logits(int stage) {
    const auto multiply = [&](typename OwnLogits::Products& logits) {
      OwnLogits::template Multiply<kDepth>(m_, queries_, FirstRow(0), KeyTile(stage), 8 * n_warp_ * kOwnKeyTiles,
                                           logits);
    };
    if constexpr (kIsSmallM) {
      typename OwnLogits::Products own;
      multiply(own);
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kOwnKeyTiles; ++j) {
        HEED_DEVICE_UNROLL
        for (int half = 0; half < 2; ++half) {
          *SharedLogits(half, n_warp_ * kOwnKeyTiles + j) = {own[0][j][2 * half], own[0][j][2 * half + 1]};
        }
      }
    } else {
      multiply(logits_);
    }
  }
  // Loads the logits of all warps, after a barrier.
  HEED_DEVICE void TakeLogits() {
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const FloatPair pair = *SharedLogits(half, j);
        logits_[0][j][2 * half] = pair.low;
        logits_[0][j][2 * half + 1] = pair.high;
      }
    }
  }
  struct alignas(8) FloatPair {
    float low, high;
  };
  HEED_DEVICE FloatPair* SharedLogits(int half, int j) const {
    float* logits = reinterpret_cast<float*>(m_.shared() + Shape::kLogitsAt);
    return reinterpret_cast<FloatPair*>(logits + RowOf(0, half) * Shape::kLogitsPitch + KeyOf(j, 0));
  }

  // P = exp(S - max) in place of S, the rows' sums, and the rescaling of outputs. `full`: every row sees the whole
  // tile.
  HEED_DEVICE void Softmax(bool full, int64_t tile) {
    if (general_) ScaleLogits(tile);
    if (full) {
      Softmax<true>(tile);
    } else {
      Softmax<false>(tile);
    }
    if (general_ && p_.dropout > 0) ApplyDropout(tile);
  }
  // Calls f(fragment, half, row of the sequence) for the thread's rows, existing or not.
  template <class F>
  HEED_DEVICE void ForAllRows(const F& f) {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = RowOf(fragment, half);
        f(fragment, half, RowAt(row < num_rows_ ? row : 0));
      }
    }
  }
  HEED_DEVICE void ScaleLogits(int64_t tile) {
    ForAllRows([&](int fragment, int half, const Row& at) {
      const float slope = of_pairs_.SlopeOf(at);
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kKeyTiles; ++j) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& x = logits_[fragment][j][2 * half + i];
          x = of_pairs_.OfProduct(x, at, tile + KeyOf(j, i), slope);
        }
      }
    });
  }
  template <bool kFull>
  HEED_DEVICE void Softmax(int64_t tile) {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) SoftmaxRow<kFull>(fragment, half, tile);
    }
  }
  template <bool kFull>
  HEED_DEVICE void SoftmaxRow(int fragment, int half, int64_t tile) {
    float max = max_[fragment][half];
    const int row = RowOf(fragment, half);
    const Row at = RowAt(row < num_rows_ ? row : 0);
    const KeyRuns runs = kFull || row >= num_rows_ ? KeyRuns() : KeyRunsOf(p_, s_, at.query);
    const uint64_t mask_word = kFull || !general_ ? ~uint64_t{0} : tiles_.block_mask().WordOf(at.query);
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float& x = logits_[fragment][j][2 * half + i];
        const int64_t key = tile + KeyOf(j, i);
        if (!kFull && !(Sees(runs, key) && (mask_word >> KeyOf(j, i) & 1) != 0)) x = -INFINITY;
        if (!kFull && general_) x = x == -INFINITY ? x : of_pairs_.WithPair(x, at, key);
        max = fmaxf(max, x);
      }
    }
    max = fmaxf(max, m_.ShuffleXor(max, 1));
    max = fmaxf(max, m_.ShuffleXor(max, 2));
    // Subtracts before scaling: differences are exact where it matters, and 0 if the maximum stays.
    const float factor = unit_ * kLog2E, shift = max == -INFINITY ? 0 : max;
    const float rescale = M::Exp2((max_[fragment][half] - shift) * factor);
    rescale_[fragment][half] = rescale;
    max_[fragment][half] = max;
    float sum = 0;
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float& x = logits_[fragment][j][2 * half + i];
        const bool masked = !kFull && x == -INFINITY;
        x = masked ? -0.0f : M::Exp2(fmaf(x - shift, factor, kProbabilityPower));
        sum += x;
      }
    }
    sum_[fragment][half] = fmaf(sum_[fragment][half], rescale, sum);
  }
  HEED_DEVICE void Rescale() {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float rescale = rescale_[fragment][half];
        if (!m_.Any(rescale != 1)) continue;  // usual after the first few tiles
        HEED_DEVICE_UNROLL
        for (int e = 0; e < kChannelTiles; ++e) {
          HEED_DEVICE_UNROLL
          for (int i = 0; i < 2; ++i) outputs_[fragment][e][2 * half + i] *= rescale;
        }
      }
    }
  }

  // Sets P of dropped pairs to 0; masked pairs keep -0.
  HEED_DEVICE void ApplyDropout(int64_t tile) {
    ForAllRows([&](int fragment, int half, const Row& at) {
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kKeyTiles; ++j) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& p = logits_[fragment][j][2 * half + i];
          if (p > 0 && !of_pairs_.Keeps(at, tile + KeyOf(j, i))) p = 0;
        }
      }
    });
  }

  HEED_DEVICE void BeginState() {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      max_[fragment][0] = max_[fragment][1] = -INFINITY;
      sum_[fragment][0] = sum_[fragment][1] = 0;
      ended_[fragment][0] = ended_[fragment][1] = {-INFINITY, 0};
    }
  }
  HEED_DEVICE void ClearOutputs() {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      HEED_DEVICE_UNROLL
      for (int e = 0; e < kChannelTiles; ++e) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 4; ++i) outputs_[fragment][e][i] = 0;
      }
    }
  }
  // Ends a segment: its state moves to ended_, and a new state begins.
  HEED_DEVICE void EndState() {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        ended_[fragment][half] = {max_[fragment][half], sum_[fragment][half]};
        max_[fragment][half] = -INFINITY;
        sum_[fragment][half] = 0;
      }
    }
  }
  // Adds up each row's sum over its four threads.
  HEED_DEVICE void AddUpSums() {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float& sum = ended_[fragment][half].sum;
        sum += m_.ShuffleXor(sum, 1);
        sum += m_.ShuffleXor(sum, 2);
      }
    }
  }
  HEED_DEVICE void SaveState() {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      previous_state_[fragment][0] = ended_[fragment][0];
      previous_state_[fragment][1] = ended_[fragment][1];
      HEED_DEVICE_UNROLL
      for (int e = 0; e < kChannelTiles; ++e) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 4; ++i) previous_outputs_[fragment][e][i] = outputs_[fragment][e][i];
      }
    }
    ClearOutputs();
  }
  HEED_DEVICE void MergeState() {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const SoftmaxState before = previous_state_[fragment][half], since = ended_[fragment][half];
        const MergedStates<M> both(before, since, unit_);
        ended_[fragment][half] = {both.max(), both.Sum(before.sum, since.sum)};
        HEED_DEVICE_UNROLL
        for (int e = 0; e < kChannelTiles; ++e) {
          HEED_DEVICE_UNROLL
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            outputs_[fragment][e][i] = both.Sum(previous_outputs_[fragment][e][i], outputs_[fragment][e][i]);
          }
        }
      }
    }
  }

  // Calls f(fragment, half, row of the sequence) for the thread's existing rows.
  template <class F>
  HEED_DEVICE void ForRows(const F& f) const {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (const int row = RowOf(fragment, half); row < num_rows_) f(fragment, half, RowAt(row));
      }
    }
  }
  HEED_DEVICE bool IsFirstOfRow() const { return lane_ % 4 == 0 && n_warp_ == 0; }

  HEED_DEVICE void Finish() const {
    ForRows([&](int fragment, int half, const Row& at) {
      const RowEnd end = EndOf<M>(p_, kDType, ended_[fragment][half], unit_, at.head);
      Element* o = static_cast<Element*>(p_.o) + s_.o + at.query * p_.o_strides.token + at.head * p_.o_strides.head;
      HEED_DEVICE_UNROLL
      for (int e = 0; e < kChannelTiles; ++e) {
        const float* x = outputs_[fragment][e] + 2 * half;
        heed::cuda::StorePair<M, kDType>(o, ChannelOf(e), p_.value_depth, x[0] * end.factor, x[1] * end.factor);
      }
      if (p_.lse != nullptr && IsFirstOfRow()) {
        p_.lse[s_.lse + at.query * p_.lse_strides.token + at.head * p_.lse_strides.head] = end.lse;
      }
    });
  }
  HEED_DEVICE void StoreSplit() const {
    ForRows([&](int fragment, int half, const Row& at) {
      const int64_t row = static_cast<int64_t>(at.head) * s_.num_queries + at.query;
      const int64_t split = s_.splits + row * segments_ + segment_;
      float* outputs = p_.split_outputs + split * p_.split_channels;
      HEED_DEVICE_UNROLL
      for (int e = 0; e < kChannelTiles; ++e) {
        const float* x = outputs_[fragment][e] + 2 * half;
        if (ChannelOf(e) < p_.split_channels) *reinterpret_cast<FloatPair*>(outputs + ChannelOf(e)) = {x[0], x[1]};
      }
      if (IsFirstOfRow()) p_.split_states[split] = ended_[fragment][half];
    });
  }

  // Positions of the thread's elements.
  HEED_DEVICE int FirstRow(int fragment) const { return (warp_ * kMFragments + fragment) * 16; }
  HEED_DEVICE int RowOf(int fragment, int half) const { return FirstRow(fragment) + lane_ / 4 + 8 * half; }
  HEED_DEVICE int KeyOf(int j, int i) const { return 8 * j + lane_ % 4 * 2 + i; }
  HEED_DEVICE int FirstChannel() const { return 8 * n_warp_ * kChannelTiles; }               // the warp's first
  HEED_DEVICE int ChannelOf(int e) const { return FirstChannel() + 8 * e + lane_ % 4 * 2; }  // and the next

  M& m_;
  const ForwardParams& p_;
  const DeviceSequence& s_;
  const int lane_, warp_, n_warp_;  // warps that share rows have the same warp_
  const typename Shape::Queries queries_;
  const bool general_;
  const float unit_;  // scale of the logits
  const PairLogits<M> of_pairs_;
  KeyTiles<M, Shape, kGeneral> tiles_;
  int first_row_ = 0, num_rows_ = 0;
  int64_t segment_ = 0, segments_ = 1;  // this block's split, and the number of splits
  int64_t next_keys_ = 0, next_values_ = 0;
  int phase_ = 0;  // mbarrier phase
  typename Sums::Weights logits_;
  typename Sums::Sums outputs_;
  float max_[kMFragments][2], sum_[kMFragments][2], rescale_[kMFragments][2];
  SoftmaxState ended_[kMFragments][2];  // of a segment, or of all segments up to it
  // WGMMA operands: queries and P.
  uint32_t rows_[Shape::kUsesWgmma ? kDepth / 16 : 1][4], p_operands_[Shape::kUsesWgmma ? kTileKeys / 16 : 1][1][4];
  // State of the segments before.
  typename Sums::Sums previous_outputs_;
  SoftmaxState previous_state_[kMFragments][2];
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_FORWARD_BLOCK_H_

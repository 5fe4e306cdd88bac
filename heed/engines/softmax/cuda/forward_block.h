// Attention forward on a GPU: a block of rows of one head, in products of 16 x 8 x 16 elements of 16 bits, or of pieces of f32.
//
// Four or eight warps own 16 or 32 rows each and walk together over tiles of 64 keys, counted from the first valid key. Keys
// of the next tile are copied while the weights of this one are multiplied with its values, its values while logits are.
// Logits and outputs stand in registers; weights become the operand of the second product where they stand. A row's bits
// depend on its own query and keys alone: on tiles and segments of a grid, whichever rows share its block.
//
// Each segment of 512 keys begins a state of its own, which is added to that of the keys before (row_states.h). So segments
// may be blocks of their own, which leave their states to CombineBlock, where few rows would keep few multiprocessors busy.
//
// A block of few rows has 16 of them, which its four warps share: each multiplies them with its quarter of a tile's keys, all
// take the logits of all, and each its quarter of the channels of outputs. Every sum is that of the other blocks.
//
// Masks are intervals of keys per row: tiles outside those of all rows are not visited, tiles inside all of them not
// masked, unless a mask or a bias says something of each pair. Where a tile is masked, values that are not finite are taken
// out of the product, as 0 NaN is NaN, and added for the rows that see them; -0 is the weight of a pair that is masked.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_FORWARD_BLOCK_H_
#define HEED_ENGINES_SOFTMAX_CUDA_FORWARD_BLOCK_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/elements.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/cuda/kept_tiles.h"
#include "heed/engines/softmax/cuda/pair_logits.h"
#include "heed/engines/softmax/cuda/row_products.h"
#include "heed/engines/softmax/cuda/row_states.h"
#include "heed/engines/softmax/cuda/weighted_sums.h"
#include "heed/engines/softmax/key_runs.h"

namespace heed::softmax::cuda {

using heed::cuda::SharedTile;

inline constexpr int kTileKeys = 64;
inline constexpr int kFewRows = 16;  // of a block of few rows
static_assert(kSegmentKeys % kTileKeys == 0);

// What a block of a kernel for these channels has.
template <DType kOf, int kDepth, int kValueDepth, bool kFew = false>
struct ForwardShape {
  static constexpr DType kDType = kOf;
  using Element = heed::cuda::Element<kDType>;
  static constexpr int kChannels = kDepth, kValueChannels = kValueDepth;
  static constexpr int kRowBytes = kDepth * static_cast<int>(sizeof(Element));
  static constexpr bool kHasFewRows = kFew;
  // A strip is 16 rows. Two share what a warp loads of keys and values, which shared memory is the bound of otherwise, but
  // have to fit its registers.
  static constexpr int kStrips = !kFew && kValueDepth <= (kOf == DType::kF32 ? 64 : 128) ? 2 : 1;
  static constexpr int kWarps = kStrips == 2 || kRowBytes > 512 || kFew ? 4 : 8;
  static constexpr int kSharers = kFew ? kWarps : 1;  // of the same rows
  static constexpr int kThreads = kWarps * heed::cuda::kWarp;
  // Of a multiprocessor that registers are to suffice for, and of f32 those that memory does.
  static constexpr int kBlocks = !kFew ? 1 : kRowBytes <= 256 ? 3 : kRowBytes <= 512 ? 2 : 1;
  static constexpr int kRows = kFew ? cuda::kFewRows : kWarps * kStrips * 16;
  // Tiles under way at once: memory is what few rows wait for.
  static constexpr int kStages = kFew && kRowBytes <= 256 ? 2 : 1;
  static constexpr int kLogitsPitch = kTileKeys + 8;  // of rows of logits that warps share, in different banks
  using Queries = SharedTile<kRows, kDepth, Element>;
  using Keys = SharedTile<kTileKeys, kDepth, Element>;
  using Values = SharedTile<kTileKeys, kValueDepth, Element>;
  // In shared memory, one behind the other.
  static constexpr int kKeysAt = Queries::kBytes, kValuesAt = kKeysAt + kStages * Keys::kBytes,
                       kLogitsAt = kValuesAt + kStages * Values::kBytes,
                       kMarksAt = kLogitsAt + (kFew ? kRows * kLogitsPitch * 4 : 0), kSharedBytes = kMarksAt + kTileKeys;
};

// `kGeneral`: logits have more to them than a scale above 0, or weights are dropped. Others have registers to spare. Blocks of
// few rows and of f32 ask the problem.
template <class M, class Shape, bool kGeneral>
class ForwardBlock {
  using Element = typename Shape::Element;
  static constexpr DType kDType = Shape::kDType;
  static constexpr int kDepth = Shape::kChannels, kValueDepth = Shape::kValueChannels;
  static constexpr int kStrips = Shape::kStrips, kRows = Shape::kRows, kSharers = Shape::kSharers, kStages = Shape::kStages;
  static constexpr bool kHasFewRows = Shape::kHasFewRows, kAsks = kHasFewRows || kDType == DType::kF32;
  static constexpr float kWeightPower = WeightPower(kDType);
  static constexpr int kKeyTiles = kTileKeys / 8, kChannelTiles = kValueDepth / 8 / kSharers;  // products' columns
  static constexpr int kOwnKeyTiles = kKeyTiles / kSharers;                                    // whose logits a warp computes
  using OwnLogits = RowProducts<kDType, kStrips, kOwnKeyTiles>;
  using Sums = WarpSums<kStrips, kKeyTiles, kChannelTiles>;

 public:
  HEED_DEVICE ForwardBlock(M& m, const ForwardParams& p)
      : m_(m), p_(p), s_(p.sequences[m.block(2)]), lane_(m.thread() % heed::cuda::kWarp),
        warp_(m.thread() / heed::cuda::kWarp / kSharers), sharer_(m.thread() / heed::cuda::kWarp % kSharers),
        queries_(m.shared()), general_(kGeneral && (!kAsks || IsGeneral(p))), unit_(general_ ? 1 : p.scale),
        of_pairs_(p, s_), kept_(p, s_), key_head_(p.fused ? m.block(1) : m.block(1) / p.group), k_(RowsOf(p.k, s_.k, p.k_strides)),
        v_(RowsOf(p.v, s_.v, p.v_strides)) {}

  HEED_DEVICE void Run() {
    const int rows = p_.fused ? s_.num_queries * p_.group : s_.num_queries;
    const int blocks = (rows - 1) / kRows + (rows > 0), block = m_.block(0) % p_.row_blocks;
    segment_ = m_.block(0) / p_.row_blocks;
    segments_ = p_.part_terms != nullptr ? SegmentsOf(s_) : 1;
    const bool leaves_parts = segments_ > 1;
    if (block >= blocks || (segment_ > 0 && segment_ >= segments_)) return;
    first_row_ = (blocks - 1 - block) * kRows;  // long rows first
    num_rows_ = rows - first_row_ < kRows ? rows - first_row_ : kRows;
    keys_seen_ = p_.fused ? KeysOf(p_, s_, 0, s_.num_queries - 1) : KeysOf(p_, s_, first_row_, first_row_ + num_rows_ - 1);
    end_ = keys_seen_.end;
    int64_t tile = s_.key_begin + (keys_seen_.begin - s_.key_begin) / kTileKeys * kTileKeys;
    if (leaves_parts) {
      const int64_t border = s_.key_begin + segment_ * kSegmentKeys;
      if (tile < border) tile = PastGap(border);
      if (end_ > border + kSegmentKeys) end_ = border + kSegmentKeys;
      if (tile >= end_) return;  // no row sees it, nor reads what it would leave
    }
    if (general_) {
      const Row first = RowAt(0), last = RowAt(num_rows_ - 1);
      kept_.Choose(first.head, p_.fused ? 0 : first.query, p_.fused ? s_.num_queries - 1 : last.query);
      kept_.SkipTo(tile);
      tile = FromTile(tile);
    }
    CopyQueries();
    next_keys_ = next_values_ = tile;
    for (int stage = 0; stage < kStages; ++stage) {
      CopyNextKeys(stage);
      if (stage + 1 < kStages) CopyNextValues(stage);
    }
    BeginSegment();
    int stage = 0;
    for (bool is_first = true; tile < end_; is_first = false) {
      if constexpr (!kHasFewRows) {
        if (!is_first) KeepState();
      }
      const int64_t border = tile + kSegmentKeys - (tile - s_.key_begin) % kSegmentKeys;
      for (; tile < end_ && tile < border; tile = FromTile(tile + kTileKeys)) {
        Visit(tile, stage);
        stage = (stage + 1) % kStages;
      }
      AddUpSums();
      if constexpr (!kHasFewRows) {
        if (!is_first) AddToState();
      }
    }
    m_.template WaitCopies<0>();
    leaves_parts ? LeaveParts() : Finish();
  }

 private:
  HEED_DEVICE void Visit(int64_t tile, int stage) {
    // Keys and values of as many later tiles as there are stages besides this one may still be on their way.
    m_.template WaitCopies<2 * (kStages - 1)>();
    m_.Sync();
    CopyNextValues((stage + kStages - 1) % kStages);
    Logits(stage);
    bool full = keys_seen_.common.Contains({tile, tile + kTileKeys});
    if (general_) {
      kept_.Begin(tile);
      full = full && !of_pairs_.ByPair() && kept_.KeepsAll();
    }
    if constexpr (!kHasFewRows) Weigh(full, tile);
    m_.template WaitCopies<2 * (kStages - 1)>();
    m_.Sync();
    CopyNextKeys(stage);
    if constexpr (kHasFewRows) {
      TakeLogits();
      Weigh(full, tile);
    }
    // O += P V.
    const typename Shape::Values values = ValueTile(stage);
    if (full && heed::cuda::kPiecesOf<kDType> == 1) {
      Sums::template Add<kDType>(m_, logits_, values, outputs_, FirstChannel());
    } else {
      Sums::template AddSeen<kDType>(m_, logits_, values, KeysFrom(tile), p_.value_depth,
                                     [&](int key) { return ValueAt(tile + key); }, m_.shared() + Shape::kMarksAt, outputs_,
                                     FirstChannel());
    }
  }

  // A tile, or the first behind it of which some row sees a key.
  HEED_DEVICE int64_t FromTile(int64_t tile) const {
    if (!general_) return PastGap(tile);
    for (int64_t next = tile;; tile = next) {
      next = kept_.From(PastGap(tile));
      if (next == tile) return tile;
    }
  }
  HEED_DEVICE int64_t PastGap(int64_t tile) const {
    const Interval& gap = keys_seen_.gap;
    return gap.Contains({tile, tile + kTileKeys}) ? tile + (gap.end - tile) / kTileKeys * kTileKeys : tile;
  }

  // Row `row` of the block.
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
  // Each is a group of copies, if there is nothing left to copy too.
  HEED_DEVICE void CopyNextKeys(int stage) {
    const int64_t tile = next_keys_;
    if (tile < end_) {
      CopyRows(KeyTile(stage), tile, p_.depth, k_, p_.k_strides, p_.k_in_page);
    }
    m_.CommitCopies();
    next_keys_ = FromTile(tile + kTileKeys);
  }
  HEED_DEVICE void CopyNextValues(int stage) {
    const int64_t tile = next_values_;
    if (tile < end_) {
      CopyRows(ValueTile(stage), tile, p_.value_depth, v_, p_.v_strides, p_.v_in_page);
    }
    m_.CommitCopies();
    next_values_ = FromTile(tile + kTileKeys);
  }
  // `rows`: those of the key head, from the sequence's first key on, unless they are in pages.
  template <class Tile>
  HEED_DEVICE void CopyRows(const Tile& to, int64_t tile, int channels, const Element* rows, const Strides& strides,
                            int64_t in_page) const {
    if (p_.page_tokens > 0) {
      to.Copy(m_, p_.aligned, channels, KeysFrom(tile), [&](int row) { return RowInPage(strides, in_page, tile + row); });
    } else {
      to.template CopyRows<Shape::kThreads>(m_, p_.aligned, channels, KeysFrom(tile), rows + tile * strides.token, strides.token);
    }
  }
  HEED_DEVICE const Element* RowsOf(const void* data, int64_t first, const Strides& strides) const {
    return static_cast<const Element*>(data) + first + key_head_ * strides.head;
  }
  HEED_DEVICE const Element* RowInPage(const Strides& strides, int64_t in_page, int64_t key) const {
    const auto index = static_cast<uint32_t>(key), tokens = static_cast<uint32_t>(p_.page_tokens), page = index / tokens;
    return reinterpret_cast<const Element*>(p_.pages[s_.pages + page] + in_page) + key_head_ * strides.head +
           (index - page * tokens) * strides.token;
  }
  HEED_DEVICE const Element* ValueAt(int64_t key) const {
    return p_.page_tokens > 0 ? RowInPage(p_.v_strides, p_.v_in_page, key) : v_ + key * p_.v_strides.token;
  }
  // Keys that exist in a tile.
  HEED_DEVICE int KeysFrom(int64_t tile) const {
    return static_cast<int>(s_.key_end - tile < kTileKeys ? s_.key_end - tile : kTileKeys);
  }

  // S = Q K^T, of the warp's keys, which other warps may have a use for too.
  HEED_DEVICE void Logits(int stage) {
    const auto multiply = [&](typename OwnLogits::Products& logits) {
      OwnLogits::template Multiply<kDepth>(m_, queries_, FirstRow(0), KeyTile(stage), 8 * sharer_ * kOwnKeyTiles, logits);
    };
    if constexpr (kHasFewRows) {
      typename OwnLogits::Products own;
      multiply(own);
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kOwnKeyTiles; ++j) {
        HEED_DEVICE_UNROLL
        for (int half = 0; half < 2; ++half) {
          *SharedLogits(half, sharer_ * kOwnKeyTiles + j) = {own[0][j][2 * half], own[0][j][2 * half + 1]};
        }
      }
    } else {
      multiply(logits_);
    }
  }
  // Those of all warps, once all have met.
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

  // P = exp(S - max) in place of S; sums, and outputs rescaled where a maximum grows. `full`: every row sees all of the tile.
  HEED_DEVICE void Weigh(bool full, int64_t tile) {
    if (general_) ScaleLogits(tile);
    if (full) {
      Weigh<true>(tile);
    } else {
      Weigh<false>(tile);
    }
    if (general_ && p_.dropout > 0) Drop(tile);
  }
  // f(strip, half, row of the sequence) of the thread's rows, there or not.
  template <class F>
  HEED_DEVICE void ForAllRows(const F& f) {
    HEED_DEVICE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = RowOf(strip, half);
        f(strip, half, RowAt(row < num_rows_ ? row : 0));
      }
    }
  }
  HEED_DEVICE void ScaleLogits(int64_t tile) {
    ForAllRows([&](int strip, int half, const Row& at) {
      const float slope = of_pairs_.SlopeOf(at);
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kKeyTiles; ++j) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& x = logits_[strip][j][2 * half + i];
          x = of_pairs_.OfProduct(x, at, tile + KeyOf(j, i), slope);
        }
      }
    });
  }
  template <bool kFull>
  HEED_DEVICE void Weigh(int64_t tile) {
    HEED_DEVICE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) WeighRow<kFull>(strip, half, tile);
    }
  }
  template <bool kFull>
  HEED_DEVICE void WeighRow(int strip, int half, int64_t tile) {
    float max = max_[strip][half];
    const int row = RowOf(strip, half);
    const Row at = RowAt(row < num_rows_ ? row : 0);
    const KeyRuns runs = kFull || row >= num_rows_ ? KeyRuns() : KeyRunsOf(p_, s_, at.query);
    const uint64_t kept = kFull || !general_ ? ~uint64_t{0} : kept_.WordOf(at.query);
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float& x = logits_[strip][j][2 * half + i];
        const int64_t key = tile + KeyOf(j, i);
        if (!kFull && !(Sees(runs, key) && (kept >> KeyOf(j, i) & 1) != 0)) x = -INFINITY;
        if (!kFull && general_) x = x == -INFINITY ? x : of_pairs_.WithPair(x, at, key);
        max = fmaxf(max, x);
      }
    }
    max = fmaxf(max, m_.ShuffleXor(max, 1));
    max = fmaxf(max, m_.ShuffleXor(max, 2));
    // Differences are taken first: they are exact where it matters, and 0 where the maximum stays.
    const float factor = unit_ * kLog2E, shift = max == -INFINITY ? 0 : max;
    const float rescale = M::Exp2((max_[strip][half] - shift) * factor);
    max_[strip][half] = max;
    float sum = 0;
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float& x = logits_[strip][j][2 * half + i];
        const bool masked = !kFull && x == -INFINITY;
        x = masked ? -0.0f : M::Exp2(fmaf(x - shift, factor, kWeightPower));
        sum += x;
      }
    }
    sum_[strip][half] = fmaf(sum_[strip][half], rescale, sum);
    if (!m_.Any(rescale != 1)) return;  // as mostly, once a few tiles are behind
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kChannelTiles; ++e) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) outputs_[strip][e][2 * half + i] *= rescale;
    }
  }

  // Weights of dropped pairs become 0; those of masked ones keep their sign.
  HEED_DEVICE void Drop(int64_t tile) {
    ForAllRows([&](int strip, int half, const Row& at) {
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kKeyTiles; ++j) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& weight = logits_[strip][j][2 * half + i];
          if (weight > 0 && !of_pairs_.Keeps(at, tile + KeyOf(j, i))) weight = 0;
        }
      }
    });
  }

  // The state of a row: its sums are complete in each of its threads where a segment ends.
  HEED_DEVICE PartTerms TermsOf(int strip, int half) const { return {max_[strip][half], sum_[strip][half]}; }
  HEED_DEVICE void BeginSegment() {
    HEED_DEVICE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      max_[strip][0] = max_[strip][1] = -INFINITY;
      sum_[strip][0] = sum_[strip][1] = 0;
      HEED_DEVICE_UNROLL
      for (int e = 0; e < kChannelTiles; ++e) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 4; ++i) outputs_[strip][e][i] = 0;
      }
    }
  }
  HEED_DEVICE void AddUpSums() {
    HEED_DEVICE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float& sum = sum_[strip][half];
        sum += m_.ShuffleXor(sum, 1);
        sum += m_.ShuffleXor(sum, 2);
      }
    }
  }
  HEED_DEVICE void KeepState() {
    HEED_DEVICE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      kept_terms_[strip][0] = TermsOf(strip, 0);
      kept_terms_[strip][1] = TermsOf(strip, 1);
      HEED_DEVICE_UNROLL
      for (int e = 0; e < kChannelTiles; ++e) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 4; ++i) kept_outputs_[strip][e][i] = outputs_[strip][e][i];
      }
    }
    BeginSegment();
  }
  HEED_DEVICE void AddToState() {
    HEED_DEVICE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const PartTerms before = kept_terms_[strip][half], since = TermsOf(strip, half);
        const MergedStates<M> both(before, since, unit_);
        max_[strip][half] = both.max();
        sum_[strip][half] = both.Sum(before.sum, since.sum);
        HEED_DEVICE_UNROLL
        for (int e = 0; e < kChannelTiles; ++e) {
          HEED_DEVICE_UNROLL
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            outputs_[strip][e][i] = both.Sum(kept_outputs_[strip][e][i], outputs_[strip][e][i]);
          }
        }
      }
    }
  }

  // f(strip, half, row of the sequence) of the thread's rows.
  template <class F>
  HEED_DEVICE void ForRows(const F& f) const {
    HEED_DEVICE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (const int row = RowOf(strip, half); row < num_rows_) f(strip, half, RowAt(row));
      }
    }
  }
  HEED_DEVICE bool IsFirstOfRow() const { return lane_ % 4 == 0 && sharer_ == 0; }

  HEED_DEVICE void Finish() const {
    ForRows([&](int strip, int half, const Row& at) {
      const RowEnd end = EndOf<M>(p_, kDType, TermsOf(strip, half), unit_, at.head);
      Element* o = static_cast<Element*>(p_.o) + s_.o + at.query * p_.o_strides.token + at.head * p_.o_strides.head;
      HEED_DEVICE_UNROLL
      for (int e = 0; e < kChannelTiles; ++e) {
        const float* x = outputs_[strip][e] + 2 * half;
        heed::cuda::StorePair<M, kDType>(o, ChannelOf(e), p_.value_depth, x[0] * end.factor, x[1] * end.factor);
      }
      if (p_.lse != nullptr && IsFirstOfRow()) {
        p_.lse[s_.lse + at.query * p_.lse_strides.token + at.head * p_.lse_strides.head] = end.lse;
      }
    });
  }
  HEED_DEVICE void LeaveParts() const {
    ForRows([&](int strip, int half, const Row& at) {
      const int64_t row = static_cast<int64_t>(at.head) * s_.num_queries + at.query;
      const int64_t part = s_.parts + row * segments_ + segment_;
      float* outputs = p_.part_outputs + part * p_.part_channels;
      HEED_DEVICE_UNROLL
      for (int e = 0; e < kChannelTiles; ++e) {
        const float* x = outputs_[strip][e] + 2 * half;
        if (ChannelOf(e) < p_.part_channels) *reinterpret_cast<FloatPair*>(outputs + ChannelOf(e)) = {x[0], x[1]};
      }
      if (IsFirstOfRow()) p_.part_terms[part] = TermsOf(strip, half);
    });
  }

  // Where the thread's elements are.
  HEED_DEVICE int FirstRow(int strip) const { return (warp_ * kStrips + strip) * 16; }
  HEED_DEVICE int RowOf(int strip, int half) const { return FirstRow(strip) + lane_ / 4 + 8 * half; }
  HEED_DEVICE int KeyOf(int j, int i) const { return 8 * j + lane_ % 4 * 2 + i; }
  HEED_DEVICE int FirstChannel() const { return 8 * sharer_ * kChannelTiles; }  // of the warp
  HEED_DEVICE int ChannelOf(int e) const { return FirstChannel() + 8 * e + lane_ % 4 * 2; }  // and the next

  M& m_;
  const ForwardParams& p_;
  const DeviceSequence& s_;
  const int lane_, warp_, sharer_;  // warps that share rows have the same number
  const typename Shape::Queries queries_;
  const bool general_;
  const float unit_;  // of logits
  const PairLogits<M> of_pairs_;
  KeptTiles<kHasFewRows ? 1 : 2> kept_;
  const int key_head_;
  const Element *const k_, *const v_;
  int first_row_ = 0, num_rows_ = 0;
  int64_t segment_ = 0, segments_ = 1;  // the block's, and how many the sequence's blocks have
  BlockKeys keys_seen_;
  int64_t end_ = 0, next_keys_ = 0, next_values_ = 0;
  typename Sums::Weights logits_;
  typename Sums::Sums outputs_;
  float max_[kStrips][2], sum_[kStrips][2];
  // Of the segments before.
  typename Sums::Sums kept_outputs_;
  PartTerms kept_terms_[kStrips][2];
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_FORWARD_BLOCK_H_

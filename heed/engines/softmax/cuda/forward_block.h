// Attention forward on a GPU: a block of rows of one head, in products of 16 x 8 x 16 elements of 16 bits.
//
// Four or eight warps own 16 or 32 rows each and walk together over tiles of 64 keys, counted from the first valid key. Keys of the
// next tile are copied while the weights of this one are multiplied with its values, its values while logits are. Logits
// and outputs stand in registers; weights become the operand of the second product where they stand. A row's bits depend
// on its own query and keys alone: on tiles of a grid, whichever rows share its block.
//
// Masks are intervals of keys per row: tiles outside those of all rows are not visited, tiles inside all of them not
// masked, unless a mask or a bias says something of each pair. Where a tile is masked, values that are not finite are taken
// out of the product, as 0 NaN is NaN, and added for the rows that see them; -0 is the weight of a pair that is masked.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_FORWARD_BLOCK_H_
#define HEED_ENGINES_SOFTMAX_CUDA_FORWARD_BLOCK_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/cuda/pair_logits.h"
#include "heed/engines/softmax/cuda/weighted_sums.h"
#include "heed/engines/softmax/key_runs.h"

namespace heed::softmax::cuda {

using heed::cuda::SharedTile;

inline constexpr int kTileKeys = 64;
inline constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// What a block of a kernel for these channels has.
template <int kDepth, int kValueDepth>
struct ForwardShape {
  static constexpr int kChannels = kDepth, kValueChannels = kValueDepth;
  // A strip is 16 rows. Two share what a warp loads of keys and values, but have to fit its registers.
  static constexpr int kStrips = kValueDepth <= 64 ? 2 : 1;
  static constexpr int kWarps = kDepth <= 64 ? 4 : 8;
  static constexpr int kThreads = kWarps * heed::cuda::kWarp;
  static constexpr int kRows = kWarps * kStrips * 16;
  using Queries = SharedTile<kRows, kDepth>;
  using Keys = SharedTile<kTileKeys, kDepth>;
  using Values = SharedTile<kTileKeys, kValueDepth>;
  static constexpr int kSharedBytes = Queries::kBytes + Keys::kBytes + Values::kBytes + kTileKeys;
};

// `kGeneral`: logits have more to them than a scale above 0, or weights are dropped. Others have registers to spare.
template <class M, DType kDType, int kDepth, int kValueDepth, bool kGeneral>
class ForwardBlock {
  using Shape = ForwardShape<kDepth, kValueDepth>;
  static constexpr int kStrips = Shape::kStrips, kRows = Shape::kRows;
  // Weights are multiplied by 2 to this power, lest small ones of f16 lose bits.
  static constexpr float kWeightPower = kDType == DType::kF16 ? 10 : 0;
  static constexpr int kKeyTiles = kTileKeys / 8, kChannelTiles = kValueDepth / 8;  // products' columns
  using Sums = WarpSums<kStrips, kKeyTiles, kChannelTiles>;

 public:
  HEED_DEVICE ForwardBlock(M& m, const ForwardParams& p)
      : m_(m), p_(p), s_(p.sequences[m.block(2)]), lane_(m.thread() % heed::cuda::kWarp),
        warp_(m.thread() / heed::cuda::kWarp), queries_(m.shared()), keys_(m.shared() + Shape::Queries::kBytes),
        values_(m.shared() + Shape::Queries::kBytes + Shape::Keys::kBytes),
        not_finite_(m.shared() + Shape::Queries::kBytes + Shape::Keys::kBytes + Shape::Values::kBytes),
        unit_(kGeneral ? 1 : p.scale), of_pairs_(p, s_) {
    HEED_DEVICE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) max_[strip][0] = max_[strip][1] = -INFINITY;
  }

  HEED_DEVICE void Run() {
    const int rows = p_.fused ? s_.num_queries * p_.group : s_.num_queries;
    const int blocks = (rows - 1) / kRows + (rows > 0);
    if (m_.block(0) >= blocks) return;
    first_row_ = (blocks - 1 - m_.block(0)) * kRows;  // long rows first
    num_rows_ = rows - first_row_ < kRows ? rows - first_row_ : kRows;
    keys_seen_ = p_.fused ? KeysOf(p_, s_, 0, s_.num_queries - 1) : KeysOf(p_, s_, first_row_, first_row_ + num_rows_ - 1);
    const int64_t begin = keys_seen_.begin, end = keys_seen_.end;
    const int64_t origin = s_.key_begin + (begin - s_.key_begin) / kTileKeys * kTileKeys;
    CopyQueries();
    if (begin < end) CopyKeys(origin);
    m_.CommitCopies();
    int64_t next;
    for (int64_t tile = origin; tile < end; tile = next) {
      next = tile + kTileKeys;
      if (next < end && keys_seen_.gap.Contains({next, next + kTileKeys})) {
        next += (keys_seen_.gap.end - next) / kTileKeys * kTileKeys;
      }
      m_.template WaitCopies<0>();
      m_.Sync();
      CopyValues(tile);
      m_.CommitCopies();
      Logits();
      const bool by_pair = kGeneral && of_pairs_.ByPair();
      const bool full = !by_pair && keys_seen_.common.Contains({tile, tile + kTileKeys});
      if (full) {
        Weigh<true>(tile);
      } else {
        Weigh<false>(tile);
      }
      m_.template WaitCopies<0>();
      m_.Sync();
      if (next < end) CopyKeys(next);
      m_.CommitCopies();
      // O += P V.
      if (full) {
        Sums::template Add<kDType>(m_, logits_, values_, outputs_);
      } else {
        Sums::template AddSeen<kDType>(m_, logits_, values_, KeysFrom(tile), p_.value_depth,
                                       [&](int key) { return ValueAt(tile + key); }, not_finite_, outputs_);
      }
    }
    m_.template WaitCopies<0>();
    Finish();
  }

 private:
  // Row `row` of the block.
  HEED_DEVICE Row RowAt(int row) const {
    const int at = first_row_ + row, y = m_.block(1);
    if (!p_.fused) return {at, y};
    return {at % s_.num_queries, y * p_.group + at / s_.num_queries};
  }
  HEED_DEVICE int KeyHead() const { return p_.fused ? m_.block(1) : m_.block(1) / p_.group; }

  HEED_DEVICE void CopyQueries() {
    queries_.Copy(m_, p_.aligned, p_.depth, num_rows_, [&](int row) {
      const Row at = RowAt(row);
      return static_cast<const uint16_t*>(p_.q) + s_.q + at.query * p_.q_strides.token + at.head * p_.q_strides.head;
    });
  }
  HEED_DEVICE void CopyKeys(int64_t tile) {
    const uint16_t* k = static_cast<const uint16_t*>(p_.k) + s_.k + KeyHead() * p_.k_strides.head;
    keys_.Copy(m_, p_.aligned, p_.depth, KeysFrom(tile), [&](int row) { return k + (tile + row) * p_.k_strides.token; });
  }
  HEED_DEVICE void CopyValues(int64_t tile) {
    values_.Copy(m_, p_.aligned, p_.value_depth, KeysFrom(tile), [&](int row) { return ValueAt(tile + row); });
  }
  HEED_DEVICE const uint16_t* ValueAt(int64_t key) const {
    return static_cast<const uint16_t*>(p_.v) + s_.v + KeyHead() * p_.v_strides.head + key * p_.v_strides.token;
  }
  // Keys that exist in a tile.
  HEED_DEVICE int KeysFrom(int64_t tile) const {
    return static_cast<int>(s_.key_end - tile < kTileKeys ? s_.key_end - tile : kTileKeys);
  }

  // S = Q K^T.
  HEED_DEVICE void Logits() {
    HEED_DEVICE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kKeyTiles; ++j) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 4; ++i) logits_[strip][j][i] = 0;
      }
    }
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kDepth; e += 16) {
      uint32_t q[kStrips][4];
      HEED_DEVICE_UNROLL
      for (int strip = 0; strip < kStrips; ++strip) queries_.LoadRows(m_, FirstRow(strip), e, q[strip]);
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kKeyTiles; j += 2) {
        uint32_t k[4];
        keys_.LoadColumns(m_, 8 * j, e, k);
        const uint32_t low[2] = {k[0], k[1]}, high[2] = {k[2], k[3]};
        HEED_DEVICE_UNROLL
        for (int strip = 0; strip < kStrips; ++strip) {
          m_.template Multiply<kDType>(q[strip], low, logits_[strip][j]);
          m_.template Multiply<kDType>(q[strip], high, logits_[strip][j + 1]);
        }
      }
    }
  }

  // P = exp(S - max) in place of S; sums, and outputs rescaled where a maximum grows.
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
    const float slope = kGeneral ? of_pairs_.SlopeOf(at) : 0;
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float& x = logits_[strip][j][2 * half + i];
        const int64_t key = tile + KeyOf(j, i);
        if constexpr (kGeneral) x = of_pairs_.OfProduct(x, at, key, slope);
        if (!kFull && !Sees(runs, key)) x = -INFINITY;
        if constexpr (kGeneral && !kFull) x = x == -INFINITY ? x : of_pairs_.WithPair(x, at, key);
        max = fmaxf(max, x);
      }
    }
    max = fmaxf(max, m_.ShuffleXor(max, 1));
    max = fmaxf(max, m_.ShuffleXor(max, 2));
    // Differences are taken first: they are exact where it matters, and 0 where the maximum stays.
    const float factor = unit_ * kLog2E, shift = max == -INFINITY ? 0 : max;
    const float rescale = M::Exp2((max_[strip][half] - shift) * factor);
    max_[strip][half] = max;
    float sum = sum_[strip][half] * rescale;
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float& x = logits_[strip][j][2 * half + i];
        const bool masked = !kFull && x == -INFINITY;
        x = masked ? -0.0f : M::Exp2((x - shift) * factor + kWeightPower);
        sum += x;
      }
    }
    sum_[strip][half] = sum;
    if (kGeneral && p_.dropout > 0) Drop(strip, half, tile, at);
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kChannelTiles; ++e) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) outputs_[strip][e][2 * half + i] *= rescale;
    }
  }

  // Weights of dropped pairs become 0; those of masked ones keep their sign.
  HEED_DEVICE void Drop(int strip, int half, int64_t tile, const Row& at) {
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float& weight = logits_[strip][j][2 * half + i];
        if (weight > 0 && !of_pairs_.Keeps(at, tile + KeyOf(j, i))) weight = 0;
      }
    }
  }

  HEED_DEVICE void Finish() {
    HEED_DEVICE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float sum = sum_[strip][half];
        sum += m_.ShuffleXor(sum, 1);
        sum += m_.ShuffleXor(sum, 2);
        const int row = RowOf(strip, half);
        if (row >= num_rows_) continue;
        const Row at = RowAt(row);
        const float lse = sum == 0 ? -INFINITY : max_[strip][half] * unit_ + logf(sum) - kWeightPower * kLn2;
        float factor = sum == 0 ? 0 : 1 / sum;
        if (kGeneral && p_.dropout > 0) factor /= 1 - p_.dropout;
        if (p_.has_sinks && sum != 0) factor /= 1 + expf(p_.sinks[at.head] - lse);
        uint16_t* o = static_cast<uint16_t*>(p_.o) + s_.o + at.query * p_.o_strides.token + at.head * p_.o_strides.head;
        HEED_DEVICE_UNROLL
        for (int e = 0; e < kChannelTiles; ++e) {
          const float* x = outputs_[strip][e] + 2 * half;
          StorePair(o, ChannelOf(e, 0), M::template Pack<kDType>(x[0] * factor, x[1] * factor));
        }
        if (p_.lse != nullptr && lane_ % 4 == 0) {
          p_.lse[s_.lse + at.query * p_.lse_strides.token + at.head * p_.lse_strides.head] = lse;
        }
      }
    }
  }
  HEED_DEVICE void StorePair(uint16_t* row, int channel, uint32_t pair) const {
    if (channel < p_.value_depth) row[channel] = static_cast<uint16_t>(pair);
    if (channel + 1 < p_.value_depth) row[channel + 1] = static_cast<uint16_t>(pair >> 16);
  }

  // Where the thread's elements are.
  HEED_DEVICE int FirstRow(int strip) const { return (warp_ * kStrips + strip) * 16; }
  HEED_DEVICE int RowOf(int strip, int half) const { return FirstRow(strip) + lane_ / 4 + 8 * half; }
  HEED_DEVICE int KeyOf(int j, int i) const { return 8 * j + lane_ % 4 * 2 + i; }
  HEED_DEVICE int ChannelOf(int e, int i) const { return 8 * e + lane_ % 4 * 2 + i; }

  M& m_;
  const ForwardParams& p_;
  const DeviceSequence& s_;
  const int lane_, warp_;
  const typename Shape::Queries queries_;
  const typename Shape::Keys keys_;
  const typename Shape::Values values_;
  char* const not_finite_;  // [kTileKeys]
  const float unit_;        // of logits
  const PairLogits<M> of_pairs_;
  int first_row_ = 0, num_rows_ = 0;
  BlockKeys keys_seen_;
  typename Sums::Weights logits_;
  typename Sums::Sums outputs_ = {};
  float max_[kStrips][2], sum_[kStrips][2] = {};
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_FORWARD_BLOCK_H_

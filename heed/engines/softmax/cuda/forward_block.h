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
#include "heed/core/philox.h"
#include "heed/cuda/machine.h"
#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/cuda/shared_tile.h"
#include "heed/engines/softmax/key_runs.h"

namespace heed::softmax::cuda {

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

 public:
  HEED_DEVICE ForwardBlock(M& m, const ForwardParams& p)
      : m_(m), p_(p), s_(p.sequences[m.block(2)]), lane_(m.thread() % heed::cuda::kWarp),
        warp_(m.thread() / heed::cuda::kWarp), queries_(m.shared()), keys_(m.shared() + Shape::Queries::kBytes),
        values_(m.shared() + Shape::Queries::kBytes + Shape::Keys::kBytes),
        not_finite_(m.shared() + Shape::Queries::kBytes + Shape::Keys::kBytes + Shape::Values::kBytes),
        unit_(kGeneral ? 1 : p.scale) {
    HEED_DEVICE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) max_[strip][0] = max_[strip][1] = -INFINITY;
  }

  HEED_DEVICE void Run() {
    const int rows = p_.fused ? s_.num_queries * p_.group : s_.num_queries;
    const int blocks = (rows - 1) / kRows + (rows > 0);
    if (m_.block(0) >= blocks) return;
    first_row_ = (blocks - 1 - m_.block(0)) * kRows;  // long rows first
    num_rows_ = rows - first_row_ < kRows ? rows - first_row_ : kRows;
    FindKeys();
    const int64_t origin = s_.key_begin + (begin_ - s_.key_begin) / kTileKeys * kTileKeys;
    CopyQueries();
    if (begin_ < end_) CopyKeys(origin);
    m_.CommitCopies();
    int64_t next;
    for (int64_t tile = origin; tile < end_; tile = next) {
      next = tile + kTileKeys;
      if (next < end_ && gap_.Contains({next, next + kTileKeys})) {
        next += (gap_.end - next) / kTileKeys * kTileKeys;
      }
      m_.template WaitCopies<0>();
      m_.Sync();
      CopyValues(tile);
      m_.CommitCopies();
      Logits();
      const bool by_pair = kGeneral && (p_.bias.data != nullptr || p_.mask.data != nullptr);
      const bool full = !by_pair && common_.Contains({tile, tile + kTileKeys});
      if (full) {
        Weigh<true>(tile);
      } else {
        Weigh<false>(tile);
      }
      m_.template WaitCopies<0>();
      m_.Sync();
      if (next < end_) CopyKeys(next);
      m_.CommitCopies();
      if (full) {
        AddValues();
      } else {
        AddSeenValues(tile);
      }
    }
    m_.template WaitCopies<0>();
    Finish();
  }

 private:
  // Row `row` of the block.
  struct Row {
    int query, head;
  };
  HEED_DEVICE Row RowAt(int row) const {
    const int at = first_row_ + row, y = m_.block(1);
    if (!p_.fused) return {at, y};
    return {at % s_.num_queries, y * p_.group + at / s_.num_queries};
  }
  HEED_DEVICE int KeyHead() const { return p_.fused ? m_.block(1) : m_.block(1) / p_.group; }

  // Keys [begin_, end_) but for gap_ are seen by some row, common_ by all: what a row sees moves up with its query.
  HEED_DEVICE void FindKeys() {
    int first = first_row_, last = first_row_ + num_rows_ - 1;
    if (p_.fused) {
      first = 0;
      last = s_.num_queries - 1;
    }
    begin_ = end_ = 0;
    if (first >= s_.query_end) return;
    const bool all_see = last < s_.query_end;
    if (!all_see) last = static_cast<int>(s_.query_end) - 1;
    const KeyRuns of_first = KeyRunsOf(p_, s_, first), of_last = KeyRunsOf(p_, s_, last);
    const auto begin_of = [](const KeyRuns& x) { return x.first.empty() ? x.second.begin : x.first.begin; };
    const auto end_of = [](const KeyRuns& x) { return x.second.empty() ? x.first.end : x.second.end; };
    // A row between them may see something where they do not.
    begin_ = of_first.size() == 0 || of_last.size() == 0
                 ? s_.key_begin
                 : (begin_of(of_first) < begin_of(of_last) ? begin_of(of_first) : begin_of(of_last));
    end_ = of_last.size() == 0 ? s_.key_end : end_of(of_last);
    if (of_first.size() != 0 && end_of(of_first) > end_) end_ = end_of(of_first);
    if (!of_first.first.empty() && !of_first.second.empty() && !of_last.first.empty()) {
      gap_ = {of_last.first.end, of_first.second.begin};
    }
    if (all_see) common_ = Intersect(of_first.second, of_last.second);
    if (common_.empty()) common_ = {};
  }

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
    const Row at = RowAt(row);
    const KeyRuns runs = kFull || row >= num_rows_ ? KeyRuns() : KeyRunsOf(p_, s_, at.query);
    const float slope = kGeneral && p_.has_slopes ? p_.slopes[s_.slopes + at.head] : 0;
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float& x = logits_[strip][j][2 * half + i];
        const int64_t key = tile + KeyOf(j, i);
        if constexpr (kGeneral) {
          x *= p_.scale;
          if (p_.softcap > 0) x = p_.softcap * tanhf(x / p_.softcap);
          if (p_.has_slopes) x -= slope * fabsf(static_cast<float>(s_.start + at.query - key));
        }
        if (!kFull) x = Sees(runs, key) ? WithPair(x, at, key) : -INFINITY;
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

  // A logit with what a pair has of its own.
  HEED_DEVICE float WithPair(float x, const Row& at, int64_t key) const {
    if constexpr (!kGeneral) return x;
    const auto of_pair = [&](const DevicePairs& pairs, int64_t first) {
      return first + at.head * pairs.head_stride + at.query * pairs.query_stride + key * pairs.key_stride;
    };
    if (p_.bias.data != nullptr) {
      const int64_t pair = of_pair(p_.bias, s_.bias);
      const auto bits = [&] { return static_cast<const uint16_t*>(p_.bias.data)[pair]; };
      const float bias = p_.bias.dtype == DType::kF32    ? static_cast<const float*>(p_.bias.data)[pair]
                         : p_.bias.dtype == DType::kBF16 ? M::template Widen<DType::kBF16>(bits())
                                                         : M::template Widen<DType::kF16>(bits());
      x = bias == -INFINITY ? bias : x + bias;  // a mask, whatever the logit
    }
    const bool kept = p_.mask.data == nullptr || static_cast<const uint8_t*>(p_.mask.data)[of_pair(p_.mask, s_.mask)] != 0;
    return kept ? x : -INFINITY;
  }

  // Weights of dropped pairs become 0; four keys share a counter, of which a thread has two.
  HEED_DEVICE void Drop(int strip, int half, int64_t tile, const Row& at) {
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      const int64_t first = tile + KeyOf(j, 0);
      const uint32_t head = s_.first_head + static_cast<uint32_t>(at.head);
      const auto position = static_cast<uint32_t>(s_.start + at.query);
      auto words = Philox({static_cast<uint32_t>(first >> 2), position, head, p_.dropout_offset}, {p_.key_low, p_.key_high});
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int64_t key = first + i;
        // Tiles count from the first valid key, counters from the first.
        if (key % 4 == 0 && i > 0) {
          words = Philox({static_cast<uint32_t>(key >> 2), position, head, p_.dropout_offset}, {p_.key_low, p_.key_high});
        }
        float& weight = logits_[strip][j][2 * half + i];
        if (words[static_cast<size_t>(key & 3)] >= p_.keep_below && weight > 0) weight = 0;
      }
    }
  }

  // O += P V.
  HEED_DEVICE void AddValues() {
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; j += 2) {
      uint32_t p[kStrips][4];
      HEED_DEVICE_UNROLL
      for (int strip = 0; strip < kStrips; ++strip) {
        const float *a = logits_[strip][j], *b = logits_[strip][j + 1];
        p[strip][0] = M::template Pack<kDType>(a[0], a[1]);
        p[strip][1] = M::template Pack<kDType>(a[2], a[3]);
        p[strip][2] = M::template Pack<kDType>(b[0], b[1]);
        p[strip][3] = M::template Pack<kDType>(b[2], b[3]);
      }
      HEED_DEVICE_UNROLL
      for (int e = 0; e < kChannelTiles; e += 2) {
        uint32_t v[4];
        values_.LoadTransposed(m_, 8 * j, 8 * e, v);
        const uint32_t low[2] = {v[0], v[1]}, high[2] = {v[2], v[3]};
        HEED_DEVICE_UNROLL
        for (int strip = 0; strip < kStrips; ++strip) {
          m_.template Multiply<kDType>(p[strip], low, outputs_[strip][e]);
          m_.template Multiply<kDType>(p[strip], high, outputs_[strip][e + 1]);
        }
      }
    }
  }

  // The same of a tile that not all rows see.
  HEED_DEVICE void AddSeenValues(int64_t tile) {
    const bool mine = values_.template FindNotFinite<kDType>(m_, not_finite_);
    if (!m_.SyncOr(mine)) return AddValues();
    values_.ZeroRows(m_, not_finite_);
    m_.Sync();
    AddValues();
    for (int key = 0; key < KeysFrom(tile); ++key) {
      if (not_finite_[key] == 0) continue;
      HEED_DEVICE_UNROLL
      for (int strip = 0; strip < kStrips; ++strip) {
        HEED_DEVICE_UNROLL
        for (int half = 0; half < 2; ++half) AddValue(strip, half, tile, key);
      }
    }
  }
  HEED_DEVICE void AddValue(int strip, int half, int64_t tile, int key) {
    float mine = 0;
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kKeyTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (8 * j + i == key - key % 8 + key % 2) mine = logits_[strip][j][2 * half + i];
      }
    }
    const float weight = m_.Shuffle(mine, lane_ - lane_ % 4 + key % 8 / 2);
    if (weight == 0 && std::signbit(weight)) return;
    const uint16_t* v = ValueAt(tile + key);
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kChannelTiles; ++e) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int channel = ChannelOf(e, i);
        if (channel < p_.value_depth) outputs_[strip][e][2 * half + i] += weight * M::template Widen<kDType>(v[channel]);
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

  static HEED_DEVICE bool Sees(const KeyRuns& runs, int64_t key) {
    return (runs.first.begin <= key && key < runs.first.end) || (runs.second.begin <= key && key < runs.second.end);
  }

  M& m_;
  const ForwardParams& p_;
  const DeviceSequence& s_;
  const int lane_, warp_;
  const typename Shape::Queries queries_;
  const typename Shape::Keys keys_;
  const typename Shape::Values values_;
  char* const not_finite_;  // [kTileKeys]
  const float unit_;        // of logits
  int first_row_ = 0, num_rows_ = 0;
  int64_t begin_ = 0, end_ = 0;
  Interval gap_, common_;
  float logits_[kStrips][kKeyTiles][4];
  float outputs_[kStrips][kChannelTiles][4] = {};
  float max_[kStrips][2], sum_[kStrips][2] = {};
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_FORWARD_BLOCK_H_

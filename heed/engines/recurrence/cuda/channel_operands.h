// Queries and keys of a chunk with decays per channel or feature maps, as bf16 splits in shared memory.
//
// Let G_t be the sum of a channel's log decays from the chunk's first token to token t, and H half of the sum over the
// chunk.
//
//   q~_t = exp(G_t - H) phi(q_t),  k~_t = exp(H - G_t) phi(k_t)
//
// The product of a query with a key then has the decays between them. The state decays by exp(H), queries read it and
// keys update it, and it decays by exp(H) again. A token that reads before its decay has G_{t-1} instead of G_t.
// Exponents are at most -H; if that overflows f32, tokens are computed one by one.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_CHANNEL_OPERANDS_H_
#define HEED_ENGINES_RECURRENCE_CUDA_CHANNEL_OPERANDS_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/numbers.h"
#include "heed/cuda/bf16_split.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

inline constexpr int kChunk = 16, kColumnBlock = 64;  // tokens per chunk; columns per block
inline constexpr int kChunkThreads = kColumnBlock / 16 * heed::cuda::kWarp;

// Lower bound of log decays. Its exponential is 0 in f32, and differences of sums stay finite.
inline constexpr float kMinLogDecay = -110;
HEED_DEVICE float LogDecay(float x) { return x > 0 ? 0 : x < kMinLogDecay ? kMinLogDecay : x; }  // NaN stays

using heed::cuda::Exp;
using heed::cuda::Half;
using heed::cuda::Sum;  // of log decays

// Returns a decay: if <= 0, the factor minus 1, which keeps the bits that rounding the factor would lose; else the
// factor.
template <class M>
HEED_DEVICE float DecayOf(Sum log_decay) {
  const float less_one = expm1f(log_decay.high), decay = Exp<M>(log_decay);
  return less_one > -0.5f || decay == 0 ? less_one : decay;
}
HEED_DEVICE float Decayed(float x, float decay) { return decay <= 0 ? x + decay * x : x * decay; }

// phi of a query's or key's element.
template <class M>
HEED_DEVICE float Mapped(Map map, float x) {
  switch (map) {
    case Map::kIdentity: return x;
    case Map::kElu1: return x > 0 ? x + 1 : Exp<M>(x);
    case Map::kRelu: return x < 0 ? 0 : x;
    case Map::kReluSquared: return x < 0 ? 0 : x * x;
    case Map::kExp: return Exp<M>(x > 80 ? 80 : x);
    case Map::kComplement: return -expm1f(LogDecay(x));
  }
  return x;
}

// An element of a tile of f32, or of 16 bits in the tile's first half.
template <class M, class Tile>
HEED_DEVICE float ElementOf(const Tile& tile, DType dtype, int row, int column) {
  if (dtype == DType::kF32) return *reinterpret_cast<const float*>(tile.At(row, 2 * column));
  return heed::cuda::LoadFloat<M>(tile.At(row, column), dtype, 0);
}

// `kPlain`: every token decays the state, and reads and writes after the decay.
template <class M, int kKeys, bool kPlain>
class ChannelOperands {
 public:
  using Tile = heed::cuda::SharedTile<kChunk, kKeys>;
  using SourceTile = heed::cuda::SharedTile<kChunk, 2 * kKeys>;  // f32, or 16 bits in its first half

  HEED_DEVICE ChannelOperands(char* at, bool has_read_keys) : at_(at), has_read_keys_(has_read_keys) {}

  HEED_DEVICE Tile queries(int term) const { return TileAt(term); }
  HEED_DEVICE Tile keys(int term) const { return TileAt(heed::cuda::kSplitTerms + term); }
  HEED_DEVICE Tile read_keys(int term) const { return TileAt(2 * heed::cuda::kSplitTerms + term); }
  // [kKeys]: exp(H), in the form that Decayed() takes.
  HEED_DEVICE float* decays() const {
    return reinterpret_cast<float*>(at_ + (has_read_keys_ ? 3 : 2) * heed::cuda::kSplitTerms * Tile::kBytes);
  }

  // The chunk's tiles in shared memory.
  struct Source {
    SourceTile queries, keys, read_keys, log_decays;
    const Sum* log_decays_of_heads;  // [kChunk], if channels share log decays
    uint32_t decayed;                // bit t: token t has a log decay
    bool has_queries;
    bool erases;  // read keys update D instead of reading S
    int tokens;   // tokens that have more than a decay
  };

  // Makes the operands of tokens [begin, end), with zeros for other tokens. Returns true if this thread finds that the
  // decays of so many tokens overflow.
  HEED_DEVICE bool Make(M& m, const ChunkParams& p, const Source& from, int begin, int end) const {
    constexpr int kPairs = kKeys / 2, kOwn = kChunk * kPairs / kChunkThreads;  // channel pairs; tokens per thread
    const int channel = m.thread() % kPairs * 2, first = m.thread() / kPairs * kOwn;
    const auto log_decay = [&](int t, int c) -> float {
      if (t < begin || t >= end || p.decay == DecayKind::kNone || (!kPlain && (from.decayed >> t & 1) == 0)) return 0;
      if (p.decay != DecayKind::kKey) return from.log_decays_of_heads[t].high;
      return LogDecay(ElementOf<M>(from.log_decays, p.log_decay.dtype, t, c));
    };
    Sum sums[kOwn][2], total[2];
    const auto add = [&](int t) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) total[i] = total[i] + Sum{log_decay(t, channel + i), 0};
    };
    for (int t = 0; t < first; ++t) add(t);
    HEED_DEVICE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      add(first + i);
      sums[i][0] = total[0];
      sums[i][1] = total[1];
    }
    for (int t = first + kOwn; t < kChunk; ++t) add(t);
    const Sum half[2] = {Half(total[0]), Half(total[1])};
    if (first == 0) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 2; ++i) decays()[channel + i] = DecayOf<M>(half[i]);
    }
    const DeviceRows& read_keys = p.read_key.data != nullptr ? p.read_key : from.erases ? p.q : p.k;
    HEED_DEVICE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int t = first + i;
      // The sum to token t, or, for a read before the decay, to the token before.
      const auto sum = [&](int c, bool reads_before_decay) {
        return !kPlain && reads_before_decay ? sums[i][c] - Sum{log_decay(t, channel + c), 0} : sums[i][c];
      };
      const bool of_rule = has_read_keys_ && !from.erases;
      const auto reads = [&](int c, bool reads_before_decay) { return sum(c, reads_before_decay) - half[c]; };
      // If a gradient sweep's keys are queries, a write that decays has no value, but its product with itself would
      // overflow.
      const auto writes = [&](int c, bool reads_before_decay) { return half[c] - sum(c, reads_before_decay); };
      const bool query_before_decay = p.reads_before_decay && !of_rule,
                 key_before_decay = p.reads_before_decay && from.erases;
      const Sum of_query[2] = {reads(0, query_before_decay), reads(1, query_before_decay)};
      const Sum of_key[2] = {writes(0, key_before_decay), writes(1, key_before_decay)};
      const auto put = [&](int which, Map map, const Sum(&decays)[2], const auto& element) {
        float x[2];
        HEED_DEVICE_UNROLL
        for (int k = 0; k < 2; ++k) {
          const bool exists = t >= begin && t < end && t < from.tokens && channel + k < p.key_size;
          x[k] = exists ? Mapped<M>(map, element(channel + k)) * Exp<M>(decays[k]) : 0;
        }
        uint32_t split[heed::cuda::kSplitTerms][1];
        heed::cuda::Split<M>(x[0], x[1], 0, split);
        HEED_DEVICE_UNROLL
        for (int term = 0; term < heed::cuda::kSplitTerms; ++term) {
          TileAt(which * heed::cuda::kSplitTerms + term).PutPair(t, channel, split[term][0]);
        }
      };
      const auto of = [&](const SourceTile& tile, DType dtype) {
        return [&tile, dtype, t](int c) { return ElementOf<M>(tile, dtype, t, c); };
      };
      if (from.has_queries) put(0, p.query_map, of_query, of(from.queries, p.q.dtype));
      if (p.complement_keys) {
        put(1, Map::kIdentity, of_key, [&](int c) { return -expm1f(log_decay(t, c)); });
      } else {
        put(1, p.key_map, of_key, of(from.keys, p.k.dtype));
      }
      if (has_read_keys_) {
        const auto of_channel = [&](int c) { return of_rule ? reads(c, p.reads_before_decay) : writes(c, false); };
        const Sum of_read_key[2] = {of_channel(0), of_channel(1)};
        put(2, p.key_map, of_read_key, of(from.read_keys, read_keys.dtype));
      }
    }
    return !(total[0].high >= kMinLogDecay && total[1].high >= kMinLogDecay);
  }

 private:
  HEED_DEVICE Tile TileAt(int i) const { return Tile(at_ + i * Tile::kBytes); }

  char* const at_;
  const bool has_read_keys_;
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_CHANNEL_OPERANDS_H_

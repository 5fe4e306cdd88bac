// Recurrences on a GPU: 64 columns of a head's state stand in the registers of a block while tokens pass, 16 at a time.
//
// With G_t the sum of the log decays from the first token of a chunk to token t, and L its last one,
//
//   o_t = scale (exp(G_t) S^T q_t + sum_{j <= t} exp(G_t - G_j) (q_t . k_j) w_j)
//   S   = exp(G_L) S + sum_j k_j (exp(G_L - G_j) w_j)^T
//
// where w_j is v_j or, of a delta rule with read keys r, what is found by substitution:
//
//   w_t = beta_t (v_t - exp(G_t) S^T r_t) - sum_{j < t} beta_t exp(G_t - G_j) (r_t . k_j) w_j
//
// Where each channel decays by itself, queries and keys have their decays in them instead (channel_operands.h).
//
// Each of four warps has 16 columns as S^T, results of products that are operands of the next where they stand; it needs
// nothing of the others but what the block copies for all. States and weights go into products as three pieces of bf16, so
// that all of it is as exact as f32's, and outputs take the place of the values until a tile's are stored together.
//
// Long sequences are taken in segments: a pass that computes no outputs leaves the states between them. Tokens have the same
// bits in either pass, however many segments there are.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_CHUNK_BLOCK_H_
#define HEED_ENGINES_RECURRENCE_CUDA_CHUNK_BLOCK_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/pieces.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/recurrence/cuda/channel_operands.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

// `kByChannel`: channels decay each by itself, or are mapped.
template <int kKeys, bool kByChannel>
struct ChunkShape {
  static constexpr int kChannels = kKeys;
  static constexpr bool kOfChannels = kByChannel;
  static constexpr int kTile = kByChannel ? kChunk : 64;  // tokens that are copied together
  using KeyTile = heed::cuda::SharedTile<kTile, kKeys>;
  using ValueTile = heed::cuda::SharedTile<kTile, kStrip>;
  static constexpr int kDecayBytes = kByChannel ? heed::cuda::SharedTile<kChunk, 2 * kKeys>::kBytes : 0;
  static constexpr int kNumberBytes = 2 * kTile * static_cast<int>(sizeof(float));

  // Two tiles of each tensor: one is computed while the next is copied.
  static constexpr int StageBytes(bool has_read_key) {
    return (has_read_key ? 3 : 2) * KeyTile::kBytes + ValueTile::kBytes + kDecayBytes + kNumberBytes;
  }
  static constexpr int SharedBytes(bool delta, bool has_read_key) {
    const int operands = delta ? 3 : 2;
    return 2 * StageBytes(has_read_key) +
           (kByChannel ? operands * heed::cuda::kPieces * KeyTile::kBytes + kKeys * static_cast<int>(sizeof(float)) : 0);
  }
};

template <class M, DType kDType, int kKeys, bool kByChannel, bool kDelta>
class ChunkBlock {
  using Shape = ChunkShape<kKeys, kByChannel>;
  using Operands = ChannelOperands<M, kDType, kKeys>;
  static constexpr int kTile = Shape::kTile;
  static constexpr int kExact = heed::cuda::kExactPieces<kDType>;
  static constexpr int kPieces = heed::cuda::kPieces;
  static constexpr int kOfRow = kByChannel ? kPieces : kExact;  // of queries and keys
  using Pairs = float[2][4];  // [half of the tokens][...], 16 x 16 as results of products

 public:
  HEED_DEVICE ChunkBlock(M& m, const ChunkParams& p)
      : m_(m), p_(p), s_(p.sequences[m.block(2)]), head_(m.block(1)), part_(m.block(0) % p.parts),
        segment_(m.block(0) / p.parts), lane_(m.thread() % heed::cuda::kWarp), warp_(m.thread() / heed::cuda::kWarp),
        has_read_key_(kDelta && p.read_key.data != nullptr), decays_(!kByChannel && p.decay != DecayKind::kNone),
        operands_(m.shared() + 2 * Shape::StageBytes(has_read_key_), kDelta) {}

  HEED_DEVICE void Run() {
    const int64_t begin = segment_ * p_.segment_tokens;
    if (s_.is_zero) return ClearOutputs(begin, End(begin));
    if (segment_ > 0 && begin >= s_.tokens) return;
    LoadState(segment_ == 0 ? Initial() : Border(segment_ - 1));
    if (p_.to_borders) {
      for (int64_t i = 0; (i + 1) * p_.segment_tokens < s_.tokens; ++i) {
        Walk(i * p_.segment_tokens, (i + 1) * p_.segment_tokens);
        StoreState(Border(static_cast<int>(i)));
      }
      return;
    }
    Walk(begin, End(begin));
    if (End(begin) == s_.tokens && p_.final.data != nullptr) {
      DeviceStates final = p_.final;
      final.data += s_.final + head_ * final.head_stride;
      StoreState(final);
    }
  }

 private:
  HEED_DEVICE int64_t End(int64_t begin) const {
    const int64_t end = begin + p_.segment_tokens;
    return end < s_.tokens ? end : s_.tokens;
  }
  HEED_DEVICE DeviceStates Initial() const {
    DeviceStates initial = p_.initial;
    if (initial.data != nullptr) initial.data += s_.initial + head_ * initial.head_stride;
    return initial;
  }
  HEED_DEVICE DeviceStates Border(int border) const {
    const int64_t size = int64_t{p_.key_size} * p_.value_size;
    return {p_.borders + s_.borders + (int64_t{border} * p_.heads + head_) * size, 0, 1, p_.key_size};
  }

  // f(element, its key channel, its column) for those that exist.
  template <class F>
  HEED_DEVICE void ForState(const F& f) {
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kKeys / 8; ++e) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int key = 8 * e + lane_ % 4 * 2 + i % 2, column = part_ * kStrip + 16 * warp_ + lane_ / 4 + i / 2 * 8;
        if (key < p_.key_size && column < p_.value_size) f(state_[e][i], key, column);
      }
    }
  }
  HEED_DEVICE void LoadState(const DeviceStates& from) {
    if (from.data == nullptr) return;
    ForState([&](float& x, int key, int column) { x = from.data[key * from.key_stride + column * from.value_stride]; });
  }
  HEED_DEVICE void StoreState(const DeviceStates& to) {
    ForState([&](float& x, int key, int column) { to.data[key * to.key_stride + column * to.value_stride] = x; });
  }

  HEED_DEVICE int columns() const {
    const int left = p_.value_size - part_ * kStrip;
    return left < kStrip ? left : kStrip;
  }
  // A tensor's row of a token, from its element `first` on.
  HEED_DEVICE uint16_t* RowAt(const DeviceRows& rows, int64_t of_sequence, int head, int64_t token, int first = 0) const {
    return static_cast<uint16_t*>(const_cast<void*>(rows.data)) + of_sequence + token * rows.token_stride +
           head * rows.head_stride + first;
  }
  HEED_DEVICE void ClearOutputs(int64_t begin, int64_t end) const {
    if (p_.to_borders) return;
    for (int64_t i = begin * kStrip + m_.thread(); i < end * kStrip; i += m_.num_threads()) {
      const int column = static_cast<int>(i % kStrip);
      if (column < columns()) *RowAt(p_.o, s_.o, head_, i / kStrip, part_ * kStrip + column) = 0;
    }
  }

  // The memory of a stage, and what a tile has there.
  struct Stage {
    char* at;
    bool has_read_key;
    HEED_DEVICE typename Shape::KeyTile queries() const { return typename Shape::KeyTile(at); }
    HEED_DEVICE typename Shape::KeyTile keys() const { return typename Shape::KeyTile(at + Shape::KeyTile::kBytes); }
    HEED_DEVICE typename Shape::KeyTile read_keys() const {  // the keys, unless they are others
      return typename Shape::KeyTile(at + (has_read_key ? 2 : 1) * Shape::KeyTile::kBytes);
    }
    HEED_DEVICE typename Shape::ValueTile values() const {
      return typename Shape::ValueTile(at + (has_read_key ? 3 : 2) * Shape::KeyTile::kBytes);
    }
    HEED_DEVICE typename Operands::DecayTile log_decays() const {
      return typename Operands::DecayTile(numbers() - Shape::kDecayBytes);
    }
    // Of each token: the sum of log decays since the first of its chunk, or its own where channels decay; and beta.
    HEED_DEVICE float* sums() const { return reinterpret_cast<float*>(numbers()); }
    HEED_DEVICE float* betas() const { return sums() + kTile; }

   private:
    HEED_DEVICE char* numbers() const { return at + Shape::StageBytes(has_read_key) - Shape::kNumberBytes; }
  };
  HEED_DEVICE Stage StageAt(int64_t tile) const {
    return {m_.shared() + (tile % 2 == 0 ? 0 : Shape::StageBytes(has_read_key_)), has_read_key_};
  }

  HEED_DEVICE void CopyTile(const Stage& stage, int64_t first, int count) const {
    const int key_head = head_ / p_.group;
    const auto copy = [&](const auto& tile, const DeviceRows& rows, int64_t of_sequence) {
      tile.Copy(m_, p_.aligned, p_.key_size, count,
                [&](int i) -> const uint16_t* { return RowAt(rows, of_sequence, key_head, first + i); });
    };
    if (!p_.to_borders) copy(stage.queries(), p_.q, s_.q);
    if (!p_.complement_keys) copy(stage.keys(), p_.k, s_.k);
    if (has_read_key_) copy(stage.read_keys(), p_.read_key, s_.read_key);
    stage.values().Copy(m_, p_.aligned, columns(), count, [&](int i) -> const uint16_t* {
      return RowAt(p_.v, s_.v, head_, first + i, part_ * kStrip);
    });
    if (kByChannel && p_.decay == DecayKind::kKey) {
      const int halves = p_.log_decay.dtype == DType::kF32 ? 2 : 1;
      stage.log_decays().Copy(m_, p_.decays_aligned, halves * p_.key_size, count, [&](int i) -> const uint16_t* {
        return static_cast<const uint16_t*>(p_.log_decay.data) +
               halves * (s_.log_decay + (first + i) * p_.log_decay.token_stride + head_ * p_.log_decay.head_stride);
      });
    }
    m_.CommitCopies();
  }

  // What thread `i` brings of token i of a tile.
  struct Numbers {
    float log_decay = 0, beta = 0;
  };
  HEED_DEVICE Numbers NumbersOf(int64_t first, int count) const {
    Numbers numbers;
    if (m_.thread() >= count) return numbers;
    const auto load = [&](const DeviceRows& rows, int64_t of_sequence) {
      return heed::cuda::LoadFloat<M>(rows.data, rows.dtype,
                                      of_sequence + (first + m_.thread()) * rows.token_stride + head_ * rows.head_stride);
    };
    if (p_.decay == DecayKind::kConstant) numbers.log_decay = LogDecay(p_.log_decays[head_]);
    if (p_.decay == DecayKind::kToken) numbers.log_decay = LogDecay(load(p_.log_decay, s_.log_decay));
    if constexpr (kDelta) numbers.beta = p_.beta.data == nullptr ? 1 : load(p_.beta, s_.beta);
    return numbers;
  }
  HEED_DEVICE void PutNumbers(const Stage& stage, Numbers numbers) const {
    if (m_.thread() >= kTile) return;  // whole warps, where there are sums
    float sum = numbers.log_decay;
    HEED_DEVICE_UNROLL
    for (int distance = 1; distance < kChunk && !kByChannel; distance *= 2) {
      const float before = m_.Shuffle(sum, (lane_ - distance) & (heed::cuda::kWarp - 1));
      if (lane_ % kChunk >= distance) sum += before;
    }
    stage.sums()[m_.thread()] = sum;
    if constexpr (kDelta) stage.betas()[m_.thread()] = numbers.beta;
  }

  // The tokens of a segment.
  HEED_DEVICE void Walk(int64_t begin, int64_t end) {
    const auto count_at = [&](int64_t first) { return static_cast<int>(end - first < kTile ? end - first : kTile); };
    if (begin >= end) return;
    m_.Sync();  // all are done with another segment's
    CopyTile(StageAt(0), begin, count_at(begin));
    PutNumbers(StageAt(0), NumbersOf(begin, count_at(begin)));
    int64_t tile = 0;
    for (int64_t first = begin; first < end; first += kTile, ++tile) {
      const Stage stage = StageAt(tile), next = StageAt(tile + 1);
      const int64_t after = first + kTile;
      const int count = count_at(first);
      m_.template WaitCopies<0>();
      m_.Sync();
      Numbers numbers;
      if (after < end) {
        CopyTile(next, after, count_at(after));
        numbers = NumbersOf(after, count_at(after));
      }
      if constexpr (kByChannel) {
        ChunkOfChannels(stage, count);
      } else if (16 * warp_ < columns()) {
        for (int row = 0; row < count; row += kChunk) Chunk(stage, row, 0, kChunk);
      }
      if (after < end) PutNumbers(next, numbers);
      if (p_.to_borders) continue;
      m_.Sync();
      stage.values().Store(m_, p_.aligned, columns(), count,
                           [&](int i) { return RowAt(p_.o, s_.o, head_, first + i, part_ * kStrip); });
    }
  }

  // A tile of as many tokens as a chunk has.
  HEED_DEVICE void ChunkOfChannels(const Stage& stage, int count) {
    const typename Operands::Source source = {stage.queries(), stage.keys(), stage.read_keys(), stage.log_decays(), stage.sums()};
    const auto compute = [&](int begin, int end) {
      DecayChannels();
      Chunk(stage, 0, begin, end);
      DecayChannels();
    };
    const bool mine = operands_.Make(m_, p_, source, 0, count);
    if (!m_.SyncOr(mine)) return compute(0, count);
    for (int t = 0; t < count; ++t) {
      m_.Sync();  // all are done with the operands before
      operands_.Make(m_, p_, source, t, t + 1);
      m_.Sync();
      compute(t, t + 1);
    }
  }
  HEED_DEVICE void DecayChannels() {
    if (p_.decay == DecayKind::kNone) return;
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kKeys / 8; ++e) {
      const float* decays = operands_.decays() + 8 * e + lane_ % 4 * 2;
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 4; ++i) state_[e][i] = Decayed(state_[e][i], decays[i % 2]);
    }
  }

  // The tokens of [begin, end) among the 16 from row `row` of the tile on.
  HEED_DEVICE void Chunk(const Stage& stage, int row, int begin, int end) {
    const float* sums = stage.sums() + row;
    const bool outputs = !p_.to_borders;
    Pairs pairs = {}, errors = {}, o = {}, found = {};
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kKeys / 16; ++e) {
      if (16 * e >= p_.key_size) break;
      uint32_t state[kPieces][4], keys[kOfRow][4];
      heed::cuda::SplitResults<M>(state_[2 * e], state_[2 * e + 1], state);
      RowsOf(stage.keys(), [&](int piece) { return operands_.keys(piece); }, row, 16 * e, keys);
      if (outputs) {
        uint32_t queries[kOfRow][4];
        RowsOf(stage.queries(), [&](int piece) { return operands_.queries(piece); }, row, 16 * e, queries);
        MultiplyRows(queries, keys, pairs);
        MultiplyRows(state, queries, o);
      }
      if constexpr (kDelta) {
        uint32_t read_keys[kOfRow][4];
        RowsOf(stage.read_keys(), [&](int piece) { return operands_.read_keys(piece); }, row, 16 * e, read_keys);
        MultiplyRows(read_keys, keys, errors);
        MultiplyRows(state, read_keys, found);
      }
    }
    Pairs written;
    uint32_t values[kExact][4];
    {
      uint32_t r[4];
      stage.values().LoadTransposed(m_, row, 16 * warp_, r);
      uint32_t turned[4] = {r[0], r[2], r[1], r[3]};
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int t = ColumnOf(i);
        if (t < begin || t >= end) turned[i / 2] &= 0xFFFF0000u >> (i % 2 * 16);  // outputs stand there
        written[i / 4][i % 4] = M::template Widen<kDType>(static_cast<uint16_t>(turned[i / 2] >> (i % 2 * 16)));
      }
      heed::cuda::ToPieces<kDType, M>(turned, values);
    }
    if constexpr (kDelta) {
      WeighPairs(sums, errors);
      const float* betas = stage.betas() + row;
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 8; ++i) {
        errors[i / 4][i % 4] *= -betas[RowOf(i)];
        const int t = ColumnOf(i);
        float& x = written[i / 4][i % 4];
        x = t < begin || t >= end ? 0 : betas[t] * (x - (decays_ ? Exp<M>(sums[t]) : 1) * found[i / 4][i % 4]);
      }
      AddCausally<true>(errors, written, written);
    }
    if (outputs) {
      WeighPairs(sums, pairs);
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 8; ++i) o[i / 4][i % 4] *= decays_ ? Exp<M>(sums[ColumnOf(i)]) : 1;
      AddWritten(pairs, written, values, o);
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int t = ColumnOf(i);
        const uint32_t pair = M::template Pack<kDType>(p_.scale * o[i / 4][i % 4], 0);
        if (t >= begin && t < end) stage.values().Put(row + t, 16 * warp_ + RowOf(i), static_cast<uint16_t>(pair));
      }
    }
    AddToState(stage, row, sums, written, values);
  }

  // Of 16 x 16 results of products: where element i of a thread stands.
  HEED_DEVICE int RowOf(int i) const { return lane_ / 4 + i / 2 % 2 * 8; }
  HEED_DEVICE int ColumnOf(int i) const { return lane_ % 4 * 2 + i % 2 + i / 4 * 8; }

  // 16 rows of a tile, or of its operands by piece.
  template <class Tile, class OperandOf>
  HEED_DEVICE void RowsOf(const Tile& tile, const OperandOf& operand, int row, int column, uint32_t (&pieces)[kOfRow][4]) const {
    if constexpr (kByChannel) {
      HEED_DEVICE_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) operand(piece).LoadRows(m_, row, column, pieces[piece]);
    } else {
      uint32_t r[4];
      tile.LoadRows(m_, row, column, r);
      heed::cuda::ToPieces<kDType, M>(r, pieces);
    }
  }
  // a b^T, of 16 rows each.
  template <int kA, int kB>
  HEED_DEVICE void MultiplyRows(const uint32_t (&a)[kA][4], const uint32_t (&b)[kB][4], Pairs& products) const {
    heed::cuda::MultiplyPieces(m_, a, heed::cuda::WordsOf(b, 0, 2).at, products[0]);
    heed::cuda::MultiplyPieces(m_, a, heed::cuda::WordsOf(b, 1, 3).at, products[1]);
  }

  // What token j's key means to token t, decayed on the way; 0 before it.
  HEED_DEVICE void WeighPairs(const float* sums, Pairs& pairs) const {
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int t = RowOf(i), j = ColumnOf(i);
      float& x = pairs[i / 4][i % 4];
      x = j > t ? 0 : decays_ ? x * Exp<M>(sums[t] - sums[j]) : x;
    }
  }

  // o^T += W^T P^T. What is not finite is added by itself, lest it reach tokens before it: 0 NaN is NaN.
  HEED_DEVICE void AddWritten(const Pairs& pairs, const Pairs& written, const uint32_t (&values)[kExact][4], Pairs& o) const {
    bool finite = true;
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 8; ++i) finite &= fabsf(written[i / 4][i % 4]) <= 3.4028234e38f;
    if (m_.Any(!finite)) return AddCausally<false>(pairs, written, o);
    uint32_t weights[kPieces][4];
    heed::cuda::SplitResults<M>(pairs[0], pairs[1], weights);
    if constexpr (kDelta) {
      uint32_t rows[kPieces][4];
      heed::cuda::SplitResults<M>(written[0], written[1], rows);
      MultiplyRows(rows, weights, o);
    } else {
      MultiplyRows(values, weights, o);
    }
  }

  // out_t += sum of pairs_tj rows_j over j <= t, or j < t alone, ascending: `rows` may be `out`.
  template <bool kBefore>
  HEED_DEVICE void AddCausally(const Pairs& pairs, const Pairs& rows, Pairs& out) const {
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kChunk; ++j) {
      const int quad = lane_ - lane_ % 4 + j % 8 / 2;
      const float low = m_.Shuffle(rows[j / 8][j % 2], quad), high = m_.Shuffle(rows[j / 8][2 + j % 2], quad);
      HEED_DEVICE_UNROLL
      for (int half = j / 8; half < 2; ++half) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int of_half = lane_ % 4 * 2 + i, t = of_half + 8 * half;
          const float weight = m_.Shuffle(pairs[j / 8][2 * half + j % 2], 4 * of_half + j % 8 / 2);
          if (kBefore ? t <= j : t < j) continue;
          out[half][i] += weight * low;
          out[half][2 + i] += weight * high;
        }
      }
    }
  }

  HEED_DEVICE void AddToState(const Stage& stage, int row, const float* sums, const Pairs& written,
                              const uint32_t (&values)[kExact][4]) {
    if (decays_) {
      const float decay = DecayOf<M>(sums[kChunk - 1]);
      HEED_DEVICE_UNROLL
      for (int e = 0; e < kKeys / 8; ++e) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 4; ++i) state_[e][i] = Decayed(state_[e][i], decay);
      }
    }
    if (!kDelta && !decays_) return AddProducts(stage, row, values);
    Pairs decayed;
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float decay = decays_ ? Exp<M>(sums[kChunk - 1] - sums[ColumnOf(i)]) : 1;
      decayed[i / 4][i % 4] = decay * written[i / 4][i % 4];
    }
    uint32_t rows[kPieces][4];
    heed::cuda::SplitResults<M>(decayed[0], decayed[1], rows);
    AddProducts(stage, row, rows);
  }
  template <int kCount>
  HEED_DEVICE void AddProducts(const Stage& stage, int row, const uint32_t (&rows)[kCount][4]) {
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kKeys / 16; ++e) {
      if (16 * e >= p_.key_size) break;
      uint32_t keys[kOfRow][4];
      if constexpr (kByChannel) {
        HEED_DEVICE_UNROLL
        for (int piece = 0; piece < kPieces; ++piece) operands_.keys(piece).LoadTransposed(m_, row, 16 * e, keys[piece]);
      } else {
        uint32_t r[4];
        stage.keys().LoadTransposed(m_, row, 16 * e, r);
        heed::cuda::ToPieces<kDType, M>(r, keys);
      }
      heed::cuda::MultiplyPieces(m_, rows, heed::cuda::WordsOf(keys, 0, 1).at, state_[2 * e]);
      heed::cuda::MultiplyPieces(m_, rows, heed::cuda::WordsOf(keys, 2, 3).at, state_[2 * e + 1]);
    }
  }

  M& m_;
  const ChunkParams& p_;
  const DeviceSequence& s_;
  const int head_, part_, segment_, lane_, warp_;
  const bool has_read_key_, decays_;  // decays_: by one number per token
  const Operands operands_;
  float state_[kKeys / 8][4] = {};  // S^T, of 16 columns
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_CHUNK_BLOCK_H_

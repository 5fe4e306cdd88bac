// The tokens and tensors of a sweep, and the copies of tiles to shared memory.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_CHUNK_ROWS_H_
#define HEED_ENGINES_RECURRENCE_CUDA_CHUNK_ROWS_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/engines/recurrence/cuda/channel_operands.h"
#include "heed/engines/recurrence/cuda/chunk_stage.h"
#include "heed/engines/recurrence/cuda/params.h"
#include "heed/engines/recurrence/cuda/state_block.h"

namespace heed::recurrence::cuda {

template <class M, int kKeys, bool kByChannel, Form kForm>
class ChunkRows : protected StateBlock<M, kKeys, kForm != Form::kPlain> {
 protected:
  using Base = StateBlock<M, kKeys, kForm != Form::kPlain>;
  using Base::m_, Base::p_, Base::s_, Base::head_, Base::column_block_, Base::lane_, Base::columns, Base::NumberAt;
  using Shape = ChunkShape<kKeys, kByChannel>;
  using Stage = ChunkStage<Shape>;
  static constexpr int kTile = Shape::kTile;
  static constexpr bool kDelta = kForm == Form::kDelta, kErases = kForm == Form::kDeltaGradients;
  static constexpr bool kGeneral = kForm == Form::kGeneral || kErases, kHasReadKeys = kDelta || kErases;
  // Values may be f32 and f16 too, as queries and keys of sweeps by channel may.
  static constexpr bool kAnyValues = kForm == Form::kGeneral || (kByChannel && kForm != Form::kPlain);

  HEED_DEVICE ChunkRows(M& m, const ChunkParams& p)
      : Base(m, p), has_read_key_(kHasReadKeys && p.read_key.data != nullptr),
        by_column_(kForm == Form::kGeneral && p.value_decay.data != nullptr),
        reads_before_decay_(kForm == Form::kGeneral && p.reads_before_decay),
        has_factors_(kForm == Form::kGeneral && !p.reads_before_decay && p.beta.data != nullptr),
        decays_after_update_(kGeneral && p.decays_after_update),
        tokens_(decays_after_update_ && p.final.data != nullptr ? s_.tokens + 1 : s_.tokens),
        shift_(kGeneral ? s_.shift : 0), stage_bytes_(Shape::StageBytes(has_read_key_, by_column_, wide_values())) {}

  // The first token of a segment, or the end of the last segment.
  HEED_DEVICE int64_t BeginOf(int64_t segment) const {
    const int64_t begin = segment * p_.segment_tokens - shift_;
    return begin < 0 ? 0 : begin < tokens_ ? begin : tokens_;
  }
  HEED_DEVICE int64_t TileEnd(int64_t first, int64_t end) const {
    const int64_t tile_end = ((first + shift_) / kTile + 1) * kTile - shift_;
    return tile_end < end ? tile_end : end;
  }
  HEED_DEVICE bool wide_outputs() const { return (kGeneral || kDelta) && p_.o.dtype == DType::kF32; }
  HEED_DEVICE DType of_outputs() const { return kAnyValues ? p_.o.dtype : DType::kBF16; }
  HEED_DEVICE DType of_values() const { return kAnyValues ? p_.v.dtype : DType::kBF16; }
  HEED_DEVICE bool wide_values() const { return of_values() == DType::kF32; }
  HEED_DEVICE bool normalizes() const { return kGeneral && p_.normalizes; }
  HEED_DEVICE float write_scale() const { return kGeneral ? p_.write_scale : 1; }
  HEED_DEVICE Map value_map() const { return kGeneral ? p_.value_map : Map::kIdentity; }
  HEED_DEVICE bool has_outputs() const { return !p_.states_only && (!kGeneral || p_.o.data != nullptr); }
  // True if outputs replace values in shared memory. In a tile of f32 values they would overlap another warp's values.
  HEED_DEVICE bool outputs_replace_values() const { return !wide_outputs() && !wide_values(); }
  HEED_DEVICE bool finds() const {
    return kDelta && p_.delta == DeltaKind::kNotFound;
  }  // outputs are the values minus what read keys retrieve
  HEED_DEVICE bool has_queries() const { return kErases || (has_outputs() && !finds()); }
  // True if write t is its token's first, or last, in time.
  HEED_DEVICE bool IsFirstWrite(int64_t t) const { return IsWrite(t, p_.reversed ? p_.writes - 1 : 0); }
  HEED_DEVICE bool IsLastWrite(int64_t t) const { return IsWrite(t, p_.reversed ? 0 : p_.writes - 1); }
  HEED_DEVICE bool IsWrite(int64_t t, int i) const {
    if (kForm == Form::kPlain || p_.writes == 1) return true;
    return static_cast<uint32_t>(t) % static_cast<uint32_t>(p_.writes) == static_cast<uint32_t>(i);
  }
  HEED_DEVICE bool has_output(int64_t t) const { return kForm == Form::kPlain || !p_.reads_once || IsLastWrite(t); }
  HEED_DEVICE bool has_value(int64_t t) const {
    return kForm == Form::kPlain || (!p_.reads_only && (!p_.writes_once || IsLastWrite(t)));
  }
  // Bit t is set if token t of a chunk has a log decay.
  HEED_DEVICE uint32_t DecayedTokens(int64_t first) const {
    uint32_t decayed = decays_after_update_ && first == 0 ? 0xFFFE : 0xFFFF;
    for (int t = 0; kForm != Form::kPlain && p_.writes > 1 && t < kChunk; ++t) {
      if (!IsFirstWrite(first + t - (decays_after_update_ ? 1 : 0))) decayed &= ~(1u << t);
    }
    return decayed;
  }
  // The log decay of a token and column.
  HEED_DEVICE float LogDecayOf(int64_t token, int column) const {
    if (p_.decay == DecayKind::kConstant) return LogDecay(p_.log_decays[head_]);
    if (p_.decay == DecayKind::kToken) return LogDecay(NumberAt(p_.log_decay, s_.log_decay, token));
    return by_column_ ? LogDecay(NumberAt(p_.value_decay, s_.value_decay, token, column)) : 0;
  }

  // The log decay of token t of a tile in shared memory, and a column.
  HEED_DEVICE float ColumnLogDecay(const Stage& stage, int64_t first, int t, int column) const {
    const int64_t decayed = first + t - (decays_after_update_ ? 1 : 0);
    if (column >= columns() || decayed < 0 || !IsFirstWrite(decayed)) return 0;
    return LogDecay(ElementOf<M>(stage.column_decays(), p_.value_decay.dtype, t, column));
  }

  HEED_DEVICE Stage StageAt(int64_t tile) const {
    return {m_.shared() + (tile % 2 == 0 ? 0 : stage_bytes_), has_read_key_, kErases, wide_values()};
  }

  // Returns the existing tokens among `count`: one less if the last one is only a decay.
  HEED_DEVICE int Existing(int64_t first, int count) const {
    return first + count <= s_.tokens ? count : static_cast<int>(s_.tokens - first);
  }
  HEED_DEVICE void CopyTile(const Stage& stage, int64_t first, int count) const {
    const int existing = Existing(first, count);
    const auto copy = [&](const auto& tile, bool aligned, const DeviceRows& rows, int64_t of_sequence, int at, int size,
                          int tokens, int64_t from) {
      const int halves = rows.dtype == DType::kF32 ? 2 : 1;
      tile.Copy(m_, aligned, halves * size, tokens, [&](int i) -> const uint16_t* {
        const int64_t token = from + i < 0 ? 0 : from + i;
        return static_cast<const uint16_t*>(rows.data) + halves * this->Place(rows, of_sequence, token, at);
      });
    };
    const auto copy_rows = [&](const auto& tile, const DeviceRows& rows, int64_t of_sequence, int at, int size) {
      copy(tile, p_.aligned, rows, of_sequence, at, size, existing, first);
    };
    if (has_queries()) copy_rows(stage.queries(), p_.q, s_.q, 0, p_.key_size);
    if (!p_.complement_keys) copy_rows(stage.keys(), p_.k, s_.k, 0, p_.key_size);
    if (has_read_key_) copy_rows(stage.read_keys(), p_.read_key, s_.read_key, 0, p_.key_size);
    const int given = normalizes() && column_block_ == p_.column_blocks - 1 ? columns() - 1 : columns();
    if (value_map() == Map::kComplement) {
      // Values are computed from decays.
    } else if (wide_values()) {
      copy_rows(stage.wide_values(), p_.v, s_.v, column_block_ * kColumnBlock, given);
    } else {
      copy_rows(stage.values(), p_.v, s_.v, column_block_ * kColumnBlock, given);
    }
    const auto copy_decays = [&](const auto& tile, const DeviceRows& rows, int64_t of_sequence, int at, int size) {
      copy(tile, p_.decays_aligned, rows, of_sequence, at, size, s_.tokens == 0 ? 0 : count,
           first - (decays_after_update_ ? 1 : 0));
    };
    if constexpr (kByChannel) {
      if (p_.decay == DecayKind::kKey) copy_decays(stage.log_decays(), p_.log_decay, s_.log_decay, 0, p_.key_size);
    }
    if (by_column_)
      copy_decays(stage.column_decays(), p_.value_decay, s_.value_decay, column_block_ * kColumnBlock, columns());
    m_.CommitCopies();
  }

  HEED_DEVICE Sum ShuffleSum(Sum sum, int lane) const {
    lane &= heed::cuda::kWarp - 1;
    return {m_.Shuffle(sum.high, lane), m_.Shuffle(sum.low, lane)};
  }

  // Numbers of token i of a tile, which thread i loads.
  struct Numbers {
    float log_decay = 0, beta = 0;
  };
  HEED_DEVICE Numbers NumbersOf(int64_t first, int count) const {
    Numbers numbers;
    if (m_.thread() >= count) return numbers;
    const int64_t token = first + m_.thread(), decayed = token - (decays_after_update_ ? 1 : 0);
    if (decayed >= 0 && IsFirstWrite(decayed)) {
      if (p_.decay == DecayKind::kConstant) numbers.log_decay = LogDecay(p_.log_decays[head_]);
      if (p_.decay == DecayKind::kToken) numbers.log_decay = LogDecay(NumberAt(p_.log_decay, s_.log_decay, decayed));
    }
    // Beta is the token's own, also if decays come after updates.
    if (kHasReadKeys || has_factors_ || reads_before_decay_) {
      numbers.beta = p_.beta.data == nullptr ? (reads_before_decay_ ? 0 : 1)
                     : token < s_.tokens     ? NumberAt(p_.beta, s_.beta, token)
                                             : 0;
    }
    return numbers;
  }
  HEED_DEVICE void PutNumbers(const Stage& stage, Numbers numbers) const {
    if (m_.thread() >= kTile) return;  // whole warps, which the scan needs
    Sum sum = {numbers.log_decay, 0};
    HEED_DEVICE_UNROLL
    for (int distance = 1; distance < kChunk && !kByChannel; distance *= 2) {
      const Sum before = ShuffleSum(sum, lane_ - distance);
      if (lane_ % kChunk >= distance) sum = before + sum;
    }
    stage.sums()[m_.thread()] = sum;
    if (kHasReadKeys || has_factors_ || reads_before_decay_) stage.betas()[m_.thread()] = numbers.beta;
  }

  const bool has_read_key_, by_column_, reads_before_decay_, has_factors_;
  const bool decays_after_update_;
  // Tokens of the sweep; if decays come after updates, one more applies the last decay to the final state.
  const int64_t tokens_;
  const int shift_, stage_bytes_;
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_CHUNK_ROWS_H_

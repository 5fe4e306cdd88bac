// Shared memory of a chunk's tokens, and its size.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_CHUNK_STAGE_H_
#define HEED_ENGINES_RECURRENCE_CUDA_CHUNK_STAGE_H_

#include <cstdint>
#include <type_traits>

#include "heed/cuda/machine.h"
#include "heed/cuda/bf16_split.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/recurrence/cuda/channel_operands.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

// The form of a sweep. Kernels that compute less have registers to spare.
enum class Form {
  kPlain,
  kGeneral,  // decays or maps of columns, factors per token, or gradients
  kDelta,
  kDeltaGradients,
};

// `kByChannel`: decays per channel, feature maps, or queries and keys that are not bf16.
template <int kKeys, bool kByChannel>
struct ChunkShape {
  static constexpr int kChannels = kKeys;
  static constexpr int kTile = kByChannel ? kChunk : 64;  // tokens per copy
  using KeyTile =
      heed::cuda::SharedTile<kTile, kByChannel ? 2 * kKeys : kKeys>;  // f32 too if operands are made from it
  using ValueTile = heed::cuda::SharedTile<kTile, kColumnBlock>;
  using WideValueTile = heed::cuda::SharedTile<kTile, 2 * kColumnBlock>;  // f32 values, with f32 outputs
  using KeyDecayTile = KeyTile;
  using ColumnDecayTile = heed::cuda::SharedTile<kTile, 2 * kColumnBlock>;  // f32, or 16 bits in its first half
  static constexpr int kKeyDecayBytes = kByChannel ? KeyDecayTile::kBytes : 0;
  static constexpr int kNumberBytes = 3 * kTile * static_cast<int>(sizeof(float));

  // Two stages: one tile is computed while the next is copied.
  static constexpr int StageBytes(bool has_read_key, bool by_column, bool wide_values) {
    return (has_read_key ? 3 : 2) * KeyTile::kBytes + (wide_values ? WideValueTile::kBytes : ValueTile::kBytes) +
           kKeyDecayBytes + kNumberBytes + (by_column ? ColumnDecayTile::kBytes : 0);
  }
  static constexpr int SharedBytes(bool delta, bool has_read_key, bool by_column, bool wide_values) {
    using OperandTile = heed::cuda::SharedTile<kChunk, kKeys>;
    const int operands = delta ? 3 : 2;
    return 2 * StageBytes(has_read_key, by_column, wide_values) +
           (kByChannel
                ? operands * heed::cuda::kSplitTerms * OperandTile::kBytes + kKeys * static_cast<int>(sizeof(float))
                : 0);
  }
};

// The tiles of a stage in shared memory.
template <class Shape>
struct ChunkStage {
  using KeyTile = typename Shape::KeyTile;

  char* at;
  bool has_read_key, erases, has_wide_values;

  HEED_DEVICE KeyTile queries() const { return KeyTile(at); }
  HEED_DEVICE KeyTile keys() const { return KeyTile(at + KeyTile::kBytes); }
  // Without read keys of their own: the keys, or, in a sweep that erases, the queries.
  HEED_DEVICE KeyTile read_keys() const { return KeyTile(at + (has_read_key ? 2 : erases ? 0 : 1) * KeyTile::kBytes); }
  HEED_DEVICE typename Shape::ValueTile values() const { return typename Shape::ValueTile(at_values()); }
  HEED_DEVICE typename Shape::WideValueTile wide_values() const { return typename Shape::WideValueTile(at_values()); }
  HEED_DEVICE typename Shape::KeyDecayTile log_decays() const {
    return typename Shape::KeyDecayTile(numbers() - Shape::kKeyDecayBytes);
  }
  HEED_DEVICE typename Shape::ColumnDecayTile column_decays() const {
    return typename Shape::ColumnDecayTile(numbers() + Shape::kNumberBytes);
  }
  // Per token: the sum of log decays since the chunk's first token, or its own log decay in sweeps by channel; and
  // beta.
  HEED_DEVICE Sum* sums() const { return reinterpret_cast<Sum*>(numbers()); }
  HEED_DEVICE float* betas() const { return reinterpret_cast<float*>(sums() + Shape::kTile); }

 private:
  HEED_DEVICE char* at_values() const { return at + (has_read_key ? 3 : 2) * KeyTile::kBytes; }
  HEED_DEVICE char* numbers() const {
    return at + Shape::StageBytes(has_read_key, false, has_wide_values) - Shape::kNumberBytes;
  }
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_CHUNK_STAGE_H_

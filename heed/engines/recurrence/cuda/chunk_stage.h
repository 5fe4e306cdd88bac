// Tokens of a chunk in the shared memory of a block, and how much of it there is.
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

// What a sweep has to it. Kernels of what has less have registers to spare.
enum class Form {
  kPlain,
  kGeneral,  // columns decay or are mapped, a token has a factor, or it is one of gradients
  kDelta,
  kDeltaGradients,
};

// `kByChannel`: channels decay each by itself, or are mapped, or queries and keys are not of bf16.
template <int kKeys, bool kByChannel>
struct ChunkShape {
  static constexpr int kChannels = kKeys;
  static constexpr int kTile = kByChannel ? kChunk : 64;  // tokens that are copied together
  using KeyTile =
      heed::cuda::SharedTile<kTile, kByChannel ? 2 * kKeys : kKeys>;  // of f32 too, where operands are made of it
  using ValueTile = heed::cuda::SharedTile<kTile, kColumnBlock>;
  using WideValueTile = heed::cuda::SharedTile<kTile, 2 * kColumnBlock>;  // of f32, whose outputs are too
  using KeyDecayTile = KeyTile;
  using ColumnDecayTile = heed::cuda::SharedTile<kTile, 2 * kColumnBlock>;  // of f32, or in its first half of 16 bits
  static constexpr int kKeyDecayBytes = kByChannel ? KeyDecayTile::kBytes : 0;
  static constexpr int kNumberBytes = 3 * kTile * static_cast<int>(sizeof(float));

  // Two tiles of each tensor: one is computed while the next is copied.
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

// The memory of a stage, and what a tile has there.
template <class Shape>
struct ChunkStage {
  using KeyTile = typename Shape::KeyTile;

  char* at;
  bool has_read_key, erases, has_wide_values;

  HEED_DEVICE KeyTile queries() const { return KeyTile(at); }
  HEED_DEVICE KeyTile keys() const { return KeyTile(at + KeyTile::kBytes); }
  // Unless they are others: the keys, which are the queries of a sweep that erases.
  HEED_DEVICE KeyTile read_keys() const { return KeyTile(at + (has_read_key ? 2 : erases ? 0 : 1) * KeyTile::kBytes); }
  HEED_DEVICE typename Shape::ValueTile values() const { return typename Shape::ValueTile(at_values()); }
  HEED_DEVICE typename Shape::WideValueTile wide_values() const { return typename Shape::WideValueTile(at_values()); }
  HEED_DEVICE typename Shape::KeyDecayTile log_decays() const {
    return typename Shape::KeyDecayTile(numbers() - Shape::kKeyDecayBytes);
  }
  HEED_DEVICE typename Shape::ColumnDecayTile column_decays() const {
    return typename Shape::ColumnDecayTile(numbers() + Shape::kNumberBytes);
  }
  // Of each token: the sum of log decays since the first of its chunk, or its own where channels decay; and beta.
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

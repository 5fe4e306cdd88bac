// 64 columns of a head's state in the registers of a block: loads, stores, and access to a token's data.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_STATE_BLOCK_H_
#define HEED_ENGINES_RECURRENCE_CUDA_STATE_BLOCK_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/engines/recurrence/cuda/channel_operands.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

// Each of four warps owns 16 columns, as S^T. `kSeveral`: tokens may have several writes.
template <class M, int kKeys, bool kSeveral>
class StateBlock {
 protected:
  using Pairs = float[2][4];  // [half of the columns][...]: 16 x 16 in result fragments

  HEED_DEVICE StateBlock(M& m, const ChunkParams& p)
      : m_(m), p_(p), s_(p.sequences[m.block(2)]), head_(m.block(1)), column_block_(m.block(0) % p.column_blocks),
        segment_(m.block(0) / p.column_blocks), lane_(m.thread() % heed::cuda::kWarp),
        warp_(m.thread() / heed::cuda::kWarp) {}

  // Row and column of a thread's element i of 16 x 16 results.
  HEED_DEVICE int RowOf(int i) const { return lane_ / 4 + i / 2 % 2 * 8; }
  HEED_DEVICE int ColumnOf(int i) const { return lane_ % 4 * 2 + i % 2 + i / 4 * 8; }

  HEED_DEVICE int64_t End(int64_t begin) const {
    const int64_t end = begin + p_.segment_tokens;
    return end < s_.tokens ? end : s_.tokens;
  }
  HEED_DEVICE int columns() const {
    const int left = p_.value_size - column_block_ * kColumnBlock;
    return left < kColumnBlock ? left : kColumnBlock;
  }

  HEED_DEVICE DeviceStates OfHead(DeviceStates states, int64_t of_sequence) const {
    if (states.data != nullptr) states.data += of_sequence + head_ * states.head_stride;
    return states;
  }
  HEED_DEVICE DeviceStates SegmentState(int64_t segment) const {
    return StateIn(p_.segment_states + s_.segment_states, segment);
  }
  HEED_DEVICE DeviceStates BlockState(int64_t block) const { return StateIn(p_.block_states, s_.first_block + block); }
  HEED_DEVICE DeviceStates StartState(int64_t block) const {
    float* states = const_cast<float*>(p_.start_states);
    return {states + ((s_.first_block + block) * p_.heads + head_) * p_.start_size, 0, p_.value_size, 1};
  }

  // Loads the first `columns` columns of the state.
  HEED_DEVICE void LoadState(const DeviceStates& from, int columns) {
    if (from.data == nullptr) return;
    ForState([&](float& x, int key, int column, int) {
      if (column < columns) x = from.data[key * from.key_stride + column * from.value_stride];
    });
  }
  HEED_DEVICE void StoreState(const DeviceStates& to, int columns) {
    if (to.data == nullptr) return;
    ForState([&](float& x, int key, int column, int) {
      if (column < columns) to.data[key * to.key_stride + column * to.value_stride] = x;
    });
  }
  // z is the last column of the state.
  HEED_DEVICE void LoadNormalizer(const DeviceStates& from) {
    if (from.data == nullptr) return;
    ForState([&](float& x, int key, int column, int) {
      if (column == p_.value_size - 1) x = from.data[key * from.key_stride];
    });
  }
  HEED_DEVICE void StoreNormalizer(const DeviceStates& to) {
    if (to.data == nullptr) return;
    ForState([&](float& x, int key, int column, int) {
      if (column == p_.value_size - 1) to.data[key * to.key_stride] = x;
    });
  }
  // Stores sums over key channels of the state times the block's stored state, times exp(log_decay(column)).
  template <class LogDecay>
  HEED_DEVICE void StoreProducts(int64_t block, const LogDecay& log_decay) {
    const DeviceStates block_states = BlockState(block);
    float sums[2] = {0, 0};  // of the thread's two columns
    ForState([&](float x, int key, int column, int i) {
      sums[i / 2] += x * block_states.data[key * block_states.key_stride + column * block_states.value_stride];
    });
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 2; ++i) {
      sums[i] += m_.ShuffleXor(sums[i], 1);
      sums[i] += m_.ShuffleXor(sums[i], 2);
      const int column = StateColumnOf(2 * i);
      if (lane_ % 4 != 0 || column >= p_.value_size) continue;
      float& to = p_.products[((s_.first_block + block) * p_.heads + head_) * p_.value_size + column];
      to = (p_.adds ? to : 0) + sums[i] * Exp<M>(log_decay(column));
    }
  }
  // Offset of element `at` of a token's row.
  HEED_DEVICE int64_t Place(const DeviceRows& rows, int64_t of_sequence, int64_t token, int at = 0) const {
    const int64_t of_token = kSeveral ? OfToken(rows, token, p_.writes) : token * rows.token_stride;
    return of_sequence + of_token + head_ / rows.group * rows.head_stride + at;
  }
  HEED_DEVICE uint16_t* RowAt(const DeviceRows& rows, int64_t of_sequence, int64_t token, int first = 0) const {
    return static_cast<uint16_t*>(const_cast<void*>(rows.data)) + Place(rows, of_sequence, token, first);
  }
  HEED_DEVICE float NumberAt(const DeviceRows& rows, int64_t of_sequence, int64_t token, int at = 0) const {
    return heed::cuda::LoadFloat<M>(rows.data, rows.dtype, Place(rows, of_sequence, token, at));
  }

  // out_t += sum of pairs_tj rows_j over j <= t, or j < t if `before`, in ascending order: `rows` may be `out`.
  HEED_DEVICE void AddCausally(bool before, const Pairs& pairs, const Pairs& rows, Pairs& out) const {
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
          if (before ? t <= j : t < j) continue;
          out[half][i] += weight * low;
          out[half][2 + i] += weight * high;
        }
      }
    }
  }

  M& m_;
  const ChunkParams& p_;
  const DeviceSequence& s_;
  const int head_, column_block_, segment_, lane_, warp_;
  float state_[kKeys / 8][4] = {};

 private:
  HEED_DEVICE int StateColumnOf(int i) const {
    return column_block_ * kColumnBlock + 16 * warp_ + lane_ / 4 + i / 2 * 8;
  }

  // Calls f(element, key channel, column, index of four) for existing elements.
  template <class F>
  HEED_DEVICE void ForState(const F& f) {
    heed::cuda::Unrolled<kKeys / 2>([&](auto index) {
      constexpr int e = index / 4, i = index % 4;
      const int key = 8 * e + lane_ % 4 * 2 + i % 2, column = StateColumnOf(i);
      if (key < p_.key_size && column < p_.value_size) f(state_[e][i], key, column, i);
    });
  }
  HEED_DEVICE DeviceStates StateIn(float* states, int64_t index) const {
    const int64_t size = int64_t{p_.key_size} * p_.value_size;
    return {states + (index * p_.heads + head_) * size, 0, 1, p_.key_size};
  }
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_STATE_BLOCK_H_

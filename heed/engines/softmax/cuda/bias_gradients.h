// The gradient of a bias on a GPU: dS of a tile of pairs, summed over the axes that the bias broadcasts.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_BIAS_GRADIENTS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_BIAS_GRADIENTS_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/engines/softmax/cuda/backward_blocks.h"
#include "heed/engines/softmax/cuda/backward_params.h"
#include "heed/engines/softmax/cuda/pair_logits.h"

namespace heed::softmax::cuda {

constexpr int64_t TilesOf(int64_t size) { return (size + kBackwardTile - 1) / kBackwardTile; }

// Adds dS of a tile of pairs of one sequence and head to sums.
template <class M, class Shape>
class PairGradients : BackwardBlock<M, Shape, true> {
  using Base = BackwardBlock<M, Shape, true>;
  using Base::m_, Base::f_, Base::s_;

 public:
  using typename Base::Products;

  HEED_DEVICE PairGradients(M& m, const BackwardParams& p, const GradientSequence& of)
      : Base(m, p, of.sequence, of.gradients) {}

  HEED_DEVICE void Add(int head, int first, int64_t first_key, Products& sums) {
    if (first >= s_.num_queries || first_key >= s_.key_end) return;
    const int count = s_.num_queries - first < kBackwardTile ? s_.num_queries - first : kBackwardTile;
    const Interval keys = {first_key, first_key + kBackwardTile};
    if (KeysOf(f_, s_, first, first + count - 1).Skips(keys) || !this->Keeps(head, first, keys)) return;
    m_.Sync();  // all threads have read the previous tiles
    this->CopyRows(this->OwnTiles(), first, count, head);
    this->CopyKeys(this->TilesOf(0), first_key,
                   static_cast<int>(s_.key_end < keys.end ? s_.key_end - first_key : kBackwardTile), head / f_.group);
    this->Wait();
    Products p, ds;
    this->Multiply(0, p, ds);
    this->SoftmaxGradientRows(
        first, count, head, first_key, /*full=*/false, p, ds,
        [&](int half, int j, int i, const Row&, int64_t, float of_pair) { sums[0][j][2 * half + i] += of_pair; });
  }
};

// Computes tile block(0) of head block(1) and batch entry block(2) of the bias's gradient.
template <class M, class Shape>
class BiasGradientsBlock {
  static constexpr int kPitch = kBackwardTile + 1;  // of sums in shared memory, padded against bank conflicts

 public:
  static constexpr int kSharedBytes =
      Shape::kSharedBytes > 4 * kBackwardTile* kPitch ? Shape::kSharedBytes : 4 * kBackwardTile* kPitch;

  HEED_DEVICE BiasGradientsBlock(M& m, const BiasGradientParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() {
    const int64_t key_tiles = TilesOf(p_.sizes[3]);
    const int64_t row_tile = m_.block(0) / key_tiles, key_tile = m_.block(0) % key_tiles;
    const bool all_heads = p_.sizes[1] == 1;
    const int first_head = m_.block(1), end_head = all_heads ? p_.num_heads : first_head + 1;
    for (int64_t i = 0; i < p_.num_sequences; ++i) {
      const GradientSequence& of = p_.sequences[i];
      if (p_.sizes[0] > 1 && of.batch != m_.block(2)) continue;
      PairGradients<M, Shape> pairs(m_, p_.backward, of);
      const int64_t rows = p_.sizes[2] == 1 ? TilesOf(of.sequence.num_queries) : row_tile + 1;
      const int64_t keys = p_.sizes[3] == 1 ? TilesOf(of.sequence.num_keys) : key_tile + 1;
      for (int head = first_head; head < end_head; ++head) {
        for (int64_t row = row_tile; row < rows; ++row) {
          for (int64_t key = key_tile; key < keys; ++key) {
            pairs.Add(head, static_cast<int>(row * kBackwardTile), key * kBackwardTile, sums_);
          }
        }
      }
    }
    Store(row_tile * kBackwardTile, key_tile * kBackwardTile);
  }

 private:
  HEED_DEVICE void Store(int64_t first_row, int64_t first_key) {
    float* const tile = reinterpret_cast<float*>(m_.shared());
    const int lane = m_.thread() % heed::cuda::kWarp, warp = m_.thread() / heed::cuda::kWarp;
    m_.Sync();
    if (warp % Shape::kNWarps == 0) {
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kBackwardTile / 8; ++j) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int row = 16 * (warp / Shape::kNWarps) + lane / 4 + 8 * (i / 2);
          tile[row * kPitch + 8 * j + lane % 4 * 2 + i % 2] = sums_[0][j][i];
        }
      }
    }
    m_.Sync();
    // On an axis of size 1, the one element is the sum over the tile's 64.
    const bool one_row = p_.sizes[2] == 1, one_key = p_.sizes[3] == 1;
    const int rows = one_row ? 1 : CountOf(p_.sizes[2] - first_row),
              keys = one_key ? 1 : CountOf(p_.sizes[3] - first_key);
    const int64_t base = m_.block(2) * p_.strides[0] + m_.block(1) * p_.strides[1];
    for (int at = m_.thread(); at < rows * keys; at += m_.num_threads()) {
      const int row = at / keys, key = at % keys;
      float sum = 0;
      for (int i = 0; i < (one_row ? kBackwardTile : 1); ++i) {
        for (int j = 0; j < (one_key ? kBackwardTile : 1); ++j) sum += tile[(row + i) * kPitch + key + j];
      }
      heed::cuda::StoreFloat<M>(p_.dbias, p_.dtype,
                                base + (first_row + row) * p_.strides[2] + (first_key + key) * p_.strides[3], sum);
    }
  }
  static HEED_DEVICE int CountOf(int64_t left) { return left < kBackwardTile ? static_cast<int>(left) : kBackwardTile; }

  M& m_;
  const BiasGradientParams& p_;
  typename PairGradients<M, Shape>::Products sums_ = {};
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_BIAS_GRADIENTS_H_

// Kernels besides the passes: zeros for tokens of no sequence, and gradients summed over blocks and sequences.
#ifndef HEED_ENGINES_SCAN_CUDA_SUM_BLOCKS_H_
#define HEED_ENGINES_SCAN_CUDA_SUM_BLOCKS_H_

#include <cstdint>

#include "heed/cuda/machine.h"
#include "heed/cuda/numbers.h"
#include "heed/engines/scan/cuda/params.h"

namespace heed::scan::cuda {

inline constexpr int kSumThreads = 128;
inline constexpr int kSumTokens = 64;  // tokens per block

// A sequence's tokens: the tensor's offset in elements, their number, and the index of the first among all sequences.
struct TokenRun {
  int64_t first, tokens;
  int64_t first_token = 0;
};

// A tensor over tokens: the sum over channel blocks, or zeros.
struct TokenSumParams {
  const float* from = nullptr;  // [channel block][token][group][column]; null: zeros
  DeviceTokens to;
  int32_t channel_blocks, columns, groups;
  int64_t tokens;  // over all sequences
  TokenRun runs[kMostSequences] = {};
};

// Sums 64 tokens of a group.
template <class M>
class TokenSumBlock {
 public:
  HEED_DEVICE TokenSumBlock(M& m, const TokenSumParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const TokenRun& run = p_.runs[m_.block(2)];
    const int group = m_.block(0) % p_.groups;
    const int64_t begin = int64_t{m_.block(0) / p_.groups} * kSumTokens, row = int64_t{p_.groups} * p_.columns;
    for (int i = m_.thread(); i < kSumTokens * p_.columns; i += m_.num_threads()) {
      const int column = i % p_.columns;
      const int64_t t = begin + i / p_.columns;
      if (t >= run.tokens) return;
      const int64_t at = (run.first_token + t) * row + group * p_.columns + column;
      float sum = 0;
      if (p_.from != nullptr) {
        for (int channel_block = 0; channel_block < p_.channel_blocks; ++channel_block)
          sum += p_.from[channel_block * p_.tokens * row + at];
      }
      heed::cuda::StoreFloat<M>(const_cast<void*>(p_.to.data), p_.to.dtype,
                                run.first + t * p_.to.token + group * p_.to.group + column * p_.to.column, sum);
    }
  }

 private:
  M& m_;
  const TokenSumParams& p_;
};

// Gradients of constants: sums over sequences.
struct ConstantSumParams {
  const heed::cuda::Sum* from;  // [sequence][row][channel], from the constant's first row on
  int64_t sequences;
  int32_t rows, channels;  // rows: per sequence
  DeviceNumbers to;
};

// Sums one state of 128 channels.
template <class M>
class ConstantSumBlock {
 public:
  HEED_DEVICE ConstantSumBlock(M& m, const ConstantSumParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const int64_t channel = int64_t{m_.block(0)} * kSumThreads + m_.thread();
    const int state = m_.block(1);
    if (channel >= p_.channels) return;
    heed::cuda::Sum sum;
    for (int64_t sequence = 0; sequence < p_.sequences; ++sequence) {
      sum = sum + p_.from[(sequence * p_.rows + state) * p_.channels + channel];
    }
    heed::cuda::StoreFloat<M>(const_cast<void*>(p_.to.data), p_.to.dtype, channel * p_.to.channel + state * p_.to.state,
                              sum.high + sum.low);
  }

 private:
  M& m_;
  const ConstantSumParams& p_;
};

}  // namespace heed::scan::cuda

#endif  // HEED_ENGINES_SCAN_CUDA_SUM_BLOCKS_H_

// Tiles of tokens between global memory, registers and shared memory, and how threads share channels and states.
#ifndef HEED_ENGINES_SCAN_CUDA_TILE_H_
#define HEED_ENGINES_SCAN_CUDA_TILE_H_

#include <bit>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/engines/scan/cuda/params.h"

namespace heed::scan::cuda {

inline constexpr int kOwn = 4;  // states per thread

// Each channel has kLanes threads, adjacent lanes of one warp.
template <int kLanesOf, int kThreadsOf>
struct Shape {
  static constexpr int kLanes = kLanesOf, kThreads = kThreadsOf;
  static constexpr int kStates = kLanes * kOwn, kChannels = kThreads / kLanes;
  static_assert(heed::cuda::kWarp % kLanes == 0);

  // Floats in shared memory: rows of B or C, per token or per channel; a padded tile; what both passes have.
  static constexpr int kWeights = (kTokens > kChannels ? kTokens : kChannels) * kStates;
  static constexpr int kPaddedTile = kTokens * (kChannels + 1);
  static constexpr int kCommon = 2 * kWeights + 2 * kPaddedTile + kChannels;
  static constexpr int kForwardBytes = (kCommon + 2 * kPaddedTile) * static_cast<int>(sizeof(float));
  static constexpr int kBackwardBytes =
      (kCommon + 3 * kPaddedTile + kTokens * kThreads * kOwn) * static_cast<int>(sizeof(float));
  static_assert(kCommon % 4 == 0 && kPaddedTile % 4 == 0, "states follow, 16 bytes each");
};

// Calls f with the smallest shape that holds these states.
template <class F>
HEED_HOST_DEVICE auto WithShape(int64_t states, const F& f) {
  if (states <= 16) return f(Shape<4, 128>());
  if (states <= 64) return f(Shape<16, 256>());
  return f(Shape<32, 256>());
}

// A thread's states.
struct alignas(16) States {
  float at[kOwn];
};

// [kTokens][kColumns] floats in shared memory, with an odd row pitch: neither rows nor columns have bank conflicts.
template <int kColumns>
class PaddedTile {
 public:
  HEED_DEVICE explicit PaddedTile(float* at) : at_(at) {}
  HEED_DEVICE float& operator()(int token, int column) const { return at_[token * (kColumns + 1) + column]; }

 private:
  float* const at_;
};

// True if adjacent elements in memory are tokens.
HEED_DEVICE bool IsTokensFirst(const DeviceTokens& tensor) {
  const int64_t token = tensor.token < 0 ? -tensor.token : tensor.token;
  const int64_t column = tensor.column < 0 ? -tensor.column : tensor.column;
  return token != 0 && token < column;
}

// A thread's share of the elements of a tile, the same for every tile of a tensor.
template <int kThreads, int kColumns>
struct Places {
  static constexpr int kEach = (kTokens * kColumns + kThreads - 1) / kThreads;

  // Calls f(index, token, column).
  template <class M, class F>
  HEED_DEVICE static void ForEach(M& m, const DeviceTokens& tensor, const F& f) {
    const bool tokens_first = IsTokensFirst(tensor);
    HEED_DEVICE_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int place = m.thread() + i * kThreads;
      if (kTokens * kColumns % kThreads != 0 && place >= kTokens * kColumns) return;
      f(i, tokens_first ? place % kTokens : place / kColumns, tokens_first ? place / kTokens : place % kColumns);
    }
  }
};

// A thread's share of a prefetched tile, in registers.
template <int kThreads, int kColumns>
class PrefetchedTile {
 public:
  // Prefetches the tile whose first element is at `first`; elements outside of it are 0.
  template <class M>
  HEED_DEVICE void Prefetch(M& m, const DeviceTokens& tensor, int64_t first, int tokens, int columns) {
    Places<kThreads, kColumns>::ForEach(m, tensor, [&](int i, int t, int c) {
      bits_[i] = 0;
      if (t >= tokens || c >= columns) return;
      const int64_t at = first + t * tensor.token + c * tensor.column;
      bits_[i] = tensor.dtype == DType::kF32 ? static_cast<const uint32_t*>(tensor.data)[at]
                                             : static_cast<const uint16_t*>(tensor.data)[at];
    });
  }
  // Calls f(token, column, element) for all elements.
  template <class M, class F>
  HEED_DEVICE void ForEach(M& m, const DeviceTokens& tensor, const F& f) const {
    Places<kThreads, kColumns>::ForEach(m, tensor, [&](int i, int t, int c) {
      const auto half = static_cast<uint16_t>(bits_[i]);
      f(t, c,
        tensor.dtype == DType::kF32    ? std::bit_cast<float>(bits_[i])
        : tensor.dtype == DType::kBF16 ? M::template Widen<DType::kBF16>(half)
                                       : M::template Widen<DType::kF16>(half));
    });
  }

 private:
  uint32_t bits_[Places<kThreads, kColumns>::kEach];
};

// Element `i` of constants, which may be f64.
template <class M>
HEED_DEVICE float NumberAt(const DeviceNumbers& numbers, int64_t i) {
  if (numbers.dtype == DType::kF64) return static_cast<float>(static_cast<const double*>(numbers.data)[i]);
  return heed::cuda::LoadFloat<M>(numbers.data, numbers.dtype, i);
}

}  // namespace heed::scan::cuda

#endif  // HEED_ENGINES_SCAN_CUDA_TILE_H_

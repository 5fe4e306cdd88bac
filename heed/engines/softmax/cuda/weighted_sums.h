// Products of P or dS in registers with a tile's rows: O += P V, dV += P^T dO, dK += dS^T Q, dQ += dS K.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_WEIGHTED_SUMS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_WEIGHTED_SUMS_H_

#include <bit>
#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/elements.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/bf16_split.h"

namespace heed::softmax::cuda {

// A warp's product of weights, P or dS of kMFragments m-fragments of 16 rows by 8 kTiles rows of the tile, with 8
// kChannels channels of these rows, from channel `first` on. All are fragments of mma.sync.
template <int kMFragments, int kTiles, int kChannels>
struct WarpSums {
  static constexpr int kChannelTiles = kChannels;
  using Weights = float[kMFragments][kTiles][4];
  using Sums = float[kMFragments][kChannels][4];

  template <DType kDType, class M, class Tile>
  static HEED_DEVICE void Add(M& m, const Weights& weights, const Tile& tile, Sums& sums, int first = 0) {
    constexpr DType kTerm = heed::cuda::kSplitDType<kDType>;
    constexpr int kSplitTerms = heed::cuda::kSplitTermsOf<kDType>;
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t p[kMFragments][kSplitTerms][4];
      HEED_DEVICE_UNROLL
      for (int fragment = 0; fragment < kMFragments; ++fragment) {
        heed::cuda::SplitResults<M, kTerm, /*kFinite=*/true>(weights[fragment][j], weights[fragment][j + 1],
                                                             p[fragment]);
      }
      HEED_DEVICE_UNROLL
      for (int e = 0; e < kChannels; e += 2) {
        uint32_t v[kSplitTerms][4];
        tile.LoadTransposed(m, 8 * j, first + 8 * e, v);
        const auto low = heed::cuda::WordsOf(v, 0, 1), high = heed::cuda::WordsOf(v, 2, 3);
        HEED_DEVICE_UNROLL
        for (int fragment = 0; fragment < kMFragments; ++fragment) {
          heed::cuda::MmaSplit<kTerm>(m, p[fragment], low.at, sums[fragment][e]);
          heed::cuda::MmaSplit<kTerm>(m, p[fragment], high.at, sums[fragment][e + 1]);
        }
      }
    }
  }

  // Adds a tile with masked pairs, whose weight is -0. These leave out their rows, of `count`, even where the rows are
  // not finite. row(i) is row i of the tile in global memory, `marks` shared memory for one byte per row. Called by all
  // threads of the block. With f32 every tile comes here: weights that do not fit a split multiply the rows in f32 and
  // become -0.
  template <DType kDType, class M, class Tile, class RowOf>
  static HEED_DEVICE void AddSeen(M& m, Weights& weights, const Tile& tile, int count, int channels, const RowOf& row,
                                  char* marks, Sums& sums, int first = 0) {
    const bool found = tile.template FindNotFinite<kDType>(m, marks);
    if constexpr (heed::cuda::kSplitTermsOf<kDType> > 1) {
      ForRows([&](int fragment, int half) {
        float unfit = FitSplit(weights[fragment], half) ? 0 : 1;
        if (!m.Any(unfit > 0)) return;
        unfit += m.ShuffleXor(unfit, 1);
        unfit += m.ShuffleXor(unfit, 2);  // of the row's four threads
        for (int i = 0; i < count; ++i) {
          AddRow<kDType>(m, weights[fragment], i, half, channels, row(i), unfit > 0, sums[fragment], first);
        }
        HEED_DEVICE_UNROLL
        for (int j = 0; j < kTiles; ++j) {
          HEED_DEVICE_UNROLL
          for (int k = 0; k < 2; ++k) {
            if (unfit > 0) weights[fragment][j][2 * half + k] = -0.0f;
          }
        }
      });
    }
    if (found) {
      TakeMarkedRows<kDType>(m, weights, tile, count, channels, row, marks, sums, first);
      m.Sync();
    }
    Add<kDType>(m, weights, tile, sums, first);
  }
  // Adds the marked rows in f32 and zeroes them in the tile, before a barrier.
  template <DType kDType, class M, class Tile, class RowOf>
  static HEED_DEVICE void TakeMarkedRows(M& m, const Weights& weights, const Tile& tile, int count, int channels,
                                         const RowOf& row, const char* marks, Sums& sums, int first = 0) {
    tile.ZeroRows(m, marks);
    for (int i = 0; i < count; ++i) {
      if (marks[i] == 0) continue;
      ForRows([&](int fragment, int half) {
        AddRow<kDType>(m, weights[fragment], i, half, channels, row(i), true, sums[fragment], first);
      });
    }
  }

 private:
  // Calls f(fragment, half) for the thread's rows.
  template <class F>
  static HEED_DEVICE void ForRows(const F& f) {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) f(fragment, half);
    }
  }
  static HEED_DEVICE bool FitSplit(const float (&weights)[kTiles][4], int half) {
    bool fit = true;
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int k = 0; k < 2; ++k) fit &= heed::cuda::FitsSplit(weights[j][2 * half + k]);
    }
    return fit;
  }

  template <DType kDType, class M>
  static HEED_DEVICE void AddRow(M& m, const float (&weights)[kTiles][4], int i, int half, int channels,
                                 const heed::cuda::Element<kDType>* row, bool wanted, float (&sums)[kChannels][4],
                                 int first) {
    const int lane = m.thread() % heed::cuda::kWarp;
    float mine = 0;
    HEED_DEVICE_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      HEED_DEVICE_UNROLL
      for (int k = 0; k < 2; ++k) {
        if (8 * j + k == i - i % 8 + i % 2) mine = weights[j][2 * half + k];
      }
    }
    const float weight = m.Shuffle(mine, lane - lane % 4 + i % 8 / 2);
    if (!wanted || (weight == 0 && std::signbit(weight))) return;
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kChannels; ++e) {
      HEED_DEVICE_UNROLL
      for (int k = 0; k < 2; ++k) {
        const int channel = first + 8 * e + lane % 4 * 2 + k;
        if (channel < channels) sums[e][2 * half + k] += weight * heed::cuda::ToFloat<M, kDType>(row[channel]);
      }
    }
  }
};

// Powers of two that bring f16 weights of any magnitude, such as gradients, into range. A row's weights, and its sum so
// far, are scaled so that its largest weight so far is in [2^13, 2^14).
template <int kMFragments>
struct RowPowers {
  static constexpr int kLargest = 13, kMost = 100;
  int of[kMFragments][2];

  HEED_DEVICE RowPowers() {
    for (int fragment = 0; fragment < kMFragments; ++fragment) of[fragment][0] = of[fragment][1] = kMost;
  }

  template <class M, int kTiles, int kChannels>
  HEED_DEVICE void Apply(M& m, float (&weights)[kMFragments][kTiles][4], float (&sums)[kMFragments][kChannels][4]) {
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float largest = 0;
        HEED_DEVICE_UNROLL
        for (int j = 0; j < kTiles; ++j) {
          HEED_DEVICE_UNROLL
          for (int i = 2 * half; i < 2 * half + 2; ++i) largest = fmaxf(largest, fabsf(weights[fragment][j][i]));
        }
        largest = fmaxf(largest, m.ShuffleXor(largest, 1));
        largest = fmaxf(largest, m.ShuffleXor(largest, 2));
        int& power = of[fragment][half];
        const int before = power, wanted = kLargest - ExponentOf(largest);
        if (largest > 0 && wanted < before) power = wanted;
        if (m.Any(power != before)) {
          const float rescale = PowerOfTwo(power - before);
          HEED_DEVICE_UNROLL
          for (int e = 0; e < kChannels; ++e) {
            HEED_DEVICE_UNROLL
            for (int i = 2 * half; i < 2 * half + 2; ++i) sums[fragment][e][i] *= rescale;
          }
        }
        const float scale = PowerOfTwo(power);
        HEED_DEVICE_UNROLL
        for (int j = 0; j < kTiles; ++j) {
          HEED_DEVICE_UNROLL
          for (int i = 2 * half; i < 2 * half + 2; ++i) weights[fragment][j][i] *= scale;
        }
      }
    }
  }

  // Returns the factor that undoes the scaling of a row's sum.
  HEED_DEVICE float FactorOf(int fragment, int half) const { return PowerOfTwo(-of[fragment][half]); }

 private:
  // Returns floor(log2 x) of x >= 0; -127 of subnormal numbers and 0, 128 if x is not finite.
  static HEED_DEVICE int ExponentOf(float x) { return static_cast<int>(std::bit_cast<uint32_t>(x) >> 23) - 127; }
  // Returns 2^power, or 0 if that is below the normal numbers, where the products would vanish.
  static HEED_DEVICE float PowerOfTwo(int power) {
    return power < -126 ? 0 : std::bit_cast<float>(static_cast<uint32_t>(power + 127) << 23);
  }
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_WEIGHTED_SUMS_H_

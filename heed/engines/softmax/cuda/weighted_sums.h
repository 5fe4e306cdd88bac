// Sums of a tile's rows, weighted by what stands in a warp's registers: O += P V, dV += P^T dO, dK += dS^T Q, dQ += dS
// K.
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

// Weights of kStrips strips of 16 by 8 kTiles rows of the tile, sums of as many by 8 kChannels channels: fragments of
// products. The channels are those of the tile from `first` on.
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

  // The same of a tile of which some weights are -0, those of masked pairs: they leave out rows, of `count`, even where
  // these are not finite. All threads of the block come here; row(i) is where row i of the tile comes from, `marks` is
  // shared memory for a number per row. Of f32, of any tile: numbers that do not fit pieces are multiplied whole, and
  // their weights become -0.
  template <DType kDType, class M, class Tile, class RowOf>
  static HEED_DEVICE void AddSeen(M& m, Weights& weights, const Tile& tile, int count, int channels, const RowOf& row,
                                  char* marks, Sums& sums, int first = 0) {
    const bool found = tile.template FindNotFinite<kDType>(m, marks);
    if constexpr (heed::cuda::kSplitTermsOf<kDType> > 1) {
      ForRows([&](int fragment, int half) {
        float unfit = FitSplit(weights[fragment], half) ? 0 : 1;
        if (!m.Any(unfit > 0)) return;
        unfit += m.ShuffleXor(unfit, 1);
        unfit += m.ShuffleXor(unfit, 2);  // of the whole row
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
  // Adds the marked rows by themselves and zeroes them in the tile, before all threads meet.
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
  // f(strip, half) of the rows that a thread has a part of.
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

// Sums of f16 whose weights may be of any size, as gradients are: the weights of a row are multiplied by a power of two
// that makes its largest one so far a number of 2^13 to 2^14, and what there is of the sum with them.
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

  // What a row of sums is to be multiplied by in the end.
  HEED_DEVICE float FactorOf(int fragment, int half) const { return PowerOfTwo(-of[fragment][half]); }

 private:
  // Of x >= 0: floor(log2 x), or -127 of what is smaller than normal numbers; 128 where it is not finite.
  static HEED_DEVICE int ExponentOf(float x) { return static_cast<int>(std::bit_cast<uint32_t>(x) >> 23) - 127; }
  // 0 below the powers that are normal numbers, where nothing is left of what it multiplies.
  static HEED_DEVICE float PowerOfTwo(int power) {
    return power < -126 ? 0 : std::bit_cast<float>(static_cast<uint32_t>(power + 127) << 23);
  }
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_WEIGHTED_SUMS_H_

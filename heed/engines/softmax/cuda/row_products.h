// Products of rows with rows by mma.sync: S = Q K^T, dP = dO V^T, and their transposes.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_ROW_PRODUCTS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_ROW_PRODUCTS_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/elements.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/bf16_split.h"

namespace heed::softmax::cuda {

// A warp's product of kMFragments m-fragments of 16 rows with 8 kTiles rows, as fragments of mma.sync.
template <DType kDType, int kMFragments, int kTiles>
struct RowProducts {
  using Products = float[kMFragments][kTiles][4];

  // Multiplies rows of `a` from `row` on with rows of `b` from `column` on.
  template <int kChannels, class M, class A, class B>
  static HEED_DEVICE void Multiply(M& m, const A& a, int row, const B& b, int column, Products& products) {
    constexpr DType kTerm = heed::cuda::kSplitDType<kDType>;
    constexpr int kSplitTerms = heed::cuda::kSplitTermsOf<kDType>;
    HEED_DEVICE_UNROLL
    for (int fragment = 0; fragment < kMFragments; ++fragment) {
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kTiles; ++j) {
        HEED_DEVICE_UNROLL
        for (int i = 0; i < 4; ++i) products[fragment][j][i] = 0;
      }
    }
    HEED_DEVICE_UNROLL
    for (int e = 0; e < kChannels; e += 16) {
      uint32_t rows[kMFragments][kSplitTerms][4];
      HEED_DEVICE_UNROLL
      for (int fragment = 0; fragment < kMFragments; ++fragment) a.LoadRows(m, row + 16 * fragment, e, rows[fragment]);
      HEED_DEVICE_UNROLL
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t columns[kSplitTerms][4];
        b.LoadColumns(m, column + 8 * j, e, columns);
        const auto low = heed::cuda::WordsOf(columns, 0, 1), high = heed::cuda::WordsOf(columns, 2, 3);
        HEED_DEVICE_UNROLL
        for (int fragment = 0; fragment < kMFragments; ++fragment) {
          heed::cuda::MmaSplit<kTerm>(m, rows[fragment], low.at, products[fragment][j]);
          heed::cuda::MmaSplit<kTerm>(m, rows[fragment], high.at, products[fragment][j + 1]);
        }
      }
    }
    if constexpr (kSplitTerms > 1) RepeatNaN<kChannels>(m, a, row, b, column, products);
  }

 private:
  // Recomputes NaN results in f32: an infinity times the terms of a split number, which may be 0 or of both signs, is
  // NaN.
  template <int kChannels, class M, class A, class B>
  static HEED_DEVICE void RepeatNaN(M& m, const A& a, int row, const B& b, int column, Products& products) {
    constexpr int kCount = kMFragments * kTiles * 4;
    bool any = false;
    heed::cuda::Unrolled<kCount>([&](auto n) { any |= std::isnan(Nth(products, n)); });
    if (!any) return;
    const int lane = m.thread() % heed::cuda::kWarp;
    HEED_DEVICE_ROLL
    for (int product = 0; product < kCount; ++product) {
      bool again = false;
      heed::cuda::Unrolled<kCount>([&](auto n) { again |= n == product && std::isnan(Nth(products, n)); });
      if (!again) continue;
      const int fragment = product / (4 * kTiles), j = product / 4 % kTiles, i = product % 4;
      const int from = row + 16 * fragment + lane / 4 + 8 * (i / 2), to = column + 8 * j + lane % 4 * 2 + i % 2;
      float sum = 0;
      HEED_DEVICE_ROLL
      for (int e = 0; e < kChannels; ++e) sum = fmaf(*a.At(from, e), *b.At(to, e), sum);
      heed::cuda::Unrolled<kCount>([&](auto n) {
        if (n == product) Nth(products, n) = sum;
      });
    }
  }
  static HEED_DEVICE float& Nth(Products& products, int n) { return products[n / (4 * kTiles)][n / 4 % kTiles][n % 4]; }
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_ROW_PRODUCTS_H_

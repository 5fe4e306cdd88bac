// PoolAttention: blocks of queries side by side, one key after the other, in
// loops that compilers vectorise.
#include "cli/pooled_map.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

namespace heed::cli {
namespace {

constexpr int64_t kLanes = 32;  // queries side by side

// e^x for x <= 88, 0 below -87, within 3e-7 of itself: 2^n by bits, the rest by
// the Taylor series on [-ln 2 / 2, ln 2 / 2]. No branch, so that it vectorises.
inline float Exp(float x) {
  constexpr float kRound = 0x1.8p23f;  // the sum's last bits are an integer
  const float clamped = std::max(x, -87.0f);
  const float shifted = clamped * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t bits = std::bit_cast<uint32_t>(shifted) + 127;
  const float power = std::bit_cast<float>(bits << 23);
  return x < -87.0f ? 0.0f : p * power;
}

inline double Exp(double x) { return std::exp(x); }

// One row of bins of one head.
template <class T>
class Row {
 public:
  Row(const ConstTensorView& q, const ConstTensorView& k,
      const attention::Options& options, int64_t columns)
      : q_(q), k_(k), options_(options), columns_(columns), D_(q.size(3)) {
    block_.resize(static_cast<size_t>(D_ * kLanes));
    scale_ = static_cast<T>(
        options.scale.value_or(1 / std::sqrt(static_cast<double>(D_))));
  }

  // Adds queries [first, end), at most kLanes, to `sums` and `largest`, one per
  // column; lse points to theirs.
  void Add(int64_t h, int64_t key_head, int64_t first, int64_t end,
           const T* lse, double* sums, double* largest) {
    const int64_t Tq = q_.size(1), Tk = k_.size(1);
    int64_t low = Tk, high = 0;
    for (int64_t i = 0; i < kLanes; ++i) {
      // Lanes without a query repeat the last one and see nothing.
      const int64_t row = std::min(first + i, end - 1), p = row + Tk - Tq;
      const T* x = q_.as<T>() + row * q_.stride(1) + h * q_.stride(2);
      for (int64_t d = 0; d < D_; ++d) {
        block_[static_cast<size_t>(d * kLanes + i)] = x[d] * scale_;
      }
      lse_[i] = lse[row - first];
      const attention::Window& window = options_.window;
      int64_t a = window.left < 0 ? 0 : std::max<int64_t>(0, p - window.left);
      int64_t b = options_.causal ? std::min(Tk, p + 1) : Tk;
      if (window.right >= 0) b = std::min(b, p + window.right + 1);
      if (first + i >= end || b <= a) a = b = 0;
      low_[i] = static_cast<int32_t>(a);
      high_[i] = static_cast<int32_t>(b);
      if (b > a) {
        low = std::min(low, a);
        high = std::max(high, b);
      }
    }
    for (int64_t c = 0; c < columns_ && BinBegin(c, columns_, Tk) < high; ++c) {
      const int64_t begin = std::max(low, BinBegin(c, columns_, Tk)),
                    stop = std::min(high, BinBegin(c + 1, columns_, Tk));
      if (begin >= stop) continue;
      T sum[kLanes] = {}, most[kLanes] = {};
      for (int64_t j = begin; j < stop; ++j) {
        AddKey(k_.as<T>() + j * k_.stride(1) + key_head * k_.stride(2),
               static_cast<int32_t>(j), sum, most);
      }
      for (int64_t i = 0; i < kLanes; ++i) {
        sums[c] += static_cast<double>(sum[i]);
        largest[c] = std::max(largest[c], static_cast<double>(most[i]));
      }
    }
  }

 private:
  void AddKey(const T* key, int32_t j, T* sum, T* most) {
    T s[kLanes] = {};
    for (int64_t d = 0; d < D_; ++d) {
      const T x = key[d];
      const T* column = block_.data() + d * kLanes;
      for (int64_t i = 0; i < kLanes; ++i) s[i] += column[i] * x;
    }
    if (options_.softcap > 0) {
      const T cap = static_cast<T>(options_.softcap);
      for (int64_t i = 0; i < kLanes; ++i) s[i] = cap * std::tanh(s[i] / cap);
    }
    for (int64_t i = 0; i < kLanes; ++i) {
      const T p = Exp(s[i] - lse_[i]);
      const T kept = (j >= low_[i]) & (j < high_[i]) ? p : T{0};
      sum[i] += kept;
      most[i] = kept > most[i] ? kept : most[i];
    }
  }

  const ConstTensorView &q_, &k_;
  const attention::Options& options_;
  const int64_t columns_, D_;
  T scale_;
  std::vector<T> block_;  // [D, kLanes]
  T lse_[kLanes] = {};
  int32_t low_[kLanes] = {}, high_[kLanes] = {};
};

template <class T>
void Pool(Context& ctx, const ConstTensorView& q, const ConstTensorView& k,
          const ConstTensorView& lse, const attention::Options& options,
          const TensorView& mean, const TensorView& max) {
  const int64_t Tq = q.size(1), Tk = k.size(1), Hq = q.size(2),
                group = Hq / k.size(2), rows = mean.size(2),
                columns = mean.size(3);
  std::vector<Row<T>> scratch(static_cast<size_t>(ctx.num_threads()),
                              Row<T>(q, k, options, columns));
  const auto wide = static_cast<size_t>(columns);
  std::vector<std::vector<double>> bins(scratch.size(),
                                        std::vector<double>(2 * wide));
  ctx.ParallelFor(Hq * rows, [&](int64_t task, int64_t worker) {
    const int64_t h = task / rows, row = task % rows;
    const int64_t first = BinBegin(row, rows, Tq),
                  end = BinBegin(row + 1, rows, Tq);
    double* const sums = bins[static_cast<size_t>(worker)].data();
    double* const largest = sums + columns;
    std::fill(sums, largest + columns, 0.0);
    for (int64_t i = first; i < end; i += kLanes) {
      scratch[static_cast<size_t>(worker)].Add(
          h, h / group, i, std::min(i + kLanes, end),
          lse.as<T>() + h * Tq + i, sums, largest);
    }
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t keys =
          BinBegin(c + 1, columns, Tk) - BinBegin(c, columns, Tk);
      const int64_t at = task * columns + c;
      mean.as<float>()[at] = static_cast<float>(
          sums[c] / static_cast<double>((end - first) * keys));
      max.as<float>()[at] = static_cast<float>(largest[c]);
    }
  });
}

}  // namespace

PooledMaps PoolAttention(Context& ctx, const ConstTensorView& q,
                         const ConstTensorView& k, const ConstTensorView& lse,
                         const attention::Options& options, int64_t rows,
                         int64_t columns) {
  const int64_t Hq = q.size(2);
  PooledMaps maps = {
      Buffer(DType::kF32, {1, Hq, rows, columns}, Placement::kAligned),
      Buffer(DType::kF32, {1, Hq, rows, columns}, Placement::kAligned)};
  if (q.dtype() == DType::kF64) {
    Pool<double>(ctx, q, k, lse, options, maps.mean.view(), maps.max.view());
  } else {
    Pool<float>(ctx, q, k, lse, options, maps.mean.view(), maps.max.view());
  }
  return maps;
}

}  // namespace heed::cli

// T5's relative position bias from its formulas, one pair at a time.
//
// Each pair's logarithm is computed in long double.
#include <cmath>
#include <cstdint>

#include "heed/ops/positions/t5_bias.h"

namespace heed {
namespace {

using Real = long double;

// floor((nb - m) ln(n / m) / ln(max_distance / m)), where a result that differs from an integer only by rounding counts
// as that integer.
int64_t Steps(int64_t n, int64_t m, int64_t nb, int64_t max_distance) {
  const Real ratio = std::log(static_cast<Real>(n) / static_cast<Real>(m)) /
                     std::log(static_cast<Real>(max_distance) / static_cast<Real>(m)) * static_cast<Real>(nb - m);
  const Real nearest = std::round(ratio);
  return static_cast<int64_t>(std::fabs(ratio - nearest) < Real{1e-13} * static_cast<Real>(nb) ? nearest
                                                                                               : std::floor(ratio));
}

int64_t Bucket(int64_t distance, int64_t buckets, T5Direction direction, int64_t max_distance) {
  int64_t nb = buckets, n = distance < 0 ? -distance : 0, offset = 0;
  if (direction == T5Direction::kBidirectional) {
    nb = buckets / 2;
    n = distance < 0 ? -distance : distance;
    offset = distance > 0 ? nb : 0;
  }
  const int64_t m = nb / 2;
  if (n < m) return offset + n;
  const int64_t bucket = m + Steps(n, m, nb, max_distance);
  return offset + (bucket < nb - 1 ? bucket : nb - 1);
}

// Calls f(h, i, j, bucket) for every pair.
template <class F>
void ForEachPair(const ConstTensorView& bias, int64_t buckets, T5Direction direction, const T5BiasOptions& options,
                 const F& f) {
  const int64_t Tq = bias.size(1), Tk = bias.size(2);
  for (int64_t h = 0; h < bias.size(0); ++h) {
    for (int64_t i = 0; i < Tq; ++i) {
      const int64_t position = options.top_left ? i : Tk - Tq + i;
      for (int64_t j = 0; j < Tk; ++j) {
        f(h, i, j, Bucket(j - position, buckets, direction, options.max_distance));
      }
    }
  }
}

int64_t Offset(const ConstTensorView& t, int64_t h, int64_t i, int64_t j) {
  return h * t.stride(0) + i * t.stride(1) + j * t.stride(2);
}

}  // namespace

void T5BiasReference(const ConstTensorView& table, T5Direction direction, const T5BiasOptions& options,
                     const TensorView& bias) {
  ForEachPair(bias, table.size(0), direction, options, [&](int64_t h, int64_t i, int64_t j, int64_t bucket) {
    const double value = LoadAsDouble(table.dtype(), table.data(), bucket * table.stride(0) + h * table.stride(1));
    StoreDouble(bias.dtype(), bias.data(), Offset(bias, h, i, j), value);
  });
}

void T5BiasBackwardReference(const ConstTensorView& dbias, T5Direction direction, const T5BiasOptions& options,
                             const TensorView& dtable) {
  const int64_t buckets = dtable.size(0);
  for (int64_t k = 0; k < buckets; ++k) {
    for (int64_t h = 0; h < dtable.size(1); ++h) {
      Real sum = 0;
      ForEachPair(dbias.Slice(0, h, h + 1), buckets, direction, options,
                  [&](int64_t, int64_t i, int64_t j, int64_t bucket) {
                    if (bucket != k) return;
                    sum += LoadAsDouble(dbias.dtype(), dbias.data(), Offset(dbias, h, i, j));
                  });
      StoreDouble(dtable.dtype(), dtable.data(), k * dtable.stride(0) + h * dtable.stride(1), static_cast<double>(sum));
    }
  }
}

}  // namespace heed

// Orthogonal random features from their definition, in long double: reflections as matrices.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/core/philox.h"
#include "heed/ops/linear/performer/orthogonal_features.h"

namespace heed {
namespace {

using Real = long double;
using Matrix = std::vector<std::vector<Real>>;

Real Deviate(uint64_t seed, uint32_t stream, uint32_t block, size_t j, size_t i) {
  const auto words = Philox({static_cast<uint32_t>(i / 2), static_cast<uint32_t>(j), block, stream},
                            {static_cast<uint32_t>(seed & 0xFFFFFFFFu), static_cast<uint32_t>(seed >> 32)});
  const auto uniform = [](uint32_t high, uint32_t low) {
    const uint64_t bits = high * (uint64_t{1} << 32) + low;
    return static_cast<Real>(bits / 2048) / 9007199254740992.0L;
  };
  const Real u = uniform(words[0], words[1]), v = uniform(words[2], words[3]);
  const Real angle = 8 * std::atan(Real{1}) * v;
  return std::sqrt(-2 * std::log(1 - u)) * (i % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

Matrix Product(const Matrix& a, const Matrix& b) {
  const size_t n = a.size();
  Matrix c(n, std::vector<Real>(n));
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) {
      for (size_t k = 0; k < n; ++k) c[i][j] += a[i][k] * b[k][j];
    }
  }
  return c;
}

// I - 2 v v^T / <v, v> that maps column k of `r`, from its diagonal on, to a multiple of the unit vector whose sign is
// opposite to the diagonal's.
Matrix Reflection(const Matrix& r, size_t k) {
  const size_t n = r.size();
  Matrix h(n, std::vector<Real>(n));
  for (size_t i = 0; i < n; ++i) h[i][i] = 1;
  if (k + 1 == n) return h;
  std::vector<Real> v(n);
  Real norm = 0, length = 0;
  for (size_t i = k; i < n; ++i) norm += r[i][k] * r[i][k];
  for (size_t i = k; i < n; ++i) v[i] = r[i][k];
  v[k] += r[k][k] < 0 ? -std::sqrt(norm) : std::sqrt(norm);
  for (const Real x : v) length += x * x;
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) h[i][j] -= 2 * v[i] * v[j] / length;
  }
  return h;
}

}  // namespace

void OrthogonalFeaturesReference(uint64_t seed, const OrthogonalFeaturesOptions& options, const TensorView& w) {
  const auto d = static_cast<size_t>(w.size(1));
  for (int64_t first = 0; first < w.size(0); first += w.size(1)) {
    const auto block = static_cast<uint32_t>(first / w.size(1));
    Matrix q(d, std::vector<Real>(d)), r = q;
    for (size_t i = 0; i < d; ++i) {
      q[i][i] = 1;
      for (size_t j = 0; j < d; ++j) r[i][j] = Deviate(seed, 0x80000000u, block, j, i);
    }
    for (size_t k = 0; k < d; ++k) {
      const Matrix h = Reflection(r, k);
      r = Product(h, r);
      q = Product(q, h);
    }
    for (size_t j = 0; j < d && first + static_cast<int64_t>(j) < w.size(0); ++j) {
      Real norm = static_cast<Real>(d);
      if (options.norms == FeatureNorms::kChi) {
        norm = 0;
        for (size_t i = 0; i < d; ++i) {
          const Real g = Deviate(seed, 0x80000001u, block, j, i);
          norm += g * g;
        }
      }
      const Real sign = options.haar_fix && r[j][j] < 0 ? -1 : 1;
      for (size_t i = 0; i < d; ++i) {
        StoreDouble(w.dtype(), w.data(),
                    (first + static_cast<int64_t>(j)) * w.stride(0) + static_cast<int64_t>(i) * w.stride(1),
                    static_cast<double>(sign * std::sqrt(norm) * q[i][j]));
      }
    }
  }
}

}  // namespace heed

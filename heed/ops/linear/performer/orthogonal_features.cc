// Orthogonal random features.
#include "heed/ops/linear/performer/orthogonal_features.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "heed/core/philox.h"
#include "heed/mechanism/check_internal.h"

namespace heed {
namespace {

using mechanism::Fail;

constexpr char kOp[] = "orthogonal_features";
constexpr int64_t kMostColumns = 4096;
constexpr uint32_t kDirections = 1u << 31, kNorms = kDirections + 1;

// The C library's logarithms and sines differ in the last bit between versions and CPUs, so they are series here. Their
// truncation error is below 1e-17.

// x is in (0, 1]. log(2^n f) = n log 2 + 2 atanh((f - 1) / (f + 1)), f in [0.7, 1.42).
double Log(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  int n = static_cast<int>(bits >> 52) - 1022;
  double f = std::bit_cast<double>((bits & ((uint64_t{1} << 52) - 1)) | 0x3FE0000000000000u);
  if (f < 0.7071067811865476) {
    f *= 2;
    --n;
  }
  const double s = (f - 1) / (f + 1), square = s * s;
  double sum = 0;
  for (int k = 21; k >= 1; k -= 2) sum = sum * square + 1.0 / k;
  return n * 0.6931471805599453 + 2 * s * sum;
}

// cos and sin of 2 pi v, v in [0, 1): series for at most an eighth of a turn, then the quadrant.
std::array<double, 2> CosSin(double v) {
  const double quarters = 4 * v;
  const int quarter = static_cast<int>(quarters + 0.5);
  const double x = (quarters - quarter) * 1.5707963267948966, square = x * x;
  double c = 0, s = 0;
  for (int k = 18; k >= 0; k -= 2) c = 1 - (k == 18 ? 0 : square * c / ((k + 1) * (k + 2)));
  for (int k = 19; k >= 1; k -= 2) s = 1 - (k == 19 ? 0 : square * s / ((k + 1) * (k + 2)));
  s *= x;
  switch (quarter % 4) {
    case 0: return {c, s};
    case 1: return {-s, c};
    case 2: return {-c, -s};
    default: return {s, -c};
  }
}

// d deviates for vector j of a block.
void Deviates(uint64_t seed, uint32_t stream, int64_t block, int64_t j, int64_t d, double* to) {
  const std::array<uint32_t, 2> key = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int64_t i = 0; i < d; i += 2) {
    const auto words =
        Philox({static_cast<uint32_t>(i / 2), static_cast<uint32_t>(j), static_cast<uint32_t>(block), stream}, key);
    const auto uniform = [&](size_t at) {
      const uint64_t bits = uint64_t{words[at]} << 32 | words[at + 1];
      return static_cast<double>(bits >> 11) * 0x1p-53;
    };
    const double radius = std::sqrt(-2 * Log(1 - uniform(0)));
    const auto [cosine, sine] = CosSin(uniform(2));
    to[i] = radius * cosine;
    if (i + 1 < d) to[i + 1] = radius * sine;
  }
}

double Dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// x -= tau <v, x> v over n elements.
void Reflect(const double* v, double tau, double* x, int64_t n) {
  const double factor = tau * Dot(v, x, n);
  for (int64_t i = 0; i < n; ++i) x[i] -= factor * v[i];
}

// The first `rows` columns of Q of one block's G. `columns` holds those of G: column j of the reflectors replaces
// column j of G from its diagonal on. tau and sign have one entry per column.
void DrawBlock(uint64_t seed, const OrthogonalFeaturesOptions& options, int64_t block, int64_t rows, int64_t d,
               double* columns, double* tau, double* x, const TensorView& w) {
  for (int64_t j = 0; j < rows; ++j) {
    double* a = columns + j * d;
    Deviates(seed, kDirections, block, j, d, a);
    for (int64_t k = 0; k < j; ++k) Reflect(columns + k * d + k, tau[k], a + k, d - k);
    const double norm = std::sqrt(Dot(a + j, a + j, d - j));
    // The last column has no elements below its diagonal to reflect.
    const bool reflects = j + 1 < d && norm > 0;
    const double diagonal = !reflects ? a[j] : a[j] < 0 ? norm : -norm;
    tau[j] = 0;
    if (reflects) {
      a[j] -= diagonal;  // no cancellation: the signs differ
      tau[j] = 2 / Dot(a + j, a + j, d - j);
    }

    std::fill_n(x, d, 0.0);
    x[j] = 1;
    for (int64_t k = j + 1; k-- > 0;) Reflect(columns + k * d + k, tau[k], x + k, d - k);
    double scale = std::sqrt(static_cast<double>(d));
    double* row = w.as<double>() + (block * d + j) * w.stride(0);
    if (options.norms == FeatureNorms::kChi) {
      double* g = x + d;
      Deviates(seed, kNorms, block, j, d, g);
      scale = std::sqrt(Dot(g, g, d));
    }
    if (options.haar_fix && diagonal < 0) scale = -scale;
    for (int64_t i = 0; i < d; ++i) row[i * w.stride(1)] = scale * x[i];
  }
}

}  // namespace

void OrthogonalFeatures(Context& ctx, uint64_t seed, const OrthogonalFeaturesOptions& options, const TensorView& w) {
  mechanism::CheckWritable(kOp, "w", w, "nothing", {});
  if (w.rank() != 2 || w.size(1) < 1 || w.size(1) > kMostColumns) {
    Fail(kOp, "w", "has shape " + w.ShapeString(), "[m, d] with 1 <= d <= " + std::to_string(kMostColumns));
  }
  if (w.dtype() != DType::kF64) {
    Fail(kOp, "w", std::string("has dtype ") + Name(w.dtype()), "f64");
  }
  const int64_t m = w.size(0), d = w.size(1);
  // Columns of G, their tau, a column of Q, a vector of norms.
  ctx.ReserveScratch((std::min(m, d) * (d + 1) + 2 * d) * int64_t{sizeof(double)});
  ctx.ParallelFor((m + d - 1) / d, [&](int64_t block, int worker) {
    const int64_t rows = std::min(d, m - block * d);
    auto* columns = static_cast<double*>(ctx.Scratch(worker));
    double* tau = columns + rows * d;
    DrawBlock(seed, options, block, rows, d, columns, tau, tau + rows, w);
  });
}

}  // namespace heed

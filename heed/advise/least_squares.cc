// Lawson and Hanson's active set method on the normal equations of scaled columns.
#include "heed/advise/least_squares.h"

#include <cmath>
#include <cstddef>

namespace heed::advise {
namespace {

using Vector = std::vector<double>;
using Matrix = std::vector<Vector>;

// Columns have length 1, so the threshold is relative to 1. A column whose remainder after projecting out earlier
// columns is smaller is linearly dependent.
constexpr double kDependent = 1e-8;
constexpr double kNoDescent = 1e-12;
constexpr size_t kMostRounds = 100;  // per unknown; about three are needed

// The inner products of A's columns, scaled to length 1, and their products with b.
struct Normal {
  Vector lengths;
  Matrix products;
  Vector with_b;
};

Normal NormalOf(const Matrix& A, const Vector& b) {
  const size_t n = A.empty() ? 0 : A[0].size();
  Normal normal = {Vector(n, 0.0), Matrix(n, Vector(n, 0.0)), Vector(n, 0.0)};
  for (size_t row = 0; row < A.size(); ++row) {
    for (size_t i = 0; i < n; ++i) normal.lengths[i] += A[row][i] * A[row][i];
  }
  for (double& length : normal.lengths) length = std::sqrt(length);
  const auto of = [&](size_t row, size_t i) { return normal.lengths[i] > 0 ? A[row][i] / normal.lengths[i] : 0; };
  for (size_t row = 0; row < A.size(); ++row) {
    for (size_t i = 0; i < n; ++i) {
      normal.with_b[i] += of(row, i) * b[row];
      for (size_t j = 0; j < n; ++j) normal.products[i][j] += of(row, i) * of(row, j);
    }
  }
  return normal;
}

// Solves for the unknowns of `set`, with the others 0, by Cholesky decomposition. False if a column depends on earlier
// ones.
bool Solve(const Normal& normal, const std::vector<size_t>& set, Vector& x) {
  const size_t n = set.size();
  Matrix L(n, Vector(n, 0.0));
  Vector y(n);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j <= i; ++j) {
      double sum = normal.products[set[i]][set[j]];
      for (size_t k = 0; k < j; ++k) sum -= L[i][k] * L[j][k];
      if (i != j) {
        L[i][j] = sum / L[j][j];
      } else if (sum <= kDependent) {
        return false;
      } else {
        L[i][i] = std::sqrt(sum);
      }
    }
    double sum = normal.with_b[set[i]];
    for (size_t k = 0; k < i; ++k) sum -= L[i][k] * y[k];
    y[i] = sum / L[i][i];
  }
  x.assign(normal.lengths.size(), 0.0);
  for (size_t i = n; i-- > 0;) {
    double sum = y[i];
    for (size_t k = i + 1; k < n; ++k) sum -= L[k][i] * x[set[k]];
    x[set[i]] = sum / L[i][i];
  }
  return true;
}

// The rate at which the sum of squares decreases with unknown i.
double Descent(const Normal& normal, const Vector& x, size_t i) {
  double descent = normal.with_b[i];
  for (size_t j = 0; j < x.size(); ++j) descent -= normal.products[i][j] * x[j];
  return descent;
}

// Moves from x, whose unknowns outside `set` are 0, towards the least squares solution of `set`, as far as all stay at
// 0 or more. Removes unknowns that reach 0 from the set and repeats until none does. False if `set` has a linearly
// dependent column.
bool Descend(const Normal& normal, std::vector<size_t>& set, Vector& x) {
  for (;;) {
    Vector target;
    if (!Solve(normal, set, target)) return false;
    double step = 1;
    size_t leaving = set.size();
    for (size_t at = 0; at < set.size(); ++at) {
      const size_t i = set[at];
      if (target[i] > 0) continue;
      const double part = x[i] > 0 ? x[i] / (x[i] - target[i]) : 0;
      if (leaving == set.size() || part < step) {
        step = part;
        leaving = at;
      }
    }
    if (leaving == set.size()) {
      x = target;
      return true;
    }
    for (const size_t i : set) x[i] += step * (target[i] - x[i]);
    x[set[leaving]] = 0;
    set.erase(set.begin() + static_cast<std::ptrdiff_t>(leaving));
    if (set.empty()) return true;
  }
}

}  // namespace

Vector NonNegativeLeastSquares(const Matrix& A, const Vector& b) {
  const Normal normal = NormalOf(A, b);
  const size_t n = normal.lengths.size();
  double size = 0;
  for (const double y : b) size += y * y;
  Vector x(n, 0.0);
  std::vector<size_t> set;
  std::vector<bool> is_out(n, false);  // tried since the last success
  for (size_t round = 0; round < kMostRounds * n; ++round) {
    size_t best = n;
    double fastest = kNoDescent * std::sqrt(size);
    for (size_t i = 0; i < n; ++i) {
      if (x[i] > 0 || is_out[i]) continue;
      const double descent = Descent(normal, x, i);
      if (descent > fastest) {
        fastest = descent;
        best = i;
      }
    }
    if (best == n) break;
    std::vector<size_t> larger = set;
    larger.push_back(best);
    Vector moved = x;
    if (Descend(normal, larger, moved) && moved[best] > 0) {
      x = moved;
      set = larger;
      is_out.assign(n, false);
    } else {
      is_out[best] = true;
    }
  }
  for (size_t i = 0; i < n; ++i) x[i] = normal.lengths[i] > 0 ? x[i] / normal.lengths[i] : 0;
  return x;
}

}  // namespace heed::advise

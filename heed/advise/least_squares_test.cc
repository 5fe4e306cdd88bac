// NonNegativeLeastSquares against every choice of nonzero unknowns, solved by elimination.
#include "heed/advise/least_squares.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace heed::advise {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;
using testing::Pointwise;
using Rows = std::vector<std::vector<double>>;

double SumOfSquares(const Rows& A, const std::vector<double>& b, const std::vector<double>& x) {
  double sum = 0;
  for (size_t row = 0; row < A.size(); ++row) {
    double difference = -b[row];
    for (size_t i = 0; i < x.size(); ++i) difference += A[row][i] * x[i];
    sum += difference * difference;
  }
  return sum;
}

// Gauss-Jordan elimination with pivoting; false for a singular matrix.
bool Eliminate(Rows M, std::vector<double> y, std::vector<double>& x) {
  const size_t n = y.size();
  for (size_t i = 0; i < n; ++i) {
    size_t pivot = i;
    for (size_t j = i; j < n; ++j) {
      if (std::abs(M[j][i]) > std::abs(M[pivot][i])) pivot = j;
    }
    if (std::abs(M[pivot][i]) < 1e-12) return false;
    std::swap(M[i], M[pivot]);
    std::swap(y[i], y[pivot]);
    for (size_t j = 0; j < n; ++j) {
      if (j == i) continue;
      const double factor = M[j][i] / M[i][i];
      for (size_t k = 0; k < n; ++k) M[j][k] -= factor * M[i][k];
      y[j] -= factor * y[i];
    }
  }
  for (size_t i = 0; i < n; ++i) x.push_back(y[i] / M[i][i]);
  return true;
}

// The least sum of squares over all choices with a non-negative solution.
double BestOfAllChoices(const Rows& A, const std::vector<double>& b, size_t n) {
  double best = std::numeric_limits<double>::infinity();
  for (size_t choice = 0; choice < size_t{1} << n; ++choice) {
    std::vector<size_t> set;
    for (size_t i = 0; i < n; ++i) {
      if (choice >> i & 1) set.push_back(i);
    }
    Rows M(set.size(), std::vector<double>(set.size(), 0.0));
    std::vector<double> y(set.size(), 0.0), solved, x(n, 0.0);
    for (size_t row = 0; row < A.size(); ++row) {
      for (size_t i = 0; i < set.size(); ++i) {
        y[i] += A[row][set[i]] * b[row];
        for (size_t j = 0; j < set.size(); ++j) M[i][j] += A[row][set[i]] * A[row][set[j]];
      }
    }
    if (!Eliminate(M, y, solved)) continue;
    if (std::ranges::any_of(solved, [](double value) { return value < 0; })) continue;
    for (size_t i = 0; i < set.size(); ++i) x[set[i]] = solved[i];
    best = std::min(best, SumOfSquares(A, b, x));
  }
  return best;
}

TEST(LeastSquaresTest, FindsUnknownsThatAreNotNegative) {
  const Rows A = {{1, 2, 0}, {0, 1, 5}, {3, 0, 1}, {1, 1, 1}};
  const std::vector<double> x = {2, 0.5, 3};
  std::vector<double> b;
  for (const auto& row : A) b.push_back(row[0] * x[0] + row[1] * x[1] + row[2] * x[2]);
  EXPECT_THAT(NonNegativeLeastSquares(A, b), Pointwise(DoubleNear(1e-12), x));
}

TEST(LeastSquaresTest, WhatWouldBeNegativeIsZero) {
  EXPECT_THAT(NonNegativeLeastSquares({{1, 0}, {0, 1}}, {3, -4}), ElementsAre(3, 0));
  // Without the second unknown, the first is no longer 4 but the best fit of both rows.
  const std::vector<double> x = NonNegativeLeastSquares({{1, 1}, {1, 2}}, {3, 2});
  EXPECT_DOUBLE_EQ(x[0], 2.5);
  EXPECT_EQ(x[1], 0);
}

TEST(LeastSquaresTest, NoChoiceOfUnknownsIsBetter) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  int clamped = 0;
  for (int problem = 0; problem < 300; ++problem) {
    const size_t n = 1 + random() % 6, rows = n + random() % 5;
    Rows A(rows, std::vector<double>(n));
    std::vector<double> b(rows);
    for (auto& row : A) {
      // Columns of very different magnitudes, like seconds per call and per flop.
      for (size_t i = 0; i < n; ++i) row[i] = std::abs(normal(random)) * std::pow(10, 3.0 * static_cast<double>(i));
    }
    for (double& y : b) y = 1 + 0.5 * normal(random);
    const std::vector<double> x = NonNegativeLeastSquares(A, b);
    ASSERT_EQ(x.size(), n);
    for (const double value : x) ASSERT_GE(value, 0);
    clamped += static_cast<int>(std::ranges::count(x, 0.0));
    const double best = BestOfAllChoices(A, b, n);
    ASSERT_NEAR(SumOfSquares(A, b, x), best, 1e-7 * (1 + best)) << problem;
  }
  EXPECT_GT(clamped, 100);
}

TEST(LeastSquaresTest, ColumnsThatSayTheSameAndNothing) {
  const std::vector<double> x = NonNegativeLeastSquares({{1, 1, 0}, {2, 2, 0}, {3, 3, 0}}, {2, 4, 6});
  EXPECT_DOUBLE_EQ(x[0] + x[1], 2);
  EXPECT_EQ(x[2], 0);
}

TEST(LeastSquaresTest, NothingToFit) {
  EXPECT_THAT(NonNegativeLeastSquares({}, {}), ElementsAre());
  EXPECT_THAT(NonNegativeLeastSquares({{1, 2}}, {0}), ElementsAre(0, 0));
  EXPECT_THAT(NonNegativeLeastSquares({{1, 2}}, {-1}), ElementsAre(0, 0));
}

}  // namespace
}  // namespace heed::advise

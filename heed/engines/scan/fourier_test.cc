// Convolutions by Fourier transforms agree with sums in double precision within the bound that
// fourier.h derives, on every target, at every length and for every part of it.
#include "heed/engines/scan/fourier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "heed/core/dispatch.h"

namespace heed::scan {
namespace {

template <class T>
std::vector<T> Normal(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) value = static_cast<T>(normal(random));
  return values;
}

// The spectra of blocks of x, each including its predecessor.
template <class T>
std::vector<std::vector<T>> Spectra(const FourierPlan<T>& plan, int64_t allowed_targets, std::vector<T> x,
                                    int64_t blocks) {
  x.resize(static_cast<size_t>(blocks * plan.n));
  std::vector<std::vector<T>> spectra;
  for (int64_t b = 0; b < blocks; ++b) {
    const T* block = x.data() + b * plan.n;
    spectra.emplace_back(static_cast<size_t>(plan.spectrum_size()), std::numeric_limits<T>::quiet_NaN());
    Spectrum(allowed_targets, plan, block, b == 0 ? nullptr : block - plan.n, spectra.back().data());
  }
  return spectra;
}

// The first `count` elements of the convolution of `a`, of any length, with b, of at most n elements.
template <class T>
std::vector<T> Convolved(const FourierPlan<T>& plan, int64_t allowed_targets, const std::vector<T>& a,
                         const std::vector<T>& b, int64_t count) {
  const int64_t blocks = (count + plan.n - 1) / plan.n;
  auto b_spectrum = Spectra(plan, allowed_targets, b, 1)[0];
  std::vector<T> y(static_cast<size_t>(blocks * plan.n), std::numeric_limits<T>::quiet_NaN());
  T* block = y.data();
  for (auto& spectrum : Spectra(plan, allowed_targets, a, blocks)) {
    Convolve(allowed_targets, plan, b_spectrum.data(), spectrum.data(), spectrum.data(), block);
    block += plan.n;
  }
  y.resize(static_cast<size_t>(count));
  return y;
}

template <class T>
std::vector<T> ReversedCopy(std::vector<T> x) {
  std::reverse(x.begin(), x.end());
  return x;
}

template <class T>
double Norm(const std::vector<T>& x) {
  double sum = 0;
  for (const T v : x) sum += static_cast<double>(v) * static_cast<double>(v);
  return std::sqrt(sum);
}

// The largest quotient of an error and its bound. Sums are in extended precision, so that their own errors are
// negligible.
template <class T>
double ErrorOverBound(const FourierPlan<T>& plan, const std::vector<T>& a, const std::vector<T>& b,
                      const std::vector<T>& y) {
  long double worst = 0;
  for (size_t t = 0; t < y.size(); ++t) {
    long double sum = 0;
    for (size_t s = t < b.size() ? 0 : t - b.size() + 1; s <= t && s < a.size(); ++s) {
      sum += static_cast<long double>(a[s]) * static_cast<long double>(b[t - s]);
    }
    const long double error = std::abs(sum - static_cast<long double>(y[t]));
    if (!(error <= worst)) worst = error;  // NaN propagates
  }
  const double unit = std::numeric_limits<T>::epsilon() / 2;
  const double bound = 13 * (std::log2(static_cast<double>(plan.n)) + 4) * unit * Norm(a) * Norm(b);
  return static_cast<double>(worst) / bound;
}

template <class T>
class FourierTest : public testing::Test {};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(FourierTest, Types);

TYPED_TEST(FourierTest, AgreesWithTheSumWithinTheBoundAtEveryLength) {
  for (const std::string& target : AvailableTargets()) {
    for (int64_t n = kMinFourierLength; n <= 8192; n *= 2) {
      const FourierPlan<TypeParam> plan(n);
      // All elements, one, numbers that are not multiples of a row, and several blocks.
      for (const auto& [la, lb, count] : {std::tuple(n, n, n),
                                          {n, int64_t{1}, n},
                                          {n - 3, n / 2 + 5, n - 7},
                                          {int64_t{19}, n, int64_t{1}},
                                          {2 * n + 21, n - 6, 2 * n + 30}}) {
        const auto a = Normal<TypeParam>(la, 1), b = Normal<TypeParam>(lb, 2);
        const auto y = Convolved(plan, TargetsUpTo(target), a, b, count);
        EXPECT_LE(ErrorOverBound(plan, a, b, y), 1) << target << " n " << n << " of " << la << " and " << lb;
      }
    }
  }
}

TYPED_TEST(FourierTest, AnImpulseShiftsAndNothingWrapsAround) {
  const int64_t n = 2048, shift = 700;
  const FourierPlan<TypeParam> plan(n);
  const auto x = Normal<TypeParam>(n, 3);
  std::vector<TypeParam> impulse(static_cast<size_t>(n));
  impulse[shift] = 1;
  const auto y = Convolved(plan, -1, impulse, x, n);
  const double unit = std::numeric_limits<TypeParam>::epsilon() / 2;
  const double bound = 13 * (std::log2(n) + 4) * unit * Norm(x);
  for (int64_t t = 0; t < n; ++t) {
    EXPECT_NEAR(y[t], t < shift ? 0 : x[t - shift], bound) << t;
  }
}

TYPED_TEST(FourierTest, SameBitsEveryTime) {
  const FourierPlan<TypeParam> plan(512), again(512);
  const auto a = Normal<TypeParam>(512, 4), b = Normal<TypeParam>(512, 5);
  EXPECT_EQ(Convolved(plan, -1, a, b, 512), Convolved(again, -1, a, b, 512));
}

TYPED_TEST(FourierTest, ProductsAddUpBeforeOneTransform) {
  const int64_t n = 512;
  const FourierPlan<TypeParam> plan(n);
  const auto a = Normal<TypeParam>(2 * n, 4), b = Normal<TypeParam>(n, 5);
  const auto a_spectra = Spectra(plan, -1, a, 2);
  const auto b_spectrum = Spectra(plan, -1, b, 1)[0];
  std::vector<TypeParam> sum(static_cast<size_t>(plan.spectrum_size())), y(static_cast<size_t>(n));
  for (const auto& spectrum : a_spectra) AddProduct(-1, plan, spectrum.data(), b_spectrum.data(), sum.data());
  Convolve(-1, plan, sum.data(), nullptr, sum.data(), y.data());
  const auto whole = Convolved(plan, -1, a, b, 2 * n);
  const double unit = std::numeric_limits<TypeParam>::epsilon() / 2;
  const double bound = 26 * (std::log2(n) + 4) * unit * Norm(a) * Norm(b);
  for (size_t t = 0; t < y.size(); ++t) EXPECT_NEAR(y[t], whole[t] + whole[t + y.size()], bound);
}

TYPED_TEST(FourierTest, GradientsAreReversedConvolutions) {
  const int64_t n = 512;
  const FourierPlan<TypeParam> plan(n);
  const auto u = Normal<TypeParam>(n, 6), k = Normal<TypeParam>(n, 7), dy = Normal<TypeParam>(n, 8);
  const auto du = Convolved(plan, -1, ReversedCopy(dy), k, n);
  const double unit = std::numeric_limits<TypeParam>::epsilon() / 2;
  const double bound = 13 * (std::log2(n) + 4) * unit * Norm(dy) * Norm(k);
  for (int64_t s = 0; s < n; ++s) {  // u_s contributes k_{t-s} to every y_t
    long double sum = 0;
    for (int64_t t = s; t < n; ++t) sum += static_cast<long double>(dy[t]) * k[t - s];
    EXPECT_NEAR(static_cast<double>(sum), du[n - 1 - s], bound) << s;
  }
  // <dy, k * u> = <du, u>, the same sum in another order.
  const auto y = Convolved(plan, -1, u, k, n);
  double left = 0, right = 0;
  for (int64_t t = 0; t < n; ++t) {
    left += static_cast<double>(dy[t]) * y[t];
    right += static_cast<double>(du[n - 1 - t]) * u[t];
  }
  // The Cauchy-Schwarz inequality bounds the difference by sqrt(n) times both error bounds.
  EXPECT_NEAR(left, right, 2 * std::sqrt(static_cast<double>(n)) * bound * Norm(u));
}

TYPED_TEST(FourierTest, ThreadsShareOnePlan) {
  constexpr int64_t kLength = 1 << 15;  // a length that no other test uses
  std::vector<const FourierPlan<TypeParam>*> plans(4);
  std::vector<std::thread> threads;
  for (auto& plan : plans) threads.emplace_back([&] { plan = &SharedPlan<TypeParam>(kLength); });
  for (std::thread& thread : threads) thread.join();
  for (const auto* plan : plans) EXPECT_EQ(plan, plans[0]);
  EXPECT_EQ(plans[0]->n, kLength);
  EXPECT_NE(plans[0], &SharedPlan<TypeParam>(2 * kLength));
}

}  // namespace
}  // namespace heed::scan

// Convolutions by Fourier transforms agree with sums in double precision within the bound that
// fourier.h derives, on every target, at every length and for every part of it.
#include "heed/engines/scan/fourier.h"

#include <gtest/gtest.h>

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

template <class T>
std::vector<T> Convolved(const FourierPlan<T>& plan, int64_t allowed_targets,
                         const std::vector<T>& a, const std::vector<T>& b, bool a_reversed,
                         int64_t count) {
  const auto size = static_cast<size_t>(plan.spectrum_size());
  const T nan = std::numeric_limits<T>::quiet_NaN();
  std::vector<T> fa(size, nan), fb(size, nan), y(static_cast<size_t>(count), nan);
  Spectrum(allowed_targets, plan, a.data(), static_cast<int64_t>(a.size()), a_reversed, fa.data());
  Spectrum(allowed_targets, plan, b.data(), static_cast<int64_t>(b.size()), false, fb.data());
  Convolve(allowed_targets, plan, fa.data(), fb.data(), count, fb.data(), y.data());
  return y;
}

template <class T>
double Norm(const std::vector<T>& x) {
  double sum = 0;
  for (const T v : x) sum += static_cast<double>(v) * static_cast<double>(v);
  return std::sqrt(sum);
}

// The largest error over the bound. In extended precision, so that the sum itself is no part of
// the error of a transform in double precision.
template <class T>
double ErrorOverBound(const FourierPlan<T>& plan, const std::vector<T>& a, const std::vector<T>& b,
                      bool a_reversed, const std::vector<T>& y) {
  long double worst = 0;
  for (size_t t = 0; t < y.size(); ++t) {
    long double sum = 0;
    for (size_t s = 0; s <= t && s < a.size(); ++s) {
      if (t - s >= b.size()) continue;
      const T as = a[a_reversed ? a.size() - 1 - s : s];
      sum += static_cast<long double>(as) * static_cast<long double>(b[t - s]);
    }
    const long double error = std::abs(sum - static_cast<long double>(y[t]));
    if (!(error <= worst)) worst = error;  // a NaN stays
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
      // Whole, one element, and sizes that are no multiple of a row.
      for (const auto& [la, lb, count, reversed] :
           {std::tuple(n, n, n, false), {n, int64_t{1}, n, true}, {n - 3, n / 2 + 5, n - 7, true},
            {int64_t{19}, n, int64_t{1}, false}}) {
        const auto a = Normal<TypeParam>(la, 1), b = Normal<TypeParam>(lb, 2);
        const auto y = Convolved(plan, TargetsUpTo(target), a, b, reversed, count);
        EXPECT_LE(ErrorOverBound(plan, a, b, reversed, y), 1)
            << target << " n " << n << " of " << la << " and " << lb;
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
  const auto y = Convolved(plan, -1, impulse, x, false, n);
  const double unit = std::numeric_limits<TypeParam>::epsilon() / 2;
  const double bound = 13 * (std::log2(n) + 4) * unit * Norm(x);
  for (int64_t t = 0; t < n; ++t) {
    EXPECT_NEAR(y[t], t < shift ? 0 : x[t - shift], bound) << t;
  }
}

TYPED_TEST(FourierTest, SameBitsEveryTimeAndOnlyTheCountIsWritten) {
  const FourierPlan<TypeParam> plan(512), again(512);
  const auto a = Normal<TypeParam>(512, 4), b = Normal<TypeParam>(512, 5);
  const auto whole = Convolved(plan, -1, a, b, false, 512);
  const auto part = Convolved(again, -1, a, b, false, 77);
  for (size_t t = 0; t < part.size(); ++t) EXPECT_EQ(whole[t], part[t]) << t;
}

TYPED_TEST(FourierTest, GradientsAreConvolutionsOfWhatIsReadFromItsEnd) {
  const int64_t n = 512;
  const FourierPlan<TypeParam> plan(n);
  const auto u = Normal<TypeParam>(n, 6), k = Normal<TypeParam>(n, 7), dy = Normal<TypeParam>(n, 8);
  const auto du = Convolved(plan, -1, dy, k, true, n);
  const double unit = std::numeric_limits<TypeParam>::epsilon() / 2;
  const double bound = 13 * (std::log2(n) + 4) * unit * Norm(dy) * Norm(k);
  for (int64_t s = 0; s < n; ++s) {  // u_s contributes k_{t-s} to every y_t
    long double sum = 0;
    for (int64_t t = s; t < n; ++t) sum += static_cast<long double>(dy[t]) * k[t - s];
    EXPECT_NEAR(static_cast<double>(sum), du[n - 1 - s], bound) << s;
  }
  // <dy, k * u> = <du, u>, the same sum in another order.
  const auto y = Convolved(plan, -1, u, k, false, n);
  double left = 0, right = 0;
  for (int64_t t = 0; t < n; ++t) {
    left += static_cast<double>(dy[t]) * y[t];
    right += static_cast<double>(du[n - 1 - t]) * u[t];
  }
  // By Cauchy and Schwarz, twice: sqrt(n) times the bounds of both is what their norms are off by.
  EXPECT_NEAR(left, right, 2 * std::sqrt(static_cast<double>(n)) * bound * Norm(u));
}

TYPED_TEST(FourierTest, ThreadsShareOnePlan) {
  constexpr int64_t kLength = 1 << 15;  // a length that no other test asks for
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

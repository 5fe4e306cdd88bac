// Reverse numbers: gradients beside differences of values.
#include "heed/mechanism/reference/reverse_number_internal.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "heed/mechanism/reference/reference_array_internal.h"

namespace heed::mechanism {
namespace {

// Uses every function of the number, some variables several times, and constants on both sides.
template <class Number>
Number Everything(const std::vector<Number>& x) {
  using std::abs;
  using std::exp;
  using std::expm1;
  using std::log1p;
  Number sum = 2 * x[0] - x[1] / 3;
  sum += x[0] * x[1] + exp(-x[2]) / x[1];
  sum -= log1p(exp(x[0])) * abs(x[2] - 4);
  sum *= expm1(x[1]) + 1.5;
  sum /= 1 + x[2] * x[2];
  return sum + Softplus(x[2]) * Sigmoid(x[0] - 3);
}

TEST(ReverseNumberTest, GradientsAreThoseOfDifferences) {
  const std::vector<double> at = {0.7, -1.3, 2.1};
  Tape tape;
  for (int pass = 0; pass < 2; ++pass) {  // the second on a tape that was used
    tape.Clear();
    std::vector<Reverse> x;
    for (const double value : at) x.push_back(tape.Variable(value));
    const Reverse y = Everything(x);
    EXPECT_DOUBLE_EQ(y.value, Everything(at));
    tape.Seed(y, 0.5);
    tape.Seed(y, 1.5);
    tape.Backward();
    for (size_t i = 0; i < at.size(); ++i) {
      std::vector<double> more = at, less = at;
      more[i] += 1e-5;
      less[i] -= 1e-5;
      EXPECT_NEAR(tape.Gradient(x[i]), 2 * (Everything(more) - Everything(less)) / 2e-5, 1e-8) << i;
    }
  }
}

TEST(ReverseNumberTest, AVariableThatNothingReadsHasNoGradient) {
  Tape tape;
  const Reverse x = tape.Variable(3), unread = tape.Variable(4);
  tape.Seed(x, 7);
  tape.Backward();
  EXPECT_EQ(tape.Gradient(x), 7);
  EXPECT_EQ(tape.Gradient(unread), 0);
}

TEST(ReverseNumberTest, AValueIsAConstant) {
  Tape tape;
  const Reverse x = tape.Variable(3), y = x * ValueOf(x);
  EXPECT_EQ(ValueOf(y), 9);
  EXPECT_EQ(ValueOf(2.5), 2.5);
  tape.Seed(y, 1);
  tape.Backward();
  EXPECT_EQ(tape.Gradient(x), 3);
}

TEST(ReverseNumberTest, ConstantsStayOffTheTape) {
  const Reverse y = exp(Reverse(1)) * 2 + Reverse(3) / 4;
  EXPECT_EQ(y.tape, nullptr);
  EXPECT_DOUBLE_EQ(y.value, std::exp(1.0) * 2 + 0.75);
}

TEST(ReverseNumberTest, SigmoidAndSoftplusHaveFiniteGradientsEverywhere) {
  for (const double at : {-1e4, -800.0, -1.0, 0.0, 1.0, 800.0, 1e4}) {
    Tape tape;
    const Reverse x = tape.Variable(at);
    const Reverse sigmoid = Sigmoid(x), softplus = Softplus(x);
    tape.Seed(softplus, 1);
    tape.Backward();
    EXPECT_NEAR(tape.Gradient(x), sigmoid.value, 1e-15) << at;
    EXPECT_TRUE(std::isfinite(softplus.value)) << at;
  }
}

}  // namespace
}  // namespace heed::mechanism

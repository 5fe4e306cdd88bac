// Numbers with bounds of their rounding errors, for tolerances of operations without a closed error bound.
#ifndef HEED_MECHANISM_REFERENCE_RUNNING_ERROR_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_RUNNING_ERROR_INTERNAL_H_

#include <cmath>
#include <cstddef>

namespace heed::mechanism {

// A value, and a bound of the first-order error of its computation per unit of relative error of each operation
// (Wilkinson's running error analysis). A reference that is a template computes both at once. Sums count the magnitudes
// of their terms instead of that of the sum, so that the bound holds for every order of summation.
struct Bounded {
  double value = 0, error = 0;

  Bounded() = default;
  Bounded(double exact) : value(exact) {}  // NOLINT: an input
  Bounded(double v, double e) : value(v), error(e) {}

  friend Bounded operator-(const Bounded& a) { return {-a.value, a.error}; }
  friend Bounded operator+(const Bounded& a, const Bounded& b) {
    return {a.value + b.value, a.error + b.error + std::abs(a.value) + std::abs(b.value)};
  }
  friend Bounded operator-(const Bounded& a, const Bounded& b) { return a + -b; }
  friend Bounded operator*(const Bounded& a, const Bounded& b) {
    const double product = a.value * b.value;
    return {product, std::abs(a.value) * b.error + a.error * std::abs(b.value) + std::abs(product)};
  }
  friend Bounded operator/(const Bounded& a, const Bounded& b) {
    const double quotient = a.value / b.value;
    return {quotient, (a.error + std::abs(quotient) * b.error) / std::abs(b.value) + std::abs(quotient)};
  }
  Bounded& operator+=(const Bounded& b) { return *this = *this + b; }
  Bounded& operator-=(const Bounded& b) { return *this = *this - b; }
};

inline double Root(double a) { return std::sqrt(a); }
inline Bounded Root(const Bounded& a) {
  const double root = std::sqrt(a.value);
  return {root, root == 0 ? 0 : a.error / (2 * root) + root};
}

// sum_i term(i). The rounding errors of n terms are at most n units of the sum of their magnitudes, in any order.
template <class R, class F>
R Sum(size_t n, const F& term) {
  if constexpr (requires(R r) { r.error; }) {
    double value = 0, error = 0, magnitude = 0;
    for (size_t i = 0; i < n; ++i) {
      const R x = term(i);
      value += x.value;
      error += x.error;
      magnitude += std::abs(x.value);
    }
    return {value, error + static_cast<double>(n) * magnitude};
  } else {
    R sum = 0;
    for (size_t i = 0; i < n; ++i) sum += term(i);
    return sum;
  }
}

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_REFERENCE_RUNNING_ERROR_INTERNAL_H_

// Readable references are written with arrays of numbers, a row or a state each, and functions of them.
#ifndef HEED_MECHANISM_REFERENCE_REFERENCE_ARRAY_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_REFERENCE_ARRAY_INTERNAL_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "heed/mechanism/reference/reverse_number_internal.h"

namespace heed::mechanism {

// The letters of heads, or channels, and of heads that several of those share, 0 where there are none; and the axes of
// o.
struct ReadableForm {
  char heads = 'G', shared_heads = 'H';
  const char* o = "BTGV";
};

// Row-major, with any number of axes flattened into rows but for the last, which has `columns()` elements.
template <class Number>
class Array {
 public:
  Array() = default;
  explicit Array(size_t size) : values_(size, Number(0)), columns_(size) {}
  Array(size_t size, size_t columns) : values_(size, Number(0)), columns_(columns) {}

  size_t size() const { return values_.size(); }
  size_t columns() const { return columns_; }
  size_t rows() const { return columns_ == 0 ? 0 : values_.size() / columns_; }

  Number& operator[](size_t i) { return values_[i]; }
  const Number& operator[](size_t i) const { return values_[i]; }
  Number& operator()(size_t i, size_t j) { return values_[i * columns_ + j]; }
  const Number& operator()(size_t i, size_t j) const { return values_[i * columns_ + j]; }

 private:
  std::vector<Number> values_;
  size_t columns_ = 0;
};

template <class Number>
Array<Number> Exp(const Array<Number>& x) {
  using std::exp;
  Array<Number> y(x.size(), x.columns());
  for (size_t i = 0; i < x.size(); ++i) y[i] = exp(x[i]);
  return y;
}

// Removes the first elements of `latest`, as many as x has, and appends x.
template <class Number>
void ShiftIn(const Array<Number>& x, Array<Number>& latest) {
  const size_t kept = latest.size() < x.size() ? 0 : latest.size() - x.size();
  for (size_t i = 0; i < kept; ++i) latest[i] = latest[i + x.size()];
  for (size_t i = kept; i < latest.size(); ++i) latest[i] = x[i - kept];
}

// log(1 + exp(x)), and 1 / (1 + exp(-x)): no exponential has a positive argument.
template <class Number>
Number Softplus(const Number& x) {
  using std::exp;
  using std::log1p;
  return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

template <class Number>
Number Sigmoid(const Number& x) {
  using std::exp;
  return exp(-Softplus(-x));
}

// max(x, 0), whose slope at 0 is 0. NaN stays NaN.
template <class Number>
Number Relu(const Number& x) {
  return x > 0 ? x : Number(x < 0 ? 0 : ValueOf(x));
}

// The largest element, as a constant.
template <class Number>
double Largest(const Array<Number>& x) {
  double largest = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < x.size(); ++i) largest = std::max(largest, ValueOf(x[i]));
  return largest;
}

// exp(x) over the sum of all exp(x).
template <class Number>
Array<Number> Softmax(const Array<Number>& x) {
  using std::exp;
  const double largest = Largest(x);  // cancels
  Array<Number> y(x.size(), x.columns());
  Number sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += y[i] = exp(x[i] - largest);
  for (size_t i = 0; i < x.size(); ++i) y[i] /= sum;
  return y;
}

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_REFERENCE_REFERENCE_ARRAY_INTERNAL_H_

// Complex numbers of readable references, as pairs of real ones.
#ifndef HEED_MECHANISM_REFERENCE_REFERENCE_COMPLEX_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_REFERENCE_COMPLEX_INTERNAL_H_

#include <cmath>
#include <complex>

#include "heed/mechanism/reference/reference_array_internal.h"
#include "heed/mechanism/reference/reverse_number_internal.h"

namespace heed::mechanism {

template <class Number>
struct Complex {
  Number re = 0, im = 0;

  friend Complex operator+(const Complex& x, const Complex& y) { return {x.re + y.re, x.im + y.im}; }
  friend Complex operator*(const Number& x, const Complex& y) { return {x * y.re, x * y.im}; }
  friend Complex operator*(const Complex& x, const Complex& y) {
    return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
  }
  friend Complex operator/(const Complex& x, const Complex& y) {
    const Number square = y.re * y.re + y.im * y.im;
    return {(x.re * y.re + x.im * y.im) / square, (x.im * y.re - x.re * y.im) / square};
  }
};

// Rows of arrays with two columns, real and imaginary parts.
template <class Number>
Complex<Number> ComplexAt(const Array<Number>& x, size_t row) {
  return {x(row, 0), x(row, 1)};
}
template <class Number>
void PutComplex(const Complex<Number>& value, Array<Number>& to, size_t row) {
  to(row, 0) = value.re;
  to(row, 1) = value.im;
}

// An analytic function of z, given its value and its derivative there.
inline Complex<double> Analytic(const Complex<double>&, std::complex<double> value, std::complex<double>) {
  return {value.real(), value.imag()};
}
inline Complex<Reverse> Analytic(const Complex<Reverse>& z, std::complex<double> value, std::complex<double> slope) {
  return {Binary(value.real(), z.re, slope.real(), z.im, -slope.imag()),
          Binary(value.imag(), z.re, slope.imag(), z.im, slope.real())};
}
inline std::complex<double> ValueOf(const Complex<double>& z) { return {z.re, z.im}; }
inline std::complex<double> ValueOf(const Complex<Reverse>& z) { return {z.re.value, z.im.value}; }

template <class Number>
Complex<Number> Exp(const Complex<Number>& z) {
  const std::complex<double> value = std::exp(ValueOf(z));
  return Analytic(z, value, value);
}

// (e^z - 1) / z, and its derivative, by their series where the quotients would cancel.
template <class Number>
Complex<Number> MeanExp(const Complex<Number>& of) {
  const std::complex<double> z = ValueOf(of);
  if (std::abs(z) >= 2) {
    const std::complex<double> mean = (std::exp(z) - 1.0) / z;
    return Analytic(of, mean, (std::exp(z) - mean) / z);
  }
  std::complex<double> mean = 0, slope = 0, term = 1;  // z^k / (k + 1)!
  for (int k = 0; k < 40; ++k) {
    mean += term;
    slope += (k + 1.0) / (k + 2) * term;
    term *= z / (k + 2.0);
  }
  return Analytic(of, mean, slope);
}

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_REFERENCE_REFERENCE_COMPLEX_INTERNAL_H_

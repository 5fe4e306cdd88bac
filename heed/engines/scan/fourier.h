// Causal convolution of two real sequences by Fourier transforms.
//
//   y_t = sum_{s <= t} a_s b_{t-s}      for 0 <= t < n
//
// A product of two real polynomials modulo z^n - i has its low n coefficients in the real part and
// those that would wrap around in the imaginary one. So n complex numbers hold what needs 2 n real
// ones: there is no padding and no splitting of a spectrum into those of two sequences. With
// z = w x, w = exp(i pi / (2 n)), the product is modulo x^n - 1, which is what a transform of
// length n computes.
//
// Element t is lane t % 16 of row t / 16: a transform along the rows of each lane, turns, and a
// transform of 16 across the lanes, on every target, so every target does the same operations.
// The spectrum stays in the order in which this leaves it.
//
// A sequence longer than n is convolved with n taps in blocks of n: what block x takes from the one
// before it wraps around in the product of that one, so x - i times it is transformed instead of x.
//
// Gradients are convolutions too, with dy read from its end: those with b and with a give da and
// db, each from its end.
//
// Error, with u the unit roundoff of T: of each element of y at most 13 (log2 n + 4) u |a|_2 |b|_2.
// Each element is a sum over paths of log2 n butterflies and at most 4 other products, each with
// a relative error of at most (2 + sqrt 5) u (an addition, a complex product, a rounded root), in
// three transforms; by Cauchy and Schwarz the absolute values of the paths sum to |a|_2 |b|_2.
#ifndef HEED_ENGINES_SCAN_FOURIER_H_
#define HEED_ENGINES_SCAN_FOURIER_H_

#include <cstdint>
#include <vector>

namespace heed::scan {

inline constexpr int64_t kFourierLanes = 16;
inline constexpr int64_t kMinFourierLength = kFourierLanes * kFourierLanes;

// The roots of unity that transforms of one length need, computed in double precision. T is float
// or double. Read-only once made: threads share one.
template <class T>
struct FourierPlan {
  // n: a power of two, at least kMinFourierLength.
  explicit FourierPlan(int64_t n);

  int64_t spectrum_size() const { return 2 * n; }

  int64_t n;
  int64_t rows;                  // n / 16
  std::vector<T> lane_weight;    // w^l: [2, 16]; real parts first, here and below
  std::vector<T> row_weight;     // w^(16 j): [rows, 2]
  std::vector<T> stages;         // of radix 4, from the largest: [quarter, 3, 2] each
  std::vector<T> short_stages;   // those of 16 rows
  std::vector<T> lane_twiddles;  // what each row of a transposed tile shares: [rows / 16, 16, 2]
  std::vector<T> tile_twiddles;  // what all tiles share: [16, 2, 16]
};

// The plan of length n that all calls share: kept until the process ends, about 3 n / 8 elements.
// Allocates when it is the first of its length, so not for use inside of parallel regions. Takes
// no lock, so neither threads nor forked children wait for anybody.
template <class T>
const FourierPlan<T>& SharedPlan(int64_t n);

// The spectrum of x, of n elements, minus i times that of the n before it; null: zeros.
void Spectrum(int64_t allowed_targets, const FourierPlan<float>& plan, const float* x, const float* before,
              float* spectrum);
void Spectrum(int64_t allowed_targets, const FourierPlan<double>& plan, const double* x, const double* before,
              double* spectrum);

// sum += a b, of spectra.
void AddProduct(int64_t allowed_targets, const FourierPlan<float>& plan, const float* a, const float* b, float* sum);
void AddProduct(int64_t allowed_targets, const FourierPlan<double>& plan, const double* a, const double* b,
                double* sum);

// y, of n elements, of the sequences whose spectra are a and b; of a alone where b is null. scratch,
// of a spectrum's size, may be a or b.
void Convolve(int64_t allowed_targets, const FourierPlan<float>& plan, const float* a, const float* b, float* scratch,
              float* y);
void Convolve(int64_t allowed_targets, const FourierPlan<double>& plan, const double* a, const double* b,
              double* scratch, double* y);

}  // namespace heed::scan

#endif  // HEED_ENGINES_SCAN_FOURIER_H_

// Causal convolution of two real sequences by Fourier transforms.
//
//   y_t = sum_{s <= t} a_s b_{t-s}      for 0 <= t < n
//
// The product of two real polynomials modulo z^n - i has its low n coefficients in the real part, and the coefficients
// that would wrap around in the imaginary part (a right-angle convolution). So n complex numbers suffice for 2 n real
// ones, without padding and without separating the spectra of two sequences. With z = w x, w = exp(i pi / (2 n)), the
// product is modulo x^n - 1, which a transform of length n computes: elements are multiplied by weights w^t before it.
//
// Element t is lane t % 16 of row t / 16. A transform runs along the rows of each lane, then twiddle factors are
// applied, then a transform of 16 runs across the lanes. All targets do the same operations. The spectrum stays in the
// order in which the transform leaves it.
//
// A sequence longer than n is convolved with n taps in blocks of n. What block x takes from its predecessor p is the
// wrapped part of p's product, so that x - i p is transformed instead of x.
//
// Gradients are convolutions of dy, reversed in time, with b and with a, which give da and db, both reversed.
//
// Error bound, with u the unit roundoff of T: 13 (log2 n + 4) u |a|_2 |b|_2 for each element of y. Each element is a
// sum over paths of log2 n butterflies and at most 4 other products, each with a relative error of at most (2 + sqrt 5)
// u (an addition, a complex product, a rounded root), in three transforms; by the Cauchy-Schwarz inequality the
// absolute values of the paths sum to at most |a|_2 |b|_2.
#ifndef HEED_ENGINES_SCAN_FOURIER_H_
#define HEED_ENGINES_SCAN_FOURIER_H_

#include <cstdint>
#include <vector>

namespace heed::scan {

inline constexpr int64_t kFourierLanes = 16;
inline constexpr int64_t kMinFourierLength = kFourierLanes * kFourierLanes;

// The roots of unity for transforms of one length, computed in double precision. T is float or double. A plan is
// constant after construction, and threads share it.
template <class T>
struct FourierPlan {
  // n must be a power of two and at least kMinFourierLength.
  explicit FourierPlan(int64_t n);

  int64_t spectrum_size() const { return 2 * n; }

  int64_t n;
  int64_t rows;                  // n / 16
  std::vector<T> lane_weight;    // w^l: [2, 16]; real parts first, here and below
  std::vector<T> row_weight;     // w^(16 j): [rows, 2]
  std::vector<T> stages;         // roots of radix-4 stages, the largest first: [quarter, 3, 2] each
  std::vector<T> short_stages;   // roots of the stages of 16 rows
  std::vector<T> lane_twiddles;  // the factor of each row of a transposed tile: [rows / 16, 16, 2]
  std::vector<T> tile_twiddles;  // the factors that all tiles share: [16, 2, 16]
};

// The plan of length n that all calls share. It has about 3 n / 8 elements and exists until the process ends. The first
// call for a length allocates, so this must not be called inside parallel regions. It takes no lock, so that neither
// threads nor forked processes can wait for each other.
template <class T>
const FourierPlan<T>& SharedPlan(int64_t n);

// Computes the spectrum of x - i `before`, both of n elements; null: zeros.
void Spectrum(int64_t allowed_targets, const FourierPlan<float>& plan, const float* x, const float* before,
              float* spectrum);
void Spectrum(int64_t allowed_targets, const FourierPlan<double>& plan, const double* x, const double* before,
              double* spectrum);

// sum += a b, for spectra.
void AddProduct(int64_t allowed_targets, const FourierPlan<float>& plan, const float* a, const float* b, float* sum);
void AddProduct(int64_t allowed_targets, const FourierPlan<double>& plan, const double* a, const double* b,
                double* sum);

// Computes the convolution y, of n elements, of the sequences with spectra a and b, or the sequence with spectrum a if
// b is null. `scratch`, of a spectrum's size, may be a or b.
void Convolve(int64_t allowed_targets, const FourierPlan<float>& plan, const float* a, const float* b, float* scratch,
              float* y);
void Convolve(int64_t allowed_targets, const FourierPlan<double>& plan, const double* a, const double* b,
              double* scratch, double* y);

}  // namespace heed::scan

#endif  // HEED_ENGINES_SCAN_FOURIER_H_

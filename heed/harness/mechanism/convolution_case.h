// The rounding error of a convolution on the scan engine, a channel at a time.
#ifndef HEED_HARNESS_MECHANISM_CONVOLUTION_CASE_H_
#define HEED_HARNESS_MECHANISM_CONVOLUTION_CASE_H_

#include <cstddef>
#include <cstdint>

#include "heed/harness/mechanism/scanning_case.h"

namespace heed::scanning {

// sum_s |taps[s] x[t - s]| for the first `count` tokens t.
Doubles ConvolvedMagnitudes(const Doubles& taps, const Doubles& x, size_t count);

// The errors of a convolution of x with its taps, the first of num_taps, plus D x: chains of sums, or FFT blocks that
// see two blocks. With `from_end`, zeros before the sequence complete its first block.
Doubles ConvolutionErrors(const Doubles& taps, const Doubles& x, double D, int64_t num_taps, bool from_end, double u);

// The errors of the gradients of these taps: chunks of 128 products, which are added in f64, or as many blocks as one
// FFT sums.
Doubles TapErrors(const Doubles& x, const Doubles& dy, size_t taps, int64_t num_taps, bool is_f64, double u);

}  // namespace heed::scanning

#endif  // HEED_HARNESS_MECHANISM_CONVOLUTION_CASE_H_

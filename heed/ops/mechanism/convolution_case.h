// How far rounding may take a convolution on the scan engine, a channel at a time.
#ifndef HEED_OPS_MECHANISM_CONVOLUTION_CASE_H_
#define HEED_OPS_MECHANISM_CONVOLUTION_CASE_H_

#include <cstddef>
#include <cstdint>

#include "heed/ops/mechanism/scanning_reference_internal.h"

namespace heed::scanning {

// sum_s |taps[s] x[t - s]|, for the first `count` of t.
Doubles ConvolvedMagnitudes(const Doubles& taps, const Doubles& x, size_t count);

// How far a convolution of x with the taps that it meets, of num_taps, and D x may be off: chains of sums, or blocks
// that see two blocks. What is read from its end is completed by zeros before it.
Doubles ConvolutionErrors(const Doubles& taps, const Doubles& x, double D, int64_t num_taps, bool from_end, double u);

// How far the gradients of those taps may be off: chunks of 128 products, which f64 adds up in f64 too, or as many
// blocks' as one transform adds up.
Doubles TapErrors(const Doubles& x, const Doubles& dy, size_t taps, int64_t num_taps, bool is_f64, double u);

}  // namespace heed::scanning

#endif  // HEED_OPS_MECHANISM_CONVOLUTION_CASE_H_

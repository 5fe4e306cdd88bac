// Decays and rates.
#ifndef HEED_ENGINES_SCAN_CUDA_FUNCTIONS_H_
#define HEED_ENGINES_SCAN_CUDA_FUNCTIONS_H_

#include <cmath>

#include "heed/cuda/machine.h"
#include "heed/cuda/numbers.h"

namespace heed::scan::cuda {

inline constexpr float kLog2E = 1.44269502f, kLn2 = 0.693147181f;

// A decay factor, or, near 1, the factor minus 1: a factor of .999 rounded to f32 would add a thousand roundings to a
// state over time.
struct Decay {
  float factor;
  bool beside_one;
};

// Returns 2^t. For |t| < 1/2 it is the minimax polynomial of (2^t - 1) / t, within 1.1e-8; beyond, the 2 ulp of Exp2
// are no more than the rounding of t.
template <class M>
HEED_DEVICE Decay DecayOf(float t) {
  float p = 1.54035122e-4f * t + 1.33907353e-3f;
  p = p * t + 9.61823761e-3f;
  p = p * t + 5.55035733e-2f;
  p = p * t + 0.240226492f;
  p = p * t + 0.693147182f;
  const float near = t * p, far = M::Exp2(t);  // computes both, because divergent threads would take longer
  const bool is_near = fabsf(t) < 0.5f;
  return {is_near ? near : far, is_near};
}
HEED_DEVICE float Decayed(Decay decay, float x) { return decay.factor * x + (decay.beside_one ? x : 0.0f); }

// Returns A log2 e, bounded below so that its product with 0 is 0.
HEED_DEVICE float RateOf(float A) {
  const float rate = A * kLog2E;
  return rate < -1e15f ? -1e15f : rate;  // NaN stays
}

using heed::cuda::Sigmoids;
using heed::cuda::SigmoidsOf;
using heed::cuda::Softplus;

}  // namespace heed::scan::cuda

#endif  // HEED_ENGINES_SCAN_CUDA_FUNCTIONS_H_

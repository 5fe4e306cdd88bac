// Functions of numbers: decays and rates.
#ifndef HEED_ENGINES_SCAN_CUDA_FUNCTIONS_H_
#define HEED_ENGINES_SCAN_CUDA_FUNCTIONS_H_

#include <cmath>

#include "heed/cuda/machine.h"
#include "heed/cuda/numbers.h"

namespace heed::scan::cuda {

inline constexpr float kLog2E = 1.44269502f, kLn2 = 0.693147181f;

// A factor, or where it is near 1 what it is more than that: rounded as a factor, .999 would take a state off by a
// thousand roundings.
struct Decay {
  float factor;
  bool beside_one;
};

// 2^t. For |t| < 1/2 the minimax polynomial of (2^t - 1) / t, within 1.1e-8; beyond, 2 ulp of a factor are no more than
// what rounding t has done.
template <class M>
HEED_DEVICE Decay DecayOf(float t) {
  float p = 1.54035122e-4f * t + 1.33907353e-3f;
  p = p * t + 9.61823761e-3f;
  p = p * t + 5.55035733e-2f;
  p = p * t + 0.240226492f;
  p = p * t + 0.693147182f;
  const float near = t * p, far = M::Exp2(t);  // both: where threads differ, one after the other would take longer
  const bool is_near = fabsf(t) < 0.5f;
  return {is_near ? near : far, is_near};
}
HEED_DEVICE float Decayed(Decay decay, float x) { return decay.factor * x + (decay.beside_one ? x : 0.0f); }

// A log2 e, so that times 0 it is 0.
HEED_DEVICE float RateOf(float A) {
  const float rate = A * kLog2E;
  return rate < -1e15f ? -1e15f : rate;  // NaN stays
}

using heed::cuda::Sigmoids;
using heed::cuda::SigmoidsOf;
using heed::cuda::Softplus;

}  // namespace heed::scan::cuda

#endif  // HEED_ENGINES_SCAN_CUDA_FUNCTIONS_H_

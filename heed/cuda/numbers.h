// Sums in two numbers, and exponentials that are as exact for large arguments as for small ones.
#ifndef HEED_CUDA_NUMBERS_H_
#define HEED_CUDA_NUMBERS_H_

#include <cmath>

#include "heed/cuda/machine.h"

namespace heed::cuda {

// What is between two of many terms is a difference of large sums, what is in none of them lost in one number.
struct Sum {
  float high = 0, low = 0;
};
HEED_DEVICE Sum operator+(Sum a, Sum b) {
  const float high = a.high + b.high, of_b = high - a.high;
  return {high, (a.high - (high - of_b)) + (b.high - of_b) + (a.low + b.low)};
}
HEED_DEVICE Sum operator-(Sum a, Sum b) { return a + Sum{-b.high, -b.low}; }
HEED_DEVICE Sum Half(Sum a) { return {a.high / 2, a.low / 2}; }

// exp(x).
template <class M>
HEED_DEVICE float Exp(Sum x) {
  constexpr float kLog2E = 1.44269502f, kRest = 1.92596299e-8f, kLn2 = 0.693147181f;
  const float y = x.high * kLog2E, power = M::Exp2(y);
  const float rest = fmaf(x.high, kLog2E, -y) + (x.high * kRest + x.low * kLog2E);
  return rest == rest ? fmaf(power, rest * kLn2, power) : power;
}
template <class M>
HEED_DEVICE float Exp(float x) {
  return Exp<M>(Sum{x, 0});
}

}  // namespace heed::cuda

#endif  // HEED_CUDA_NUMBERS_H_

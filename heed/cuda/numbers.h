// Sums in two numbers and over a warp, and functions that are as exact for large arguments as for small ones.
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
  return rest - rest == 0 ? fmaf(power, rest * kLn2, power) : power;  // not where x log2(e) has overflowed
}
template <class M>
HEED_DEVICE float Exp(float x) {
  return Exp<M>(Sum{x, 0});
}

// log(1 + e^x).
template <class M>
HEED_DEVICE float Softplus(float x) {
  return (x < 0 ? 0 : x) + log1pf(Exp<M>(-fabsf(x)));
}

// 1 / (1 + e^-x), and 1 less that.
struct Sigmoids {
  float s, complement;
};
template <class M>
HEED_DEVICE Sigmoids SigmoidsOf(float x) {
  const float e = Exp<M>(-fabsf(x)), large = 1 / (1 + e), small = e * large;
  return x < 0 ? Sigmoids{small, large} : Sigmoids{large, small};
}

// Of all threads of a warp.
template <class M>
HEED_DEVICE float SumOfWarp(M& m, float x) {
  HEED_DEVICE_UNROLL
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += m.ShuffleXor(x, mask);
  return x;
}

}  // namespace heed::cuda

#endif  // HEED_CUDA_NUMBERS_H_

// Double-float sums, sums over a warp, and functions whose relative error does not grow with their argument.
#ifndef HEED_CUDA_NUMBERS_H_
#define HEED_CUDA_NUMBERS_H_

#include <cmath>

#include "heed/cuda/machine.h"

namespace heed::cuda {

// A sum in two floats: differences of large prefix sums keep what one float would round away.
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
  return rest - rest == 0 ? fmaf(power, rest * kLn2, power) : power;  // unless x log2(e) overflows
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

// The sigmoid 1 / (1 + e^-x), and one minus it.
struct Sigmoids {
  float s, complement;
};
template <class M>
HEED_DEVICE Sigmoids SigmoidsOf(float x) {
  const float e = Exp<M>(-fabsf(x)), large = 1 / (1 + e), small = e * large;
  return x < 0 ? Sigmoids{small, large} : Sigmoids{large, small};
}

// Returns the sum over the warp to each of its threads.
template <class M>
HEED_DEVICE float SumOfWarp(M& m, float x) {
  HEED_DEVICE_UNROLL
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += m.ShuffleXor(x, mask);
  return x;
}

}  // namespace heed::cuda

#endif  // HEED_CUDA_NUMBERS_H_

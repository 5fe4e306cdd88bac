// Quantisation of a row: loops that compilers vectorise, without library calls.
#include "heed/state/quantize_row_internal.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace heed {
namespace {

float Widen(float x) { return x; }
float Widen(BF16 x) { return ToFloat(x); }
float Widen(F16 x) { return ToFloat(x); }

template <class T>
void Widen(const std::byte* row, int64_t stride, int64_t n, float* to) {
  const int64_t step = stride * static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < n; ++i) {
    T x;
    std::memcpy(&x, row + i * step, sizeof(T));
    to[i] = Widen(x);
  }
}

}  // namespace

bool QuantizeRow(DType dtype, const std::byte* row, int64_t stride, int64_t n, float* scratch, int8_t* q,
                 float* scale) {
  if (dtype == DType::kF32) Widen<float>(row, stride, n, scratch);
  if (dtype == DType::kBF16) Widen<BF16>(row, stride, n, scratch);
  if (dtype == DType::kF16) Widen<F16>(row, stride, n, scratch);
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    const float magnitude = std::abs(scratch[i]);
    finite = finite && magnitude <= std::numeric_limits<float>::max();
    largest = std::max(largest, magnitude);
  }
  if (!finite) return false;
  *scale = largest == 0 ? 1.0f : std::max(largest / 127, std::numeric_limits<float>::min());
  // Adding this constant leaves no bits below one, and rounds half to even.
  constexpr float kRound = 0x1.8p23f;
  for (int64_t i = 0; i < n; ++i) {
    const float rounded = (scratch[i] / *scale + kRound) - kRound;
    q[i] = static_cast<int8_t>(rounded);
  }
  return true;
}

}  // namespace heed

// Sketches of keys: plain loops, which compilers vectorise where it matters.
#include "heed/state/sketch_internal.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "heed/state/quantize_row_internal.h"

namespace heed {
namespace {

constexpr int64_t kTokens = SketchBlocks::kTokens;
constexpr int64_t kLine = 64;

float* FloatsAt(std::byte* block, int64_t offset) { return reinterpret_cast<float*>(block + offset); }

float ElementOf(DType dtype, const std::byte* row, int64_t i) {
  return static_cast<float>(LoadAsDouble(dtype, row, i));
}

// Returns a bound of the norm of x - step n: the error of the sum in double is less than what is added, and a nonzero
// norm must not be flushed to 0.
float ErrorOf(const float* x, const int8_t* n, float step, int64_t dim) {
  double sum = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const double error = static_cast<double>(x[i]) - static_cast<double>(step) * n[i];
    sum += error * error;
  }
  if (sum == 0) return 0;
  return std::max(static_cast<float>(std::sqrt(sum) * (1 + 0x1p-20)), std::numeric_limits<float>::min());
}

}  // namespace

SketchBlocks SketchLayout(int64_t dim) {
  constexpr int64_t kFloat = sizeof(float);
  SketchBlocks s;
  s.present = true;
  s.step = (dim + 3) / 4 * 4 * kTokens;
  s.error = s.step + kTokens * kFloat;
  s.min = s.error + kTokens * kFloat;
  s.max = s.min + dim * kFloat;
  s.mean = s.max + dim * kFloat;
  s.block_stride = (s.mean + dim * kFloat + kLine - 1) / kLine * kLine;
  return s;
}

SketchWriter::SketchWriter(DType dtype, int64_t dim)
    : dtype_(dtype), dim_(dim), layout_(SketchLayout(dim)), row_(static_cast<size_t>(dim)),
      quantized_(static_cast<size_t>((dim + 3) / 4 * 4)), sums_(static_cast<size_t>(dim)) {}

void SketchWriter::WriteRow(const std::byte* key, int64_t in_block, std::byte* block) {
  float step, error;
  if (QuantizeRow(dtype_, key, 1, dim_, row_.data(), quantized_.data(), &step)) {
    error = ErrorOf(row_.data(), quantized_.data(), step, dim_);
  } else {
    step = error = std::numeric_limits<float>::infinity();
    std::fill(quantized_.begin(), quantized_.end(), int8_t{0});
  }
  constexpr size_t kQuad = 4;
  auto* to = reinterpret_cast<uint8_t*>(block) + in_block * static_cast<int64_t>(kQuad);
  for (size_t e = 0; e < quantized_.size(); e += kQuad, to += kTokens * static_cast<int64_t>(kQuad)) {
    for (size_t i = 0; i < kQuad; ++i) to[i] = static_cast<uint8_t>(quantized_[e + i] + 128);
  }
  FloatsAt(block, layout_.step)[in_block] = step;
  FloatsAt(block, layout_.error)[in_block] = error;
}

void SketchWriter::WriteStatistics(const std::byte* keys, int64_t token_stride, std::byte* block) {
  float* const min = FloatsAt(block, layout_.min);
  float* const max = FloatsAt(block, layout_.max);
  float* const mean = FloatsAt(block, layout_.mean);
  std::fill(sums_.begin(), sums_.end(), 0.0);
  for (int64_t t = 0; t < kTokens; ++t) {
    const std::byte* const row = keys + t * token_stride;
    for (int64_t e = 0; e < dim_; ++e) {
      const float x = ElementOf(dtype_, row, e);
      if (t == 0) min[e] = max[e] = x;
      // A NaN enters min and max and stays there, because no comparison with it holds.
      if (x < min[e] || std::isnan(x)) min[e] = x;
      if (x > max[e] || std::isnan(x)) max[e] = x;
      sums_[static_cast<size_t>(e)] += static_cast<double>(x);
    }
  }
  for (int64_t e = 0; e < dim_; ++e) {
    const double average = sums_[static_cast<size_t>(e)] / static_cast<double>(kTokens);
    mean[e] = std::isnan(min[e]) ? min[e] : static_cast<float>(average);
  }
}

}  // namespace heed

// The interface between Linear and its kernels.
#ifndef HEED_LAYERS_LINEAR_INTERNAL_H_
#define HEED_LAYERS_LINEAR_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "heed/core/context.h"
#include "heed/layers/linear.h"

namespace heed::layers {

// A panel holds the weights of 64 outputs: f32 [inputs][64], or for bf16 words of two inputs each, u32 [ceil(inputs /
// 2)][64], the even one in the lower half. Elements beyond the outputs or inputs are 0.
inline constexpr int64_t kPanel = 64;

// Rows [0, rows) of y = x W^T + b, for the columns of panels [first, first + panels). Strides count elements.
struct PanelProduct {
  const void* weights;  // all panels
  const float* bias;    // [outputs] and zeros up to a whole panel; null: none
  size_t inputs, outputs;
  const float* x;
  ptrdiff_t x_stride;
  float* y;
  ptrdiff_t y_stride;
  size_t rows, first, panels;
};

struct PanelKernels {
  void (*f32)(const PanelProduct&) = nullptr;
  void (*bf16)(const PanelProduct&) = nullptr;
};

// The kernels for the best SIMD target that `ctx` allows.
PanelKernels PanelKernelsFor(const Context& ctx);

// Rows of several heads: row r of head h is at data + r row_stride + h head_stride.
template <class T>
struct OfHeads {
  T* data;
  int64_t row_stride, head_stride;
};

// Computes y = x W^T for each head with its own matrix, all of one shape, with the bits of Linear::Rows.
void MultiplyHeads(Context& ctx, std::span<const Linear> heads, const OfHeads<const float>& x, int64_t rows,
                   const OfHeads<float>& y);

}  // namespace heed::layers

#endif  // HEED_LAYERS_LINEAR_INTERNAL_H_

// Operations of layers on rows of f32 between their products: norms, activations, sums. Threads share the rows.
//
// The bits of a row depend on nothing but the row and the SIMD target. Outputs may be the inputs themselves, row for
// row.
#ifndef HEED_LAYERS_ROWS_INTERNAL_H_
#define HEED_LAYERS_ROWS_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "heed/core/context.h"
#include "heed/layers/activation.h"

namespace heed::layers {

// Distances between rows count elements; each row is contiguous.
struct In {
  const float* data = nullptr;
  int64_t stride = 0;
  const float* Row(size_t row) const { return data + static_cast<int64_t>(row) * stride; }
};
struct Out {
  float* data = nullptr;
  int64_t stride = 0;
  float* Row(size_t row) const { return data + static_cast<int64_t>(row) * stride; }
  operator In() const { return {data, stride}; }  // NOLINT: what is written may be read
};

enum class Scaling {
  kLayer,  // (x - mean) / sqrt(variance + eps)
  kRms,    // x / sqrt(mean of squares + eps)
  kUnit,   // x / sqrt(sum of squares + eps)
};

// y = scaled(x) .* weight + bias for each head, a run of `size` elements of a row. With a gate, silu(gate) multiplies x
// before scaling if `gate_first`, else the result.
struct ScaleRows {
  Scaling scaling = Scaling::kRms;
  In x;
  Out y;
  In gate;  // null: none
  bool gate_first = false;
  const float* weight = nullptr;  // [size], or [heads, size] with weight_per_head; null: 1
  const float* bias = nullptr;    // [size], or [heads, size] with weight_per_head; null: 0
  bool weight_per_head = false;
  double eps = 0;
  size_t rows = 0, heads = 1, size = 0;
};

// y = activation(x) .* factor
struct ActivateRows {
  Activation activation = Activation::kNone;
  In x;
  In factor;  // null: 1
  Out y;
  size_t rows = 0, size = 0;
};

// y = a + b
struct AddRows {
  In a, b;
  Out y;
  size_t rows = 0, size = 0;
};

// y = mix .* x + (1 - mix) .* before
struct MixRows {
  In x, before;
  In mix;  // with a stride of 0, the same for every row
  Out y;
  size_t rows = 0, size = 0;
};

// y = factor .* softplus(slope x + bias)
struct DecayRows {
  In x;
  float slope = 1;
  const float* bias = nullptr;    // [size]
  const float* factor = nullptr;  // [size]
  Out y;
  size_t rows = 0, size = 0;
};

void Run(Context& ctx, const ScaleRows& call);
void Run(Context& ctx, const ActivateRows& call);
void Run(Context& ctx, const AddRows& call);
void Run(Context& ctx, const MixRows& call);
void Run(Context& ctx, const DecayRows& call);

}  // namespace heed::layers

#endif  // HEED_LAYERS_ROWS_INTERNAL_H_

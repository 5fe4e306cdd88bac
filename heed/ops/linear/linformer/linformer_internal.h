// The table of Linformer, and products between a call's tensors and its projected keys and values, which linformer.cc
// runs beside the softmax engine.
#ifndef HEED_OPS_LINEAR_LINFORMER_LINFORMER_INTERNAL_H_
#define HEED_OPS_LINEAR_LINFORMER_LINFORMER_INTERNAL_H_

#include <cstdint>
#include <span>

#include "heed/core/context.h"
#include "heed/core/dtype.h"
#include "heed/mechanism/table_internal.h"
#include "heed/ops/linear/linformer/linformer.h"

namespace heed::linformer {

// The table: G heads of v, M projected tokens, L columns.
inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK"},
    .k = {"k", "BTHK"},
    .v = {"v", "BTGV"},
    .e = {.name = "e", .axes = "ML", .type = mechanism::kWide},
    .f = {.name = "f", .axes = "ML", .type = mechanism::kWide},
};

// A tensor of the call over tokens and heads, with strides in elements.
struct Tokens {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
  int64_t heads = 0, size = 0;
};

// e, f, or a gradient of them.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t row_stride = 0, column_stride = 0;
  int64_t rows = 0, columns = 0;
};

// Tokens of one sequence. `column` belongs to the first of them.
struct Part {
  int64_t batch = 0, first = 0, count = 0, column = 0;
};

// Temporary memory in the accumulation dtype, f32 or f64: rows of all heads of all parts. `group` value heads that
// share a key head are side by side, one wide head for the softmax engine.
struct Wide {
  void* data = nullptr;
  int64_t part_stride = 0, head_stride = 0, row_stride = 0;
  int64_t group = 1, size = 0;
  // The offset of row 0 of a head of a part.
  int64_t At(int64_t part, int64_t head) const {
    return part * part_stride + head / group * head_stride + head % group * size;
  }
};

// Bytes of scratch that each product reserves per thread.
int64_t ProductBytes(DType wide, int64_t size);

// to[part, head, r] = sum_t m[r, column + t] x[first + t, head]
void Project(Context& ctx, DType wide, std::span<const Part> parts, const Matrix& m, const Tokens& x, const Wide& to);

// x[first + t, head] = sum_r m[r, column + t] from[part, head, r]
void ProjectBack(Context& ctx, DType wide, std::span<const Part> parts, const Matrix& m, const Wide& from,
                 const Tokens& x);

// sums[r, column + t] += sum_{part, head} <from[part, head, r], x[first + t, head]>, with parts and heads in ascending
// order. `sums` has rows of `stride` elements, a multiple of 64 that covers the last column.
void AddOuterSums(Context& ctx, DType wide, std::span<const Part> parts, const Wide& from, const Tokens& x,
                  int64_t rows, int64_t stride, void* sums);

// Copies rows [0, count) of the parts, one part after another in `wide`, from x, and back to x with rounding.
void LoadTokens(Context& ctx, DType wide, std::span<const Part> parts, const Tokens& x, const Wide& to);
void StoreTokens(Context& ctx, DType wide, std::span<const Part> parts, const Wide& from, const Tokens& x);

}  // namespace heed::linformer

#endif  // HEED_OPS_LINEAR_LINFORMER_LINFORMER_INTERNAL_H_

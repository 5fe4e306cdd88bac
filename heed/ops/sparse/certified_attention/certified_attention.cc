// Checks and outputs that all entry points of certified attention share.
#include "heed/ops/sparse/certified_attention/certified_attention.h"

#include <cmath>
#include <string>
#include <utility>

#include "heed/ops/sparse/certified_attention/certified_internal.h"

namespace heed::certified_attention {
namespace {

float* FloatAt(const TensorView& t, int64_t b, int64_t h, int64_t i) {
  return t.as<float>() + b * t.stride(0) + h * t.stride(1) + i * t.stride(2);
}

}  // namespace

void CheckCall(const char* op, const attention::Inputs& in, const Options& options, const Outputs& out,
               const Sizes& sizes) {
  using mechanism::Fail;
  if (!(options.epsilon >= 0 && options.epsilon < 1)) {
    Fail(op, "epsilon", "is " + mechanism::Text(options.epsilon), "a number from 0 on and below 1");
  }
  if (options.scale && !std::isfinite(*options.scale)) {
    Fail(op, "scale", "is " + mechanism::Text(*options.scale), "a finite number");
  }
  const ConstTensorView& q = in.q;
  const int64_t heads = q.size(2);
  mechanism::Apart apart;
  for (const auto& [name, view] : {std::pair{"q", in.q}, {"k", in.k}, {"v", in.v}}) apart.Reads(name, view);
  const auto rows = [&](const char* name, const TensorView& t, const mechanism::Axes& shape, DType dtype) {
    apart.Writes(op, name, t, shape, dtype);
  };
  rows("o", out.o, {sizes.batch, sizes.rows, heads, sizes.value_dim}, q.dtype());
  mechanism::CheckContiguousRows(op, "o", out.o);
  if (out.bound.present()) rows("bound", out.bound, {sizes.batch, heads, sizes.rows}, DType::kF32);
  if (out.lse.present()) rows("lse", out.lse, {sizes.batch, heads, sizes.rows}, DType::kF32);
  if (out.kept.present()) {
    rows("kept", out.kept, {sizes.batch, sizes.key_heads, sizes.rows, BlocksOf(sizes.keys)}, DType::kBool);
  }
}

void WriteBounds(const Selection& selection, const TensorView& lse, const Outputs& out) {
  if (!out.bound.present()) return;
  for (int64_t b = 0; b < out.bound.size(0); ++b) {
    for (int64_t h = 0; h < out.bound.size(1); ++h) {
      for (int64_t i = 0; i < out.bound.size(2); ++i) {
        const float of_row = *FloatAt(lse, b, h, i), bound = selection.Bound(b, h, i);
        *FloatAt(out.bound, b, h, i) = std::isnan(of_row) && bound > 0 ? of_row : bound;
      }
    }
  }
}

void WriteKept(const Selection& selection, int64_t batch, int64_t heads, int64_t rows, const TensorView& kept) {
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        const uint8_t* const from = selection.Kept(b, h, selection.SetOf(b, i));
        for (int64_t j = 0; j < selection.blocks(); ++j) {
          *(kept.as<bool>() + b * kept.stride(0) + h * kept.stride(1) + i * kept.stride(2) + j * kept.stride(3)) =
              from[j] != 0;
        }
      }
    }
  }
}

}  // namespace heed::certified_attention

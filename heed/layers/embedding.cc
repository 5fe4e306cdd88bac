// Embedding: a copy of its table, and the lookup of rows.
#include "heed/layers/embedding.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "heed/core/error.h"
#include "heed/layers/layer.h"
#include "heed/mechanism/check_internal.h"

namespace heed::layers {
namespace {

using mechanism::Fail;

float Widened(float x) { return x; }
float Widened(BF16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

template <class T>
void CopyRow(const T* from, int64_t width, bool add, float* to) {
  if (add) {
    for (int64_t i = 0; i < width; ++i) to[i] += Widened(from[i]);
  } else {
    for (int64_t i = 0; i < width; ++i) to[i] = Widened(from[i]);
  }
}

}  // namespace

Embedding::Embedding(const Config& config, const Weights& weights) : config_(config) {
  CheckConfig("layers::Embedding", "count", config.count);
  CheckConfig("layers::Embedding", "width", config.width);
  const int64_t sizes[] = {config.count, config.width};
  const ConstTensorView table = weights.Tensor("weight", sizes);
  if (!table) return;
  dtype_ = table.dtype() == DType::kBF16 ? DType::kBF16 : DType::kF32;
  const auto copy = [&]<class T>(T) {
    auto rows = std::make_shared<std::vector<T>>(static_cast<size_t>(config.count * config.width));
    T* to = rows->data();
    for (int64_t row = 0; row < config.count; ++row) {
      for (int64_t i = 0; i < config.width; ++i) {
        StoreDouble(dtype_, to++, 0,
                    LoadAsDouble(table.dtype(), table.data(), row * table.stride(0) + i * table.stride(1)));
      }
    }
    table_ = std::shared_ptr<const void>(rows, rows->data());
  };
  if (dtype_ == DType::kBF16) {
    copy(BF16());
  } else {
    copy(float());
  }
}

void Embedding::Forward(Context& ctx, const ConstTensorView& ids, const TensorView& y, bool add) const {
  constexpr const char* op = "layers::Embedding::Forward";
  mechanism::CheckReadable(op, "ids", ids);
  if (ids.dtype() != DType::kI32 && ids.dtype() != DType::kI64)
    Fail(op, "ids", std::string("has dtype ") + Name(ids.dtype()), "i32 or i64");
  if (ids.rank() != 1) Fail(op, "ids", "has shape " + ids.ShapeString(), "one axis");
  const int64_t rows = ids.size(0), width = config_.width;
  mechanism::CheckTensor(op, "y", y, {rows, width}, DType::kF32, true);
  mechanism::CheckContiguousRows(op, "y", y);
  mechanism::CheckWritable(op, "y", y, "ids", ids);
  const auto id = [&](int64_t row) { return LoadAsInt64(ids.dtype(), ids.data(), row * ids.stride(0)); };
  for (int64_t row = 0; row < rows; ++row) {
    if (id(row) < 0 || id(row) >= config_.count) {
      Fail(op, "ids", "has an element " + std::to_string(id(row)), "0 to " + std::to_string(config_.count - 1));
    }
  }
  const int64_t block = std::max<int64_t>(1, 16384 / width);
  ctx.ParallelFor((rows + block - 1) / block, [&](int64_t task, int) {
    for (int64_t row = task * block; row < std::min(rows, (task + 1) * block); ++row) {
      float* to = y.as<float>() + row * y.stride(0);
      const int64_t from = id(row) * width;
      if (dtype_ == DType::kBF16) {
        CopyRow(static_cast<const BF16*>(table_.get()) + from, width, add, to);
      } else {
        CopyRow(static_cast<const float*>(table_.get()) + from, width, add, to);
      }
    }
  });
}

}  // namespace heed::layers

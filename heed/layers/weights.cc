// Weights: lookup of tensors, and their checks.
#include "heed/layers/weights.h"

#include <algorithm>
#include <utility>

#include "heed/core/error.h"

namespace heed::layers {
namespace {

[[noreturn]] void Fail(const std::string& name, const std::string& got, const std::string& expected) {
  throw InvalidArgument("layers::Weights: " + name + " " + got + ", expected " + expected);
}

int64_t Elements(std::span<const int64_t> sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

}  // namespace

Weights::Weights(const SafetensorsFile& file) : Weights(std::vector<const SafetensorsFile*>{&file}) {}

Weights::Weights(std::vector<const SafetensorsFile*> files)
    : Weights([files = std::move(files)](const std::string& name) {
        for (const SafetensorsFile* file : files) {
          if (file->Contains(name)) return file->tensor(name);
        }
        return ConstTensorView();
      }) {}

Weights Weights::Listing(std::vector<WeightName>* names) {
  Weights weights([](const std::string&) { return ConstTensorView(); });
  weights.listed_ = names;
  return weights;
}

Weights Weights::At(std::string_view prefix) const {
  Weights deeper = *this;
  deeper.prefix_ += prefix;
  return deeper;
}

bool Weights::Contains(std::string_view name) const { return (*find_)(prefix_ + std::string(name)).present(); }

ConstTensorView Weights::Tensor(std::string_view name, std::span<const int64_t> sizes) const {
  const std::string whole = prefix_ + std::string(name);
  for (const int64_t size : sizes) {
    if (size < 1) Fail(whole, "would have shape " + ShapeString(sizes), "sizes of at least 1");
  }
  if (listed_ != nullptr) {
    listed_->push_back({whole, {sizes.begin(), sizes.end()}});
    return {};
  }
  const ConstTensorView tensor = (*find_)(whole);
  if (!tensor) Fail(whole, "is missing", "a tensor of shape " + ShapeString(sizes));
  if (!IsFloat(tensor.dtype())) Fail(whole, std::string("has dtype ") + Name(tensor.dtype()), "f64, f32, bf16 or f16");
  if (!std::ranges::equal(tensor.sizes(), sizes)) Fail(whole, "has shape " + tensor.ShapeString(), ShapeString(sizes));
  return tensor;
}

std::vector<float> Weights::Floats(std::string_view name, std::span<const int64_t> sizes) const {
  const ConstTensorView tensor = Tensor(name, sizes);
  std::vector<float> values;
  if (!tensor) {
    values.resize(static_cast<size_t>(Elements(sizes)));
    return values;
  }
  values.reserve(static_cast<size_t>(tensor.num_elements()));
  std::vector<int64_t> index(sizes.size(), 0);
  for (int64_t left = tensor.num_elements(); left > 0; --left) {
    int64_t at = 0;
    for (size_t axis = 0; axis < index.size(); ++axis) at += index[axis] * tensor.stride(static_cast<int>(axis));
    values.push_back(static_cast<float>(LoadAsDouble(tensor.dtype(), tensor.data(), at)));
    for (size_t axis = index.size(); axis-- > 0;) {
      if (++index[axis] < sizes[axis]) break;
      index[axis] = 0;
    }
  }
  return values;
}

Linear Weights::Matrix(std::span<const LinearName> names, int64_t inputs, bool transposed) const {
  std::vector<LinearPart> parts;
  for (const LinearName& of : names) {
    const int64_t sizes[] = {transposed ? inputs : of.outputs, transposed ? of.outputs : inputs};
    LinearPart part;
    part.weight = Tensor(of.name + ".weight", sizes);
    if (of.bias) part.bias = Tensor(of.name + ".bias", std::span(&of.outputs, 1));
    part.transposed = transposed;
    parts.push_back(part);
  }
  return listed_ != nullptr ? Linear() : Linear(parts);
}

}  // namespace heed::layers

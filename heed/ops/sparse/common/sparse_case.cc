// Common parts of the cases of mechanisms that make several calls of attention.
#include "heed/ops/sparse/common/sparse_case.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "heed/core/error.h"

namespace heed::sparse {

Buffer Draw::Tensor(const std::vector<int64_t>& sizes, double deviation) {
  std::vector<size_t> order;  // from the innermost axis outwards
  for (size_t axis = sizes.size(); axis-- > 0;) order.push_back(axis);
  if (Chance(0.4)) std::swap(order[1], order[2]);
  std::vector<int64_t> strides(sizes.size());
  int64_t next = 1;
  for (const size_t axis : order) {
    strides[axis] = next;
    next = next * std::max<int64_t>(sizes[axis], 1) + (Chance(0.3) ? Integer(1, 3) : 0);
  }
  const Placement placement = Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard;
  return Buffer(dtype_, sizes, strides, placement, Integer(0, 5)).FillNormal(NextSeed(), deviation);
}

bool Draw::DropsAll(std::vector<OutputSpec>& gradients) {
  if (!Chance(0.2)) return false;
  const bool any = std::erase_if(gradients, [&](const OutputSpec&) { return Chance(0.5); }) > 0;
  return any && gradients.empty();
}

std::string Described(const char* name, const ConstTensorView& tensor) {
  if (!tensor) return "";
  return std::string(" ") + name + tensor.ShapeString() + "/" + ShapeString(tensor.strides());
}

OutputSpec LikeTensor(const char* name, const ConstTensorView& tensor) {
  return {name, tensor.dtype(), {tensor.sizes().begin(), tensor.sizes().end()}, {}};
}

double BytesOf(std::span<const OutputSpec> outputs) {
  double sum = 0;
  for (const OutputSpec& output : outputs) {
    auto bytes = static_cast<double>(SizeOf(output.dtype));
    for (const int64_t size : output.sizes) bytes *= static_cast<double>(size);
    sum += bytes;
  }
  return sum;
}

std::vector<TensorView> ViewsOf(std::span<const OutputSpec> outputs) {
  std::vector<TensorView> views;
  for (const OutputSpec& output : outputs) views.emplace_back(nullptr, output.dtype, output.sizes);
  return views;
}

void CheckRequest(const char* mechanism, const CaseRequest& request, const std::vector<std::string>& variants) {
  const std::string& variant = request.variant;
  if (request.pass != "forward" && request.pass != "backward") {
    throw InvalidArgument(std::string(mechanism) + ": pass is " + request.pass + ", expected forward or backward");
  }
  const auto name_of = [](const std::string& word) { return word.substr(0, word.find('=')); };
  for (size_t begin = 0; begin < variant.size();) {
    const size_t end = std::min(variant.find('+', begin), variant.size());
    const std::string word = variant.substr(begin, end - begin);
    begin = end + 1;
    const auto is_its = [&](const std::string& known) { return name_of(known) == name_of(word); };
    if (std::ranges::any_of(variants, is_its)) continue;
    throw InvalidArgument(std::string(mechanism) + ": variant is " + word + ", expected one of Entry().variants");
  }
}

}  // namespace heed::sparse

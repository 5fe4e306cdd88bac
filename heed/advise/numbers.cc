// Generated tensors: shapes by axes, values by names.
#include <algorithm>
#include <cmath>

#include "heed/advise/candidates_internal.h"
#include "heed/advise/numbers_internal.h"
#include "heed/harness/assumed_tensors.h"

namespace heed::advise {
namespace {

Buffer Made(const std::string& name, DType dtype, const std::vector<int64_t>& sizes, uint64_t seed) {
  const Buffer buffer = OrdinaryNumbers(dtype, sizes, seed);
  const auto change = [&](const auto& f) {
    for (int64_t i = 0, n = buffer.view().num_elements(); i < n; ++i) {
      StoreDouble(dtype, buffer.view().data(), i, f(LoadAsDouble(dtype, buffer.view().data(), i)));
    }
  };
  const double root = std::sqrt(static_cast<double>(sizes.back()));
  if (name == "k" || name == "a" || name == "b" || name == "p" || name == "w") {
    change([&](double x) { return x / root; });
  } else if (name.starts_with("log_decay")) {
    change([](double x) { return -0.03 * std::abs(x); });
  } else if (name == "lamb") {
    change([](double x) { return 0.5 + std::abs(x); });
  } else if (name != "q" && name != "r" && name != "v") {
    change([](double x) { return std::abs(x); });
  }
  return buffer;
}

}  // namespace

bool Numbers::Know(std::span<const InputSpec> inputs) {
  const std::map<char, int64_t> letters = AssumedAxes({});
  return std::ranges::all_of(inputs, [&](const InputSpec& spec) {
    return spec.optional || std::ranges::all_of(spec.axes, [&](char letter) { return letters.contains(letter); });
  });
}

TensorMap Numbers::For(std::span<const InputSpec> inputs) {
  const std::map<char, int64_t> letters = AssumedAxes(sizes_);
  TensorMap tensors;
  for (const InputSpec& spec : inputs) {
    if (spec.optional) continue;
    std::vector<int64_t> shape;
    for (const char letter : spec.axes) shape.push_back(letters.at(letter));
    const DType dtype = spec.wide && SizeOf(dtype_) == 2 ? DType::kF32 : dtype_;
    const std::string key = spec.name + ":" + spec.axes + ":" + heed::Name(dtype);
    if (!made_.contains(key)) made_.emplace(key, Made(spec.name, dtype, shape, made_.size() + 1));
    tensors[spec.name] = made_.at(key).view();
  }
  return tensors;
}

}  // namespace heed::advise

// Common functions of the readers of tensors: checks of shapes and choices.
#ifndef HEED_HARNESS_TENSOR_FILE_INTERNAL_H_
#define HEED_HARNESS_TENSOR_FILE_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/harness/tensor_file.h"

namespace heed::tensor_file {

// Parses a decimal number of digits only.
std::optional<int64_t> ParseIndex(std::string_view text);

// Throws FileError if a tensor without elements has sizes that are too large for a loop.
void CheckEmpty(const std::string& path, const std::string& name, const ConstTensorView& x);

[[noreturn]] void BadShape(const std::string& path, const char* name, const ConstTensorView& x,
                           const std::string& expected);

// Parses indices of query heads. Throws InvalidArgument.
std::vector<int64_t> ChooseHeads(const std::string& path, const std::string& text, int64_t num_heads);

// Checks and converts the tensors that `view` returns by name, or absent views. `set` has their origin.
NamedTensors FinishNamed(std::span<const InputSpec> inputs, const TensorChoice& choice, NamedTensors set,
                         const std::function<ConstTensorView(const std::string& name)>& view);

}  // namespace heed::tensor_file

#endif  // HEED_HARNESS_TENSOR_FILE_INTERNAL_H_

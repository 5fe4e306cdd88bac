// NamedTensors: checks shapes by their axes, and converts and gathers where necessary.
#include <algorithm>
#include <charconv>
#include <memory>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/harness/tensor_file_internal.h"

namespace heed {
namespace tensor_file {

// Parses a decimal number of digits only.
std::optional<int64_t> ParseIndex(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value < 0) {
    return std::nullopt;
  }
  return value;
}

// A tensor without elements may claim an axis of 2^60 in a file of a hundred bytes, and a loop over that axis would
// never end. Throws FileError.
void CheckEmpty(const std::string& path, const std::string& name, const ConstTensorView& x) {
  constexpr int64_t kMost = int64_t{1} << 20;
  if (x.num_elements() > 0) return;
  int64_t product = 1;
  for (const int64_t size : x.sizes()) {
    if (__builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product) || product > kMost) {
      throw FileError(path + ": " + name + " has shape " + x.ShapeString() +
                      " without an element, expected other sizes of at most " + std::to_string(kMost) + " together");
    }
  }
}

void BadShape(const std::string& path, const char* name, const ConstTensorView& x, const std::string& expected) {
  throw FileError(path + ": " + name + " has shape " + x.ShapeString() + ", expected " + expected);
}

// Parses indices of query heads. Throws InvalidArgument.
std::vector<int64_t> ChooseHeads(const std::string& path, const std::string& text, int64_t num_heads) {
  std::vector<int64_t> heads;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const std::optional<int64_t> head = ParseIndex(word);
    if (!head || *head >= num_heads) {
      throw InvalidArgument(path + ": --heads has '" + word + "', expected " +
                            (num_heads == 0 ? "none: there are no heads" : "0 to " + std::to_string(num_heads - 1)));
    }
    heads.push_back(*head);
    begin = end + 1;
  }
  return heads;
}

namespace {

// The index of an axis, -1 if it is absent.
int AxisOf(const InputSpec& spec, char letter) {
  const size_t at = spec.axes.find(letter);
  return at == std::string::npos ? -1 : static_cast<int>(at);
}

// For example "[B,T,H,K] or [T,H,K]".
std::string AxesText(const InputSpec& spec) {
  std::string all;
  for (const char letter : spec.axes) {
    all += std::string(all.empty() ? "" : ",") + letter;
  }
  if (!spec.axes.starts_with('B')) return "[" + all + "]";
  return "[" + all + "] or [" + all.substr(2) + "]";
}

// A view of x with all axes of its spec. Throws FileError.
ConstTensorView WithAxes(const std::string& path, const std::string& name, const InputSpec& spec,
                         const ConstTensorView& x, bool batched) {
  if (!IsFloat(x.dtype())) {
    throw FileError(path + ": " + name + " has dtype " + Name(x.dtype()) + ", expected f64, f32, bf16 or f16");
  }
  CheckEmpty(path, name, x);
  const bool adds = !batched && spec.axes.starts_with('B');
  const int rank = static_cast<int>(spec.axes.size()) - (adds ? 1 : 0);
  if (x.rank() != rank) {
    throw FileError(path + ": " + name + " has shape " + x.ShapeString() + ", expected " + AxesText(spec));
  }
  if (!adds) return x;
  std::vector<int64_t> sizes = {1}, strides = {x.num_elements()};
  sizes.insert(sizes.end(), x.sizes().begin(), x.sizes().end());
  strides.insert(strides.end(), x.strides().begin(), x.strides().end());
  return ConstTensorView(x.data(), x.dtype(), sizes, strides);
}

// Returns x itself if possible, else a row-major copy: along `axis` the elements heads[i] / group, or all elements if
// `heads` is empty.
ConstTensorView PrepareAny(const ConstTensorView& x, DType dtype, int axis, const std::vector<int64_t>& heads,
                           int64_t group, LayerOfFile& set) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.data()) % SizeOf(x.dtype()) == 0;
  const int last = x.rank() - 1;
  const bool rows = x.stride(last) == 1 || x.size(last) == 1;
  const bool gathers = axis >= 0 && !heads.empty();
  if (!gathers && aligned && rows && x.dtype() == dtype) return x;

  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  if (gathers) sizes[static_cast<size_t>(axis)] = static_cast<int64_t>(heads.size());
  const ConstTensorView shape(nullptr, dtype, sizes);  // checks for overflow
  constexpr int64_t kMost = int64_t{1} << 36;          // a small file can claim more
  if (gathers && shape.num_elements() > kMost) {
    throw FileError(set.file + ": a tensor of shape " + x.ShapeString() + " would have shape " + shape.ShapeString() +
                    " with a copy per head, expected fewer heads");
  }
  const std::shared_ptr<void> memory(os::AllocateAligned(shape.num_elements() * static_cast<int64_t>(SizeOf(dtype))),
                                     &os::FreeAligned);
  std::vector<int64_t> index(sizes.size());
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    int64_t from = 0;
    for (int a = 0; a <= last; ++a) {
      int64_t at = index[static_cast<size_t>(a)];
      if (gathers && a == axis) at = heads[static_cast<size_t>(at)] / group;
      from += at * x.stride(a);
    }
    StoreDouble(dtype, memory.get(), i, LoadAsDouble(x.dtype(), x.data(), from));
    for (size_t a = sizes.size(); a-- > 0;) {
      if (++index[a] < sizes[a]) break;
      index[a] = 0;
    }
  }
  set.owners.push_back(memory);
  return ConstTensorView(memory.get(), dtype, sizes);
}

// Query heads to gather; empty if every tensor can be used unchanged.
std::vector<int64_t> HeadsToRead(const NamedTensors& set, std::span<const InputSpec> inputs, const std::string& choice,
                                 int64_t& most) {
  most = 0;
  int64_t first = 0;
  bool fewer = false;
  for (const InputSpec& spec : inputs) {
    const auto found = set.tensors.find(spec.name);
    if (AxisOf(spec, 'H') < 0 || found == set.tensors.end()) continue;
    const int64_t heads = found->second.size(AxisOf(spec, 'H'));
    if (&spec == inputs.data()) first = heads;
    most = std::max(most, heads);
    fewer = fewer || heads < first;
  }
  for (const InputSpec& spec : inputs) {
    const auto found = set.tensors.find(spec.name);
    if (AxisOf(spec, 'H') < 0 || found == set.tensors.end()) continue;
    const int64_t heads = found->second.size(AxisOf(spec, 'H'));
    if (heads == 0 ? most > 0 : most % heads != 0) {
      BadShape(set.file, spec.name.c_str(), found->second, "a divisor of " + std::to_string(most) + " heads");
    }
  }
  const bool share = std::ranges::any_of(inputs, [](const InputSpec& spec) { return AxisOf(spec, 'G') >= 0; });
  if (share && !choice.empty())
    throw InvalidArgument(set.file + ": --heads is " + choice + ", expected all heads, which share k");
  if (!choice.empty()) return ChooseHeads(set.file, choice, most);
  std::vector<int64_t> heads;
  for (int64_t h = 0; fewer && h < most; ++h) heads.push_back(h);
  return heads;
}

}  // namespace

NamedTensors FinishNamed(std::span<const InputSpec> inputs, const TensorChoice& choice, NamedTensors set,
                         const std::function<ConstTensorView(const std::string& name)>& view) {
  const std::string dot = set.layer.empty() ? "" : set.layer + ".";
  for (const InputSpec& spec : inputs) {
    const ConstTensorView x = view(spec.name);
    if (!x.present()) continue;
    if (&spec == inputs.data()) {
      set.batched = x.rank() == static_cast<int>(spec.axes.size());
      set.file_dtype = x.dtype();
    }
    ConstTensorView& named = set.tensors[spec.name];
    named = WithAxes(set.file, dot + spec.name, spec, x, set.batched);
    // Linformer's rows have a column C for each token.
    const int tokens = std::max(AxisOf(spec, 'T'), AxisOf(spec, 'C'));
    if (choice.tokens && tokens >= 0) named = named.Slice(tokens, 0, std::min(*choice.tokens, named.size(tokens)));
  }
  const bool half = SizeOf(set.file_dtype) == 2;
  set.dtype = choice.dtype.value_or(half ? DType::kF32 : set.file_dtype);
  int64_t most = 0;
  const std::vector<int64_t> heads = HeadsToRead(set, inputs, choice.heads, most);
  for (const InputSpec& spec : inputs) {
    const auto found = set.tensors.find(spec.name);
    if (found == set.tensors.end()) continue;
    const int axis = AxisOf(spec, 'H');
    const int64_t own = axis < 0 ? 0 : found->second.size(axis);
    const bool widen = spec.wide && SizeOf(set.dtype) == 2;
    found->second =
        PrepareAny(found->second, widen ? DType::kF32 : set.dtype, axis, heads, own == 0 ? 1 : most / own, set);
  }
  return set;
}

}  // namespace tensor_file

NamedTensors NamedOf(const std::string& name, const TensorMap& given, std::span<const InputSpec> inputs,
                     const TensorChoice& choice) {
  NamedTensors set;
  set.file = name;
  set.layers = {""};
  return tensor_file::FinishNamed(inputs, choice, std::move(set), [&](const std::string& of) {
    const auto found = given.find(of);
    return found == given.end() ? ConstTensorView() : found->second;
  });
}

}  // namespace heed

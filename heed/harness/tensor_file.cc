// TensorSet: finds the layer, checks shapes, and converts and gathers where necessary.
#include "heed/harness/tensor_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/harness/tensor_file_internal.h"
#include "heed/io/npy.h"
#include "heed/io/safetensors.h"

namespace heed {
namespace {

using namespace tensor_file;  // NOLINT: what files and memory have in common

const std::vector<std::string> kNames = {"q", "k", "v"};

// Digits compare as numbers: layers.2 precedes layers.10.
bool NaturalLess(std::string_view a, std::string_view b) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (!digit(a[i]) || !digit(b[j])) {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i, ++j;
      continue;
    }
    size_t x = i, y = j;
    while (x < a.size() && digit(a[x])) ++x;
    while (y < b.size() && digit(b[y])) ++y;
    std::string_view m = a.substr(i, x - i), n = b.substr(j, y - j);
    m.remove_prefix(std::min(m.find_first_not_of('0'), m.size()));
    n.remove_prefix(std::min(n.find_first_not_of('0'), n.size()));
    if (m.size() != n.size()) return m.size() < n.size();
    if (m != n) return m < n;
    i = x, j = y;
  }
  return a.size() - i < b.size() - j;
}

// "a, b, c", cut after the eighth name.
std::string Join(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i == 8 && words.size() > 9) return text + ", ... " + words.back();
    text += (i == 0 ? "" : ", ") + words[i];
  }
  return text;
}

// Prefixes that have all names of `needed`, "<prefix>.q", "" for "q".
std::vector<std::string> FindLayers(const SafetensorsFile& file, const std::vector<std::string>& needed) {
  std::vector<std::string> layers;
  for (const std::string& name : file.names()) {
    std::string layer;
    if (name.ends_with("." + needed[0])) {
      layer = name.substr(0, name.size() - needed[0].size() - 1);
    } else if (name != needed[0]) {
      continue;
    }
    const std::string dot = layer.empty() ? "" : layer + ".";
    if (std::all_of(needed.begin(), needed.end(),
                    [&](const std::string& other) { return file.Contains(dot + other); })) {
      layers.push_back(layer);
    }
  }
  std::sort(layers.begin(), layers.end(), NaturalLess);
  return layers;
}

// The layer of this name or index. Throws InvalidArgument.
std::string ChooseLayer(const std::string& path, const std::vector<std::string>& layers, const std::string& choice) {
  if (choice.empty()) return layers[0];
  if (std::find(layers.begin(), layers.end(), choice) != layers.end()) {
    return choice;
  }
  const std::optional<int64_t> index = ParseIndex(choice);
  if (index && *index < static_cast<int64_t>(layers.size())) {
    return layers[static_cast<size_t>(*index)];
  }
  if (layers.size() == 1 && layers[0].empty()) {
    throw InvalidArgument(path + ": --layer is '" + choice + "', expected 0: its q, k and v have no layer");
  }
  throw InvalidArgument(path + ": --layer is '" + choice + "', expected 0 to " + std::to_string(layers.size() - 1) +
                        " or one of " + Join(layers));
}

// Metadata of this layer without its prefix; it takes precedence over that of all layers.
std::map<std::string, std::string> FactsOf(const std::map<std::string, std::string>& metadata,
                                           const std::string& layer) {
  std::map<std::string, std::string> facts = metadata;
  if (layer.empty()) return facts;
  for (const auto& [key, value] : metadata) {
    if (key.starts_with(layer + ".")) facts[key.substr(layer.size() + 1)] = value;
  }
  return facts;
}

// A tensor with or without B, as [B, T, H, D]. Throws FileError.
ConstTensorView WithBatch(const std::string& path, const std::string& name, const ConstTensorView& x) {
  if (!IsFloat(x.dtype())) {
    throw FileError(path + ": " + name + " has dtype " + Name(x.dtype()) + ", expected f64, f32, bf16 or f16");
  }
  CheckEmpty(path, name, x);
  if (x.rank() == 4) return x;
  if (x.rank() != 3) {
    throw FileError(path + ": " + name + " has shape " + x.ShapeString() + ", expected [B,T,H,D] or [T,H,D]");
  }
  const int64_t T = x.size(0), H = x.size(1), D = x.size(2);
  return ConstTensorView(x.data(), x.dtype(), {1, T, H, D}, {T * x.stride(0), x.stride(0), x.stride(1), x.stride(2)});
}

// Checks that shapes agree. The message uses the file's own axes.
void CheckShapes(const std::string& path, const TensorSet& set) {
  const ConstTensorView &q = set.q, &k = set.k, &v = set.v;
  const auto text = [](int64_t n) { return std::to_string(n); };
  const std::string B = text(q.size(0)), T = text(k.size(1)), H = text(k.size(2));
  for (const auto& [name, x] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
    if (x->dtype() != q.dtype()) {
      throw FileError(path + ": " + name + " has dtype " + Name(x->dtype()) + ", expected " + Name(q.dtype()) +
                      " as q");
    }
    if (x->size(0) != q.size(0)) {
      BadShape(path, name, *x, "a batch of " + B + " as q");
    }
  }
  if (k.size(3) != q.size(3)) {
    BadShape(path, "k", k, "a last axis of " + text(q.size(3)) + " as q");
  }
  if (v.size(1) != k.size(1) || v.size(2) != k.size(2)) {
    BadShape(path, "v", v, T + " tokens and " + H + " heads as k");
  }
  if (q.size(3) == 0 || v.size(3) == 0) {
    BadShape(path, q.size(3) == 0 ? "q" : "v", q.size(3) == 0 ? q : v, "a last axis of at least 1");
  }
  const bool divides = k.size(2) == 0 ? q.size(2) == 0 : q.size(2) % k.size(2) == 0;
  if (!divides) {
    BadShape(path, "q", q, "a multiple of k's " + H + " heads");
  }
}

template <class From, class To>
To Convert(From x) {
  if constexpr (std::is_same_v<From, To>) {
    return x;
  } else if constexpr (std::is_same_v<From, BF16> || std::is_same_v<From, F16>) {
    return Convert<float, To>(ToFloat(x));
  } else if constexpr (std::is_same_v<To, BF16> || std::is_same_v<To, F16>) {
    To to;  // rounds from double once
    StoreDouble(DTypeOf<To>::value, &to, 0, static_cast<double>(x));
    return to;
  } else {
    return static_cast<To>(x);
  }
}

// Copies heads `heads` of x, divided by `group`, row-major into `out`.
template <class From, class To>
void CopyHeads(const ConstTensorView& x, const std::vector<int64_t>& heads, int64_t group, To* out) {
  const int64_t B = x.size(0), T = x.size(1), D = x.size(3);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      for (const int64_t head : heads) {
        const From* row = x.as<From>() + b * x.stride(0) + t * x.stride(1) + head / group * x.stride(2);
        for (int64_t d = 0; d < D; ++d) {
          *out++ = Convert<From, To>(row[d * x.stride(3)]);
        }
      }
    }
  }
}

template <class To>
void CopyHeads(const ConstTensorView& x, const std::vector<int64_t>& heads, int64_t group, To* out) {
  switch (x.dtype()) {
    case DType::kF64: return CopyHeads<double, To>(x, heads, group, out);
    case DType::kF32: return CopyHeads<float, To>(x, heads, group, out);
    case DType::kBF16: return CopyHeads<BF16, To>(x, heads, group, out);
    case DType::kF16: return CopyHeads<F16, To>(x, heads, group, out);
    default: throw InternalError("LoadTensors: not a float");
  }
}

// Returns x itself if possible, else an aligned copy that the set owns.
ConstTensorView Prepare(const ConstTensorView& x, DType dtype, const std::vector<int64_t>& heads, int64_t group,
                        TensorSet& set) {
  const bool all_heads = heads.empty();
  const bool aligned = reinterpret_cast<uintptr_t>(x.data()) % SizeOf(x.dtype()) == 0;
  const bool rows = x.stride(3) == 1 || x.size(3) == 1;
  if (all_heads && aligned && rows && x.dtype() == dtype) return x;

  std::vector<int64_t> chosen = heads;
  if (all_heads) {
    group = 1;
    for (int64_t h = 0; h < x.size(2); ++h) chosen.push_back(h);
  }
  const std::array<int64_t, 4> sizes = {x.size(0), x.size(1), static_cast<int64_t>(chosen.size()), x.size(3)};
  const ConstTensorView shape(nullptr, dtype, sizes);  // checks for overflow
  const std::shared_ptr<void> memory(os::AllocateAligned(shape.num_elements() * static_cast<int64_t>(SizeOf(dtype))),
                                     &os::FreeAligned);
  switch (dtype) {
    case DType::kF64: CopyHeads(x, chosen, group, static_cast<double*>(memory.get())); break;
    case DType::kF32: CopyHeads(x, chosen, group, static_cast<float*>(memory.get())); break;
    case DType::kBF16: CopyHeads(x, chosen, group, static_cast<BF16*>(memory.get())); break;
    default: CopyHeads(x, chosen, group, static_cast<F16*>(memory.get()));
  }
  set.owners.push_back(memory);
  return ConstTensorView(memory.get(), dtype, sizes);
}

using Views = std::array<ConstTensorView, 3>;
using Names = std::array<std::string, 3>;  // names of files

// For example "q, k and v".
std::string Enumerate(const std::vector<std::string>& names) {
  std::string text = names[0];
  for (size_t i = 1; i < names.size(); ++i) {
    text += (i + 1 < names.size() ? ", " : " and ") + names[i];
  }
  return text;
}

// Finds the chosen layer among those that have all of `needed`. Returns the prefix of its names.
std::string OpenLayer(const std::string& path, const std::shared_ptr<const SafetensorsFile>& file,
                      const std::vector<std::string>& needed, const TensorChoice& choice, LayerOfFile& set) {
  set.file = path;
  set.layers = FindLayers(*file, needed);
  if (set.layers.empty()) {
    throw FileError(path + ": holds " + (file->names().empty() ? "no tensors" : Join(file->names())) + ", expected " +
                    Enumerate(needed) + ", or layers such as layers.0." + needed[0]);
  }
  set.layer = ChooseLayer(path, set.layers, choice.layer);
  set.facts = FactsOf(file->metadata(), set.layer);
  set.owners.push_back(file);
  return set.layer.empty() ? "" : set.layer + ".";
}

// Finds the tensors as views of the file itself, of any rank.
void ChooseViews(const std::string& path, const std::shared_ptr<const SafetensorsFile>& file,
                 const TensorChoice& choice, TensorSet& set, Views& views) {
  const std::string dot = OpenLayer(path, file, kNames, choice, set);
  for (size_t i = 0; i < 3; ++i) views[i] = file->tensor(dot + kNames[i]);
}

void OpenNpy(const Names& files, const TensorChoice& choice, TensorSet& set, Views& views) {
  set.file = files[0] + ", " + files[1] + ", " + files[2];
  set.layers = {""};
  set.layer = ChooseLayer(set.file, set.layers, choice.layer);
  for (size_t i = 0; i < 3; ++i) {
    const auto file = std::make_shared<NpyFile>(files[i]);
    views[i] = file->tensor();
    set.owners.push_back(file);
  }
}

// Checks the views against each other and converts them as `choice` says.
TensorSet Finish(const Names& files, const TensorChoice& choice, TensorSet set, Views views) {
  const std::string dot = set.layer.empty() ? "" : set.layer + ".";
  const int rank = views[0].rank();
  for (size_t i = 0; i < 3; ++i) {
    const std::string name = dot + kNames[i];
    if (i > 0 && views[i].rank() != rank) {
      throw FileError(files[i] + ": " + name + " has shape " + views[i].ShapeString() + ", expected rank " +
                      std::to_string(rank) + " as q");
    }
    views[i] = WithBatch(files[i], name, views[i]);
  }
  set.batched = rank == 4;
  set.q = views[0], set.k = views[1], set.v = views[2];
  CheckShapes(set.file, set);

  set.file_dtype = set.q.dtype();
  const bool half = SizeOf(set.file_dtype) == 2;
  set.dtype = choice.dtype.value_or(half ? DType::kF32 : set.file_dtype);
  if (!IsFloat(set.dtype)) throw InternalError("LoadTensors: not a float");
  std::vector<int64_t> heads;
  if (!choice.heads.empty()) {
    heads = ChooseHeads(set.file, choice.heads, set.q.size(2));
  }
  const int64_t group = set.k.size(2) == 0 ? 1 : std::max<int64_t>(set.q.size(2) / set.k.size(2), 1);
  set.q = Prepare(set.q, set.dtype, heads, 1, set);
  set.k = Prepare(set.k, set.dtype, heads, group, set);
  set.v = Prepare(set.v, set.dtype, heads, group, set);
  return set;
}

TensorSet LoadSafetensors(const std::string& path, const std::shared_ptr<const SafetensorsFile>& file,
                          const TensorChoice& choice) {
  TensorSet set;
  Views views;
  ChooseViews(path, file, choice, set, views);
  return Finish({path, path, path}, choice, std::move(set), views);
}

std::vector<std::string> Needed(std::span<const InputSpec> inputs) {
  std::vector<std::string> needed;
  for (const InputSpec& spec : inputs) {
    if (!spec.optional) needed.push_back(spec.name);
  }
  return needed;
}

}  // namespace

bool Holds(const TensorPaths& paths, std::span<const InputSpec> inputs) {
  if (paths.file.empty()) return Needed(inputs) == kNames;
  return !FindLayers(SafetensorsFile(paths.file), Needed(inputs)).empty();
}

NamedTensors LoadNamed(const TensorPaths& paths, std::span<const InputSpec> inputs, const TensorChoice& choice) {
  const std::vector<std::string> needed = Needed(inputs);
  NamedTensors set;
  if (!paths.file.empty()) {
    const auto file = std::make_shared<SafetensorsFile>(paths.file);
    const std::string dot = OpenLayer(paths.file, file, needed, choice, set);
    return FinishNamed(inputs, choice, std::move(set), [&](const std::string& name) {
      return file->Contains(dot + name) ? file->tensor(dot + name) : ConstTensorView();
    });
  }
  if (needed != kNames) {
    throw FileError(Enumerate({paths.q, paths.k, paths.v}) + ": are q, k and v, expected a .safetensors file of " +
                    Enumerate(needed));
  }
  TensorSet three;
  Views views;
  OpenNpy({paths.q, paths.k, paths.v}, choice, three, views);
  static_cast<LayerOfFile&>(set) = std::move(static_cast<LayerOfFile&>(three));
  return FinishNamed(inputs, choice, std::move(set), [&](const std::string& name) {
    const auto at = std::find(kNames.begin(), kNames.end(), name);
    return at == kNames.end() ? ConstTensorView() : views[static_cast<size_t>(at - kNames.begin())];
  });
}

TensorSet LoadTensors(const TensorPaths& paths, const TensorChoice& choice) {
  if (!paths.file.empty()) {
    return LoadSafetensors(paths.file, std::make_shared<SafetensorsFile>(paths.file), choice);
  }
  TensorSet set;
  Views views;
  const Names files = {paths.q, paths.k, paths.v};
  OpenNpy(files, choice, set, views);
  return Finish(files, choice, std::move(set), views);
}

TensorSet LoadTensors(const std::string& path, std::span<const uint8_t> bytes, const TensorChoice& choice) {
  return LoadSafetensors(path, std::make_shared<SafetensorsFile>(path, bytes), choice);
}

}  // namespace heed

// The layer of layer.py, loaded from its file: all but the mechanism, which a program adds, because only the mechanism
// mixes tokens.
#ifndef HEED_EXAMPLES_TASKS_LAYER_H_
#define HEED_EXAMPLES_TASKS_LAYER_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "command.h"
#include "heed/heed.h"

using Vector = std::vector<float>;
using Sizes = std::vector<int64_t>;

inline heed::TensorView View(Vector& x, const Sizes& sizes) {
  return heed::TensorView(x.data(), heed::DType::kF32, sizes);
}

inline heed::ConstTensorView View(const Vector& x, const Sizes& sizes) {
  return heed::ConstTensorView(x.data(), heed::DType::kF32, sizes);
}

// A view of the memory of `x` with other sizes.
inline heed::TensorView As(const heed::TensorView& x, const Sizes& sizes) {
  return x.present() ? heed::TensorView(x.data(), x.dtype(), sizes) : x;
}

// H, K and V; the number of keys that attention keeps, and the length of sequences if it is fixed.
struct Shape {
  int64_t heads, key, value, window = 0, tokens = 0;
};

// The arguments of a mechanism, by name: [N, H, K], [N, H, V] or [N, H] for N tokens; constants have no N, and scans
// have the values of each channel in a row.
using Arguments = std::map<std::string, heed::TensorView>;

// An absent view if the mechanism does not take it.
inline heed::TensorView Get(const Arguments& in, const std::string& name) {
  const auto found = in.find(name);
  return found == in.end() ? heed::TensorView() : found->second;
}

// Runs N tokens through a mechanism, whose state this function owns, if it has one. o is [N, H, V].
using Mix = std::function<void(heed::Context&, const Arguments&, const heed::TensorView& o)>;

inline void Nothing(heed::Context&, const Arguments& in, const heed::TensorView& o) {
  const heed::TensorView v = in.at("v");
  std::copy_n(v.as<float>(), v.num_elements(), o.as<float>());
}

inline float LogSigmoid(float x) { return std::min(x, 0.0f) - std::log1p(std::exp(-std::fabs(x))); }

inline float Softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

inline float Same(float x) { return x; }

inline float Sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

inline float Rate(float x) { return -std::exp(-x); }

inline float Negative(float x) { return -x; }

inline float StepSize(float x) { return Softplus(-x); }

inline float Share(float x) { return x / 6; }

// The size of an argument per head: K, V, 1, K pairs; for each value channel 4, K, K pairs, or one per token. The last
// two are matrices that all heads share, of K columns and of one per token.
enum class Per { kKey, kValue, kHead, kKeyPairs, kFilter, kRates, kPairs, kTaps, kFeatures, kRanks };

// An argument: projected from the layer's input, or constant. An argument with a map has a bias.
struct Input {
  Per size;
  float (*map)(float) = nullptr;
  bool constant = false;
  bool rotary = false;
  bool unit = false;
};

using Inputs = std::map<std::string, Input>;

// Inputs that have names in layer.py.
inline constexpr Input kOfKey{Per::kKey}, kOfValue{Per::kValue};
inline constexpr Input kRotated{.size = Per::kKey, .rotary = true};

inline Inputs InputsOfSelectiveScan() {
  return {{"u", kOfValue},
          {"filter", {Per::kFilter, Share, true}},
          {"delta", {Per::kValue, StepSize}},
          {"A", {Per::kRates, Rate, true}},
          {"B", kOfKey},
          {"C", kOfKey}};
}

inline Inputs InputsOfS4d() {
  return {{"u", kOfValue},
          {"log_dt", {Per::kValue, Negative, true}},
          {"log_A_real", {.size = Per::kRates, .constant = true}},
          {"A_imag", {Per::kRates, Same, true}},
          {"C", {Per::kPairs, Same, true}}};
}

// A file from an untrusted source: tensors that are read from it must have the requested shape.
class ModelFile {
 public:
  explicit ModelFile(const std::string& path) : path_(path), file_(path) {}

  [[noreturn]] void Fail(const std::string& what) const { throw std::runtime_error(path_ + ": " + what); }

  bool Contains(const std::string& name) const { return file_.Contains(name); }

  const std::string& Text(const std::string& key) const {
    const auto found = file_.metadata().find(key);
    if (found == file_.metadata().end()) Fail("no metadata '" + key + "', expected train.py's");
    return found->second;
  }

  int64_t Integer(const std::string& key, int64_t largest) const {
    return Parse(path_ + ": " + key, Text(key), 1, largest);
  }

  // The number of rows or columns of a matrix, at least 1.
  int64_t Size(const std::string& name, int axis) const {
    const heed::ConstTensorView x = file_.tensor(name);
    if (x.rank() != 2 || x.num_elements() == 0) {
      Fail(name + " has shape " + x.ShapeString() + ", expected a matrix");
    }
    return x.size(axis);
  }

  int64_t Elements(const std::string& name) const { return file_.tensor(name).num_elements(); }

  Vector Read(const std::string& name, const Sizes& sizes) const {
    const heed::ConstTensorView x = file_.tensor(name);
    if (x.dtype() != heed::DType::kF32 || !std::ranges::equal(x.sizes(), sizes)) {
      Fail(name + " is " + heed::Name(x.dtype()) + x.ShapeString() + ", expected f32" + heed::ShapeString(sizes));
    }
    return Vector(x.as<float>(), x.as<float>() + x.num_elements());
  }

  static std::string Prefix(int layer) { return "layers." + std::to_string(layer) + "."; }

  int Layers() const {
    int layers = 0;
    while (layers < 256 && Contains(Prefix(layers) + "norm1.weight")) ++layers;
    return layers;
  }

 private:
  std::string path_;
  heed::SafetensorsFile file_;
};

// The entry of a table of mechanisms that a file names.
template <class Table>
const typename Table::mapped_type& Find(const ModelFile& file, const Table& mechanisms) {
  const auto found = mechanisms.find(file.Text("mechanism"));
  if (found == mechanisms.end()) file.Fail("this program has no such mechanism");
  return found->second;
}

// The sizes that follow from the first layer's tensors.
inline Shape ShapeOf(const ModelFile& file, const Inputs& inputs) {
  const int64_t heads = file.Integer("heads", 1024);
  int64_t key = 1;
  for (const char* query : {"q", "r", "C"}) {
    const std::string name = std::string("layers.0.inputs.") + query + ".weight";
    if (file.Contains(name)) key = file.Size(name, 0) / heads;
  }
  const int64_t value = file.Size("layers.0.gate.weight", 0) / heads;
  // State spaces have no projection with this size.
  const std::string rates = "layers.0.inputs.A_imag.bias";
  const auto own = inputs.find("A_imag");
  if (own != inputs.end() && file.Contains(rates) && value > 0) {
    key = file.Elements(rates) / (heads * (own->second.size == Per::kRates ? value : 1));
  }
  if (key < 1 || key > 4096 || value < 1) file.Fail("expected 1 to 4096 channels per head");
  return {heads, key, value};
}

// y = W x + b for each row x of [N, inputs].
class Linear {
 public:
  Linear(const ModelFile& file, const std::string& name, int64_t outputs, int64_t inputs, bool has_bias = false) {
    const Vector weight = file.Read(name + ".weight", {outputs, inputs});
    const Vector bias = has_bias ? file.Read(name + ".bias", {outputs}) : Vector();
    product_ = heed::layers::Linear(View(weight, {outputs, inputs}),
                                    has_bias ? View(bias, {outputs}) : heed::ConstTensorView());
  }

  Vector operator()(heed::Context& ctx, const Vector& x) const {
    const int64_t rows = static_cast<int64_t>(x.size()) / product_.inputs();
    Vector y(static_cast<size_t>(rows * product_.outputs()));
    product_.Forward(ctx, View(x, {rows, product_.inputs()}), View(y, {rows, product_.outputs()}));
    return y;
  }

 private:
  heed::layers::Linear product_;
};

// Divides each row of [N, size] by its root mean square.
inline void Normalize(Vector& x, int64_t size) {
  const size_t n = static_cast<size_t>(size);
  for (size_t row = 0; row < x.size(); row += n) {
    const std::span<float> values(x.data() + row, n);
    double squares = 0;
    for (const float value : values) squares += double{value} * value;
    const double mean = squares / static_cast<double>(n);
    for (float& value : values) value *= static_cast<float>(1 / std::sqrt(mean + 1e-6));
  }
}

inline Vector Norm(Vector x, const Vector& weight) {
  Normalize(x, static_cast<int64_t>(weight.size()));
  for (size_t i = 0; i < x.size(); ++i) x[i] *= weight[i % weight.size()];
  return x;
}

inline void Add(Vector& x, const Vector& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

// An argument of a mechanism: [N, H, K], [N, H, V] or [N, H]; a constant has no N.
class Argument {
 public:
  Argument(const ModelFile& file, const std::string& name, const Input& input, int64_t width, const Shape& n)
      : map_(input.map), rotary_(input.rotary), unit_(input.unit) {
    const std::map<Per, int64_t> sizes = {
        {Per::kKey, n.key},          {Per::kValue, n.value},           {Per::kHead, 1},
        {Per::kFilter, 4 * n.value}, {Per::kRates, n.key * n.value},   {Per::kPairs, 2 * n.key * n.value},
        {Per::kKeyPairs, 2 * n.key}, {Per::kTaps, n.tokens * n.value}, {Per::kFeatures, n.key},
        {Per::kRanks, n.tokens}};
    const int64_t size = sizes.at(input.size);
    const bool of_all_heads = input.size == Per::kFeatures || input.size == Per::kRanks;
    sizes_ = {of_all_heads ? file.Elements(name + ".bias") / size : n.heads};
    if (input.size != Per::kHead) sizes_.push_back(size);
    if (input.constant) {
      constant_ = Mapped(file.Read(name + ".bias", {sizes_[0] * size}));
    } else {
      project_.emplace(file, name, n.heads * size, width, map_ != nullptr);
    }
  }

  Vector operator()(heed::Context& ctx, const Vector& u, const std::vector<int64_t>& positions) const {
    if (!project_) return constant_;
    Vector x = Mapped((*project_)(ctx, u));
    if (unit_) Normalize(x);
    if (!rotary_) return x;
    Vector rotated(x.size());
    const int64_t N = static_cast<int64_t>(positions.size());
    heed::Rotary(ctx, View(x, SizesOf(N)), heed::ConstTensorView(positions.data(), heed::DType::kI64, {N}),
                 heed::RotaryPairs::kHalfSplit, {}, View(rotated, SizesOf(N)));
    return rotated;
  }

  Sizes SizesOf(int64_t N) const {
    Sizes sizes = sizes_;
    if (project_) sizes.insert(sizes.begin(), N);
    return sizes;
  }

 private:
  Vector Mapped(Vector x) const {
    if (map_ != nullptr) std::ranges::transform(x, x.begin(), map_);
    return x;
  }

  // Normalises rows to norm 1.
  void Normalize(Vector& x) const {
    const auto size = static_cast<size_t>(sizes_.back());
    for (size_t row = 0; row < x.size(); row += size) {
      double sum = 0;
      for (size_t i = row; i < row + size; ++i) sum += static_cast<double>(x[i]) * x[i];
      const auto norm = static_cast<float>(std::max(std::sqrt(sum), 1e-12));
      for (size_t i = row; i < row + size; ++i) x[i] /= norm;
    }
  }

  float (*map_)(float);
  bool rotary_, unit_;
  std::optional<Linear> project_;  // absent for a constant
  Vector constant_;
  Sizes sizes_;
};

// The layer of layer.py.
class Layer {
 public:
  Layer(const ModelFile& file, const std::string& prefix, int64_t width, const Inputs& inputs, const Shape& n)
      : heads_(n.heads), value_(n.value), norm1_(file.Read(prefix + "norm1.weight", {width})),
        norm2_(file.Read(prefix + "norm2.weight", {width})), gate_(file, prefix + "gate", heads_ * value_, width),
        out_(file, prefix + "out", width, heads_ * value_),
        up_(file, prefix + "up", file.Size(prefix + "up.weight", 0), width),
        down_(file, prefix + "down", width, file.Size(prefix + "up.weight", 0)) {
    for (const auto& [name, input] : inputs) {
      arguments_.emplace(name, Argument(file, prefix + "inputs." + name, input, width, n));
    }
  }

  // x is [N, width].
  void operator()(heed::Context& ctx, Vector& x, const std::vector<int64_t>& positions, const Mix& mix) const {
    const int64_t N = static_cast<int64_t>(positions.size());
    const Vector u = Norm(x, norm1_);
    std::map<std::string, Vector> values;
    Arguments in;
    for (const auto& [name, argument] : arguments_) {
      values[name] = argument(ctx, u, positions);
      in.emplace(name, View(values[name], argument.SizesOf(N)));
    }
    Vector o(static_cast<size_t>(N * heads_ * value_));
    mix(ctx, in, View(o, {N, heads_, value_}));
    Normalize(o, value_);
    const Vector gate = gate_(ctx, u);
    for (size_t i = 0; i < o.size(); ++i) o[i] *= gate[i] / (1 + std::exp(-gate[i]));
    Add(x, out_(ctx, o));

    Vector hidden = up_(ctx, Norm(x, norm2_));
    for (float& h : hidden) h = h > 0 ? h * h : 0;
    Add(x, down_(ctx, hidden));
  }

 private:
  int64_t heads_, value_;
  Vector norm1_, norm2_;
  Linear gate_, out_, up_, down_;
  std::map<std::string, Argument> arguments_;
};

#endif  // HEED_EXAMPLES_TASKS_LAYER_H_

// The byte-level model of byte_lm.py from its file: all but the mechanism, which a program
// brings, because only that looks from one byte to another.
#ifndef HEED_EXAMPLES_BYTE_LM_MODEL_H_
#define HEED_EXAMPLES_BYTE_LM_MODEL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "command.h"
#include "heed/heed.h"
#include "mechanisms.h"

inline constexpr int64_t kBytes = 256;

// A file that anybody may have written: what is read from it has the shape that is asked for.
class ModelFile {
 public:
  explicit ModelFile(const std::string& path) : path_(path), file_(path) {}

  [[noreturn]] void Fail(const std::string& what) const {
    throw std::runtime_error(path_ + ": " + what);
  }

  bool Contains(const std::string& name) const { return file_.Contains(name); }

  const std::string& Text(const std::string& key) const {
    const auto found = file_.metadata().find(key);
    if (found == file_.metadata().end()) Fail("no metadata '" + key + "', expected train.py's");
    return found->second;
  }

  int64_t Integer(const std::string& key, int64_t largest) const {
    return Parse(path_ + ": " + key, Text(key), 1, largest);
  }

  // The rows or columns of a matrix, at least 1.
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
      Fail(name + " is " + heed::Name(x.dtype()) + x.ShapeString() + ", expected f32" +
           heed::ShapeString(sizes));
    }
    return Vector(x.as<float>(), x.as<float>() + x.num_elements());
  }

 private:
  std::string path_;
  heed::SafetensorsFile file_;
};

// What a file says of its model: the mechanism, its sizes, and how many layers.
struct Architecture {
  explicit Architecture(const ModelFile& file) {
    const auto found = Mechanisms().find(file.Text("mechanism"));
    if (found == Mechanisms().end()) file.Fail("this program has no such mechanism");
    mechanism = &found->second;
    const int64_t heads = file.Integer("heads", 1024);
    int64_t key = 1;
    for (const char* query : {"q", "r", "C"}) {
      const std::string name = std::string("layers.0.inputs.") + query + ".weight";
      if (file.Contains(name)) key = file.Size(name, 0) / heads;
    }
    const int64_t value = file.Size("layers.0.gate.weight", 0) / heads;
    // State spaces have no projection that says it.
    const std::string rates = "layers.0.inputs.A_imag.bias";
    const auto own = mechanism->inputs.find("A_imag");
    if (own != mechanism->inputs.end() && file.Contains(rates) && value > 0) {
      key = file.Elements(rates) / (heads * (own->second.size == Per::kRates ? value : 1));
    }
    if (key < 1 || key > 4096 || value < 1) file.Fail("expected 1 to 4096 channels per head");
    shape = {heads, key, value, file.Integer("window", 65536)};
    while (layers < 256 && file.Contains(Prefix(layers) + "norm1.weight")) ++layers;
  }

  static std::string Prefix(int layer) { return "layers." + std::to_string(layer) + "."; }

  const Mechanism* mechanism;
  Shape shape;
  int layers = 0;
};

// y = W x + b for each row x of [N, inputs]. W is kept transposed, so that the compiler's
// vectors run along y.
class Linear {
 public:
  Linear(const ModelFile& file, const std::string& name, int64_t outputs, int64_t inputs,
         bool has_bias = false)
      : inputs_(static_cast<size_t>(inputs)), bias_(static_cast<size_t>(outputs)) {
    if (has_bias) bias_ = file.Read(name + ".bias", {outputs});
    const Vector rows = file.Read(name + ".weight", {outputs, inputs});
    for (size_t j = 0; j < inputs_; ++j) {
      for (size_t i = j; i < rows.size(); i += inputs_) columns_.push_back(rows[i]);
    }
  }

  Vector operator()(const Vector& x) const {
    const size_t outputs = bias_.size();
    Vector all;
    for (size_t row = 0; row < x.size(); row += inputs_) {
      Vector y = bias_;
      const float* column = columns_.data();
      for (size_t j = 0; j < inputs_; ++j, column += outputs) {
        const float factor = x[row + j];
        for (size_t i = 0; i < outputs; ++i) y[i] += factor * column[i];
      }
      all.insert(all.end(), y.begin(), y.end());
    }
    return all;
  }

 private:
  size_t inputs_;
  Vector bias_, columns_;
};

// Each row of [N, size] by its root mean square.
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

// An argument of a mechanism: [N, H, K], [N, H, V] or [N, H]; a constant without the N.
class Argument {
 public:
  Argument(const ModelFile& file, const std::string& name, const Input& input, int64_t width,
           const Shape& n)
      : map_(input.map), rotary_(input.rotary), unit_(input.unit) {
    const std::map<Per, int64_t> sizes = {
        {Per::kKey, n.key},           {Per::kValue, n.value},         {Per::kHead, 1},
        {Per::kFilter, 4 * n.value},  {Per::kRates, n.key * n.value}, {Per::kPairs, 2 * n.key * n.value},
        {Per::kKeyPairs, 2 * n.key}};
    const int64_t size = sizes.at(input.size);
    sizes_ = {n.heads};
    if (input.size != Per::kHead) sizes_.push_back(size);
    if (input.constant) {
      constant_ = Mapped(file.Read(name + ".bias", {n.heads * size}));
    } else {
      project_.emplace(file, name, n.heads * size, width, map_ != nullptr);
    }
  }

  Vector operator()(heed::Context& ctx, const Vector& u,
                    const std::vector<int64_t>& positions) const {
    if (!project_) return constant_;
    Vector x = Mapped((*project_)(u));
    if (unit_) Normalize(x);
    if (!rotary_) return x;
    Vector turned(x.size());
    const int64_t N = static_cast<int64_t>(positions.size());
    heed::Rotary(ctx, View(x, SizesOf(N)),
                 heed::ConstTensorView(positions.data(), heed::DType::kI64, {N}),
                 heed::RotaryPairs::kHalfSplit, {}, View(turned, SizesOf(N)));
    return turned;
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

  // Rows of norm 1.
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
  std::optional<Linear> project_;  // not of a constant
  Vector constant_;
  Sizes sizes_;
};

// Layer of byte_lm.py.
class Layer {
 public:
  Layer(const ModelFile& file, const std::string& prefix, int64_t width, const Architecture& a)
      : heads_(a.shape.heads),
        value_(a.shape.value),
        norm1_(file.Read(prefix + "norm1.weight", {width})),
        norm2_(file.Read(prefix + "norm2.weight", {width})),
        gate_(file, prefix + "gate", heads_ * value_, width),
        out_(file, prefix + "out", width, heads_ * value_),
        up_(file, prefix + "up", file.Size(prefix + "up.weight", 0), width),
        down_(file, prefix + "down", width, file.Size(prefix + "up.weight", 0)) {
    for (const auto& [name, input] : a.mechanism->inputs) {
      arguments_.emplace(name, Argument(file, prefix + "inputs." + name, input, width, a.shape));
    }
  }

  // x is [N, width].
  void operator()(heed::Context& ctx, Vector& x, const std::vector<int64_t>& positions,
                  const Mix& mix) const {
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
    const Vector gate = gate_(u);
    for (size_t i = 0; i < o.size(); ++i) o[i] *= gate[i] / (1 + std::exp(-gate[i]));
    Add(x, out_(o));

    Vector hidden = up_(Norm(x, norm2_));
    for (float& h : hidden) h = h > 0 ? h * h : 0;
    Add(x, down_(hidden));
  }

 private:
  int64_t heads_, value_;
  Vector norm1_, norm2_;
  Linear gate_, out_, up_, down_;
  std::map<std::string, Argument> arguments_;
};

// One byte of a text, and what is known of the others without a mechanism.
struct Token {
  unsigned char byte;
  unsigned char before;  // at position - 1, if that is not negative
  int64_t position;
};

class ByteModel {
 public:
  ByteModel(const ModelFile& file, const Architecture& a)
      : width_(file.Size("byte.weight", 1)),
        byte_(file.Read("byte.weight", {kBytes, width_})),
        byte_before_(file.Read("byte_before.weight", {kBytes, width_})),
        norm_(file.Read("norm.weight", {width_})),
        head_(file, "head", kBytes, width_) {
    for (int i = 0; i < a.layers; ++i) {
      layers_.emplace_back(file, Architecture::Prefix(i), width_, a);
    }
  }

  // Logits [N, 256] of what follows each of N tokens. Layers see a token alone, but for their
  // mechanisms mixes[layer], which know whose tokens these are and what came before.
  Vector Logits(heed::Context& ctx, std::span<const Token> tokens,
                std::span<const Mix> mixes) const {
    Vector x;
    std::vector<int64_t> positions;
    for (const Token& token : tokens) {
      Vector row = Row(byte_, token.byte);
      if (token.position > 0) Add(row, Row(byte_before_, token.before));
      x.insert(x.end(), row.begin(), row.end());
      positions.push_back(token.position);
    }
    for (size_t i = 0; i < layers_.size(); ++i) layers_[i](ctx, x, positions, mixes[i]);
    return head_(Norm(std::move(x), norm_));
  }

 private:
  Vector Row(const Vector& table, unsigned char byte) const {
    return Vector(table.begin() + byte * width_, table.begin() + (byte + 1) * width_);
  }

  int64_t width_;
  Vector byte_, byte_before_, norm_;
  Linear head_;
  std::vector<Layer> layers_;
};

// A byte drawn by the probabilities of logits [256], sharpened by a temperature.
inline constexpr double kTemperature = 0.7;

inline unsigned char Sample(std::span<const float> logits, std::mt19937_64& random) {
  const double largest = *std::ranges::max_element(logits);
  std::vector<double> sums;
  double sum = 0;
  for (const float x : logits) sums.push_back(sum += std::exp((x - largest) / kTemperature));
  const double drawn = std::ldexp(static_cast<double>(random() >> 11), -53) * sum;
  const auto at = std::ranges::upper_bound(sums, drawn) - sums.begin();
  return static_cast<unsigned char>(std::min<int64_t>(at, kBytes - 1));
}

#endif  // HEED_EXAMPLES_BYTE_LM_MODEL_H_

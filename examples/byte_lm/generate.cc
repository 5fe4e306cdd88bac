// Text from a model that train.py has written, one byte at a time. The file is all it needs.
//
//   example_byte_lm FILE [--prompt TEXT] [--bytes N] [--seed N] [--logits OUT.npy]
//
// With --logits no text is written but the logits after each byte of the prompt, [N, 256].
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/heed.h"
#include "mechanisms.h"

namespace {

constexpr double kTemperature = 0.7;
constexpr int64_t kBytes = 256;

int64_t Parse(const std::string& what, std::string_view text, int64_t smallest, int64_t largest) {
  int64_t value = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  if (error != std::errc() || end != last || value < smallest || value > largest) {
    throw std::runtime_error(what + " is '" + std::string(text) + "', expected " +
                             std::to_string(smallest) + " to " + std::to_string(largest));
  }
  return value;
}

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

// y = W x + b. W is kept transposed, so that the compiler's vectors run along y.
class Linear {
 public:
  Linear(const ModelFile& file, const std::string& name, int64_t outputs, int64_t inputs,
         bool has_bias = false)
      : bias_(static_cast<size_t>(outputs)) {
    if (has_bias) bias_ = file.Read(name + ".bias", {outputs});
    const Vector rows = file.Read(name + ".weight", {outputs, inputs});
    for (size_t j = 0; j < static_cast<size_t>(inputs); ++j) {
      for (size_t i = j; i < rows.size(); i += static_cast<size_t>(inputs)) {
        columns_.push_back(rows[i]);
      }
    }
  }

  Vector operator()(const Vector& x) const {
    Vector y = bias_;
    const float* column = columns_.data();
    for (const float factor : x) {
      for (size_t i = 0; i < y.size(); ++i) y[i] += factor * column[i];
      column += y.size();
    }
    return y;
  }

 private:
  Vector bias_, columns_;
};

void Normalize(std::span<float> x) {
  double squares = 0;
  for (const float value : x) squares += double{value} * value;
  const double mean = squares / static_cast<double>(x.size());
  for (float& value : x) value *= static_cast<float>(1 / std::sqrt(mean + 1e-6));
}

Vector Norm(Vector x, const Vector& weight) {
  Normalize(x);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= weight[i];
  return x;
}

void Add(Vector& x, const Vector& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

class Argument {
 public:
  Argument(const ModelFile& file, const std::string& name, const Input& input, int64_t width,
           const Shape& n)
      : map_(input.map), rotary_(input.rotary) {
    const int64_t size = input.size == Per::kHead  ? 1
                         : input.size == Per::kKey ? n.key
                                                   : n.value;
    sizes_ = input.constant ? Sizes{n.heads} : Sizes{1, n.heads};
    if (input.size != Per::kHead) sizes_.push_back(size);
    if (input.constant) {
      value_ = Mapped(file.Read(name + ".bias", {n.heads * size}));
    } else {
      project_.emplace(file, name, n.heads * size, width, map_ != nullptr);
    }
  }

  // Valid until the next call.
  heed::TensorView operator()(heed::Context& ctx, const Vector& u, int64_t position) {
    if (project_) value_ = Mapped((*project_)(u));
    if (rotary_) {
      Vector x = value_;
      const heed::ConstTensorView positions(&position, heed::DType::kI64, {1});
      heed::Rotary(ctx, View(x, sizes_), positions, heed::RotaryPairs::kHalfSplit, {},
                   View(value_, sizes_));
    }
    return View(value_, sizes_);
  }

 private:
  Vector Mapped(Vector x) const {
    if (map_ != nullptr) std::ranges::transform(x, x.begin(), map_);
    return x;
  }

  float (*map_)(float);
  bool rotary_;
  std::optional<Linear> project_;  // not of a constant
  Vector value_;
  Sizes sizes_;
};

// Layer of byte_lm.py, and what it remembers of the bytes so far.
class Layer {
 public:
  Layer(const ModelFile& file, const std::string& prefix, int64_t width, const Shape& n,
        const Mechanism& mechanism)
      : heads_(n.heads),
        value_(n.value),
        norm1_(file.Read(prefix + "norm1.weight", {width})),
        norm2_(file.Read(prefix + "norm2.weight", {width})),
        gate_(file, prefix + "gate", n.heads * n.value, width),
        out_(file, prefix + "out", width, n.heads * n.value),
        up_(file, prefix + "up", file.Size(prefix + "up.weight", 0), width),
        down_(file, prefix + "down", width, file.Size(prefix + "up.weight", 0)),
        mix_(mechanism.make(n)) {
    for (const auto& [name, input] : mechanism.inputs) {
      arguments_.emplace(name, Argument(file, prefix + "inputs." + name, input, width, n));
    }
  }

  void Step(heed::Context& ctx, Vector& x, int64_t position) {
    const Vector u = Norm(x, norm1_);
    Arguments in;
    for (auto& [name, argument] : arguments_) in.emplace(name, argument(ctx, u, position));
    Vector o(static_cast<size_t>(heads_ * value_));
    mix_(ctx, in, View(o, {1, heads_, value_}));
    const size_t size = static_cast<size_t>(value_);
    for (size_t i = 0; i < o.size(); i += size) Normalize({o.data() + i, size});
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
  Mix mix_;
};

class ByteModel {
 public:
  explicit ByteModel(const ModelFile& file)
      : width_(file.Size("byte.weight", 1)),
        byte_(file.Read("byte.weight", {kBytes, width_})),
        byte_before_(file.Read("byte_before.weight", {kBytes, width_})),
        norm_(file.Read("norm.weight", {width_})),
        head_(file, "head", kBytes, width_) {
    const auto found = Mechanisms().find(file.Text("mechanism"));
    if (found == Mechanisms().end()) file.Fail("this program has no such mechanism");
    const int64_t heads = file.Integer("heads", 1024);
    int64_t key = 1;
    for (const char* query : {"q", "r", "C"}) {
      const std::string name = std::string("layers.0.inputs.") + query + ".weight";
      if (file.Contains(name)) key = file.Size(name, 0) / heads;
    }
    const int64_t value = file.Size("layers.0.gate.weight", 0) / heads;
    if (key < 1 || key > 4096 || value < 1) file.Fail("expected 1 to 4096 channels per head");
    const Shape n = {heads, key, value, file.Integer("window", 65536)};
    for (int i = 0; i < 256; ++i) {
      const std::string prefix = "layers." + std::to_string(i) + ".";
      if (!file.Contains(prefix + "norm1.weight")) break;
      layers_.emplace_back(file, prefix, width_, n, found->second);
    }
  }

  // Logits of what follows, after one more byte.
  Vector Step(heed::Context& ctx, unsigned char byte) {
    Vector x = Row(byte_, byte);
    if (position_ > 0) Add(x, Row(byte_before_, before_));
    for (Layer& layer : layers_) layer.Step(ctx, x, position_);
    before_ = byte;
    ++position_;
    return head_(Norm(x, norm_));
  }

 private:
  Vector Row(const Vector& table, unsigned char byte) const {
    return Vector(table.begin() + byte * width_, table.begin() + (byte + 1) * width_);
  }

  int64_t width_, position_ = 0;
  unsigned char before_ = 0;
  Vector byte_, byte_before_, norm_;
  Linear head_;
  std::vector<Layer> layers_;
};

unsigned char Sample(const Vector& logits, std::mt19937_64& random) {
  const double largest = *std::ranges::max_element(logits);
  std::vector<double> sums;
  double sum = 0;
  for (const float x : logits) sums.push_back(sum += std::exp((x - largest) / kTemperature));
  const double drawn = std::ldexp(static_cast<double>(random() >> 11), -53) * sum;
  const auto at = std::ranges::upper_bound(sums, drawn) - sums.begin();
  return static_cast<unsigned char>(std::min<int64_t>(at, kBytes - 1));
}

int Run(std::span<char* const> arguments) {
  std::map<std::string, std::string> options = {
      {"--prompt", "Alice was "}, {"--bytes", "400"}, {"--seed", "0"}, {"--logits", ""}};
  bool usage = arguments.size() >= 2 && arguments.size() % 2 == 0;
  for (size_t i = 2; usage && i < arguments.size(); i += 2) {
    usage = options.contains(arguments[i]);
    options[arguments[i]] = arguments[i + 1];
  }
  if (!usage) {
    throw std::runtime_error(
        "expected FILE [--prompt TEXT] [--bytes N] [--seed N] [--logits OUT.npy]");
  }
  const std::string prompt = options["--prompt"], npy = options["--logits"];
  if (prompt.empty()) throw std::runtime_error("--prompt is empty, expected a byte or more");
  const int64_t count = npy.empty() ? Parse("--bytes", options["--bytes"], 0, 1 << 30) : 0;
  std::mt19937_64 random(static_cast<uint64_t>(Parse("--seed", options["--seed"], 0, INT64_MAX)));

  ByteModel model(ModelFile{arguments[1]});
  heed::Context ctx(1);
  Vector logits, all;
  const auto began = std::chrono::steady_clock::now();
  for (const char byte : prompt) {
    logits = model.Step(ctx, static_cast<unsigned char>(byte));
    if (!npy.empty()) all.insert(all.end(), logits.begin(), logits.end());
  }
  if (!npy.empty()) {
    heed::WriteNpy(npy, View(all, {static_cast<int64_t>(prompt.size()), kBytes}));
    return 0;
  }
  std::fputs(prompt.c_str(), stdout);
  for (int64_t i = 0; i < count; ++i) {
    const unsigned char byte = Sample(logits, random);
    std::putchar(byte);
    if (byte == '\n') std::fflush(stdout);
    logits = model.Step(ctx, byte);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::putchar('\n');
  std::fprintf(stderr, "%.0f bytes/s, one at a time\n",
               static_cast<double>(static_cast<int64_t>(prompt.size()) + count) / took.count());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run({argv, static_cast<size_t>(argc)});
  } catch (const std::exception& error) {  // one line: what is wrong, what was expected
    std::fprintf(stderr, "example_byte_lm: %s\n", error.what());
    return 1;
  }
}

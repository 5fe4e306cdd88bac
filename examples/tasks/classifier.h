// Classes of sequences by a model that classifier.py has trained: a stem that the task defines, layers with one
// mechanism, the mean over tokens, and a logit for each class.
#ifndef HEED_EXAMPLES_TASKS_CLASSIFIER_H_
#define HEED_EXAMPLES_TASKS_CLASSIFIER_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "command.h"
#include "heed/heed.h"
#include "layer.h"

// Views of a layer's arguments to its mechanism, as a batch of one sequence.
inline heed::TensorView Batch(const heed::TensorView& x) {  // [N, H, D] as [1, N, H, D]
  return As(x, {1, x.size(0), x.size(1), x.size(2)});
}
inline heed::TensorView Channels(const heed::TensorView& x) {  // [N, H, V] as [1, H V, N]
  const int64_t N = x.size(0), D = x.size(1) * x.size(2);
  return heed::TensorView(x.data(), x.dtype(), {1, D, N}, {N * D, 1, D});
}
inline heed::TensorView Groups(const heed::TensorView& x) {  // [N, H, K] as [1, H, K, N]
  const int64_t N = x.size(0), H = x.size(1), K = x.size(2);
  return heed::TensorView(x.data(), x.dtype(), {1, H, K, N}, {N * H * K, K, 1, H * K});
}
// Constants: [H, V...] as [H V, ...].
inline heed::TensorView Constant(const Arguments& in, const std::string& name, int64_t D) {
  const heed::TensorView x = in.at(name);
  return As(x, {D, x.num_elements() / D});
}

// Mechanisms of several tasks. This one is applied after the short convolution of Mamba.
inline void SelectiveScan(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  const heed::TensorView u = Channels(in.at("u"));
  const int64_t D = u.size(1);
  Vector filtered(static_cast<size_t>(u.num_elements()));
  heed::causal_conv1d::Options silu;
  silu.activation = heed::causal_conv1d::Activation::kSilu;
  heed::selective_scan::Inputs scan;
  scan.u = Channels(View(filtered, {u.size(2), 1, D}));
  heed::causal_conv1d::Forward(ctx, {u, Constant(in, "filter", D), {}, {}}, silu,
                               {Channels(View(filtered, {u.size(2), 1, D})), {}});
  scan.delta = Channels(in.at("delta"));
  scan.A = Constant(in, "A", D);
  scan.B = Groups(in.at("B"));
  scan.C = Groups(in.at("C"));
  heed::selective_scan::Forward(ctx, scan, {}, {Channels(o), {}});
}

inline void S4d(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  heed::s4d::Inputs scan;
  scan.u = Channels(in.at("u"));
  const int64_t D = scan.u.size(1);
  scan.log_dt = As(in.at("log_dt"), {D});
  scan.log_A_real = Constant(in, "log_A_real", D);
  scan.A_imag = Constant(in, "A_imag", D);
  scan.C = As(in.at("C"), {D, scan.A_imag.size(1), 2});
  heed::s4d::Forward(ctx, scan, {}, {Channels(o), {}});
}

// The parts in which tasks differ.
struct Task {
  const char* program;
  int64_t numbers, tokens;  // per sequence

  struct Mechanism {
    Inputs inputs;
    Mix mix;
  };
  std::map<std::string, Mechanism> mechanisms;

  // Makes the rows [tokens, width] of a sequence, given a file and the width of its layers.
  using Stem = std::function<Vector(heed::Context&, std::span<const float>)>;
  Stem (*stem)(const ModelFile&, int64_t width);
};

class Classifier {
 public:
  Classifier(const ModelFile& file, const Task& task)
      : mix_(Find(file, task.mechanisms).mix), width_(file.Size("head.weight", 1)), stem_(task.stem(file, width_)),
        norm_(file.Read("norm.weight", {width_})), head_(file, "head", file.Size("head.weight", 0), width_, true),
        positions_(static_cast<size_t>(task.tokens)) {
    std::iota(positions_.begin(), positions_.end(), 0);
    const Inputs& inputs = Find(file, task.mechanisms).inputs;
    Shape shape = ShapeOf(file, inputs);
    shape.tokens = task.tokens;
    for (int i = 0; i < file.Layers(); ++i) {
      layers_.emplace_back(file, ModelFile::Prefix(i), width_, inputs, shape);
    }
    const std::string& labels = file.Text("labels");
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
      end = labels.find(',', begin);
      labels_.push_back(labels.substr(begin, end - begin));
    }
    if (static_cast<int64_t>(labels_.size()) != file.Size("head.weight", 0)) {
      file.Fail("has " + std::to_string(labels_.size()) + " labels, expected one per row of head");
    }
  }

  const std::vector<std::string>& labels() const { return labels_; }

  Vector Logits(heed::Context& ctx, std::span<const float> sequence) const {
    Vector x = stem_(ctx, sequence);
    for (const Layer& layer : layers_) layer(ctx, x, positions_, mix_);
    x = Norm(std::move(x), norm_);
    Vector mean(static_cast<size_t>(width_));
    for (size_t i = 0; i < x.size(); ++i) mean[i % mean.size()] += x[i];
    for (float& sum : mean) sum /= static_cast<float>(positions_.size());
    return head_(ctx, mean);
  }

 private:
  Mix mix_;
  int64_t width_;
  Task::Stem stem_;
  Vector norm_;
  Linear head_;
  std::vector<int64_t> positions_;
  std::vector<Layer> layers_;
  std::vector<std::string> labels_;
};

// PROGRAM FILE SEQUENCES.npy [--logits OUT.npy]: prints the class of each row of f32 [N, numbers], one per line, or
// writes the logits of all.
inline int Classify(const Task& task, int argc, char** argv) {
  return Main(task.program, argc, argv, [&](std::span<char* const> arguments) {
    const Command command(arguments, {{"--logits", ""}}, "FILE SEQUENCES.npy [--logits OUT.npy]", 2);
    const ModelFile file(command.file(0));
    const Classifier model(file, task);
    const heed::NpyFile npy(command.file(1));
    const heed::ConstTensorView all = npy.tensor();
    if (all.dtype() != heed::DType::kF32 || all.rank() != 2 || all.size(1) != task.numbers || all.stride(1) != 1) {
      throw std::runtime_error(command.file(1) + " is " + heed::Name(all.dtype()) + all.ShapeString() +
                               ", expected f32[N," + std::to_string(task.numbers) + "], rows contiguous");
    }
    heed::Context ctx(1);
    Vector logits;
    const auto began = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < all.size(0); ++i) {
      const float* const row = all.as<float>() + i * all.stride(0);
      const Vector one = model.Logits(ctx, {row, static_cast<size_t>(task.numbers)});
      logits.insert(logits.end(), one.begin(), one.end());
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    const auto classes = static_cast<int64_t>(model.labels().size());
    if (const std::string& out = command.Text("--logits"); !out.empty()) {
      heed::WriteNpy(out, View(logits, {all.size(0), classes}));
    } else {
      for (auto row = logits.begin(); row != logits.end(); row += classes) {
        const auto best = std::max_element(row, row + classes) - row;
        std::printf("%s\n", model.labels()[static_cast<size_t>(best)].c_str());
      }
    }
    std::fprintf(stderr, "%.1f us per sequence, one thread\n",
                 1e6 * took.count() / static_cast<double>(std::max<int64_t>(all.size(0), 1)));
  });
}

#endif  // HEED_EXAMPLES_TASKS_CLASSIFIER_H_

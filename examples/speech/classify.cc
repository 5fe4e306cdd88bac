// Classifies spoken words from raw samples, with a model that train.py has written.
//
//   example_speech FILE SOUNDS.npy [--logits OUT.npy]      SOUNDS: f32 [N, 6400], .8 s at 8 kHz
//
// The layer is ../tasks/layer.h; each mechanism adds one line below.
#include "../tasks/classifier.h"

namespace {

constexpr int64_t kSamples = 6400, kFrame = 80, kHop = 20, kTokens = kSamples / kHop;

void WindowedAttention(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  heed::attention::Options options;
  options.window = {.left = 32, .right = 32};
  heed::attention::Forward(ctx, {Batch(in.at("q")), Batch(in.at("k")), Batch(in.at("v"))}, options, {Batch(o), {}});
}

void LongConvolution(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  heed::long_convolution::Inputs inputs;
  inputs.u = Channels(in.at("u"));
  inputs.kernel = Constant(in, "kernel", inputs.u.size(1));
  heed::long_convolution::Forward(ctx, inputs, {}, {Channels(o), {}});
}

// Logarithms of a frame's energy in the band of each pair of filters.
Task::Stem Frames(const ModelFile& file, int64_t width) {
  const Linear filters(file, "stem.filters", file.Size("stem.filters.weight", 0), kFrame);
  const int64_t bands = file.Size("stem.project.weight", 1);
  const Linear project(file, "stem.project", width, bands, true);
  if (file.Size("stem.filters.weight", 0) != 2 * bands) file.Fail("expected two filters per band");
  return [=](heed::Context& ctx, std::span<const float> samples) {
    Vector frames(kTokens * kFrame);  // the last frames are padded with silence
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t begin = t * kHop, count = std::min(kFrame, kSamples - begin);
      std::copy_n(samples.begin() + begin, count, frames.begin() + t * kFrame);
    }
    const Vector pairs = filters(ctx, frames);
    Vector energies;
    for (auto row = pairs.begin(); row != pairs.end(); row += 2 * bands) {
      for (auto x = row; x != row + bands; ++x) {
        energies.push_back(std::log(*x * *x + x[bands] * x[bands] + 1e-3f));
      }
    }
    return project(ctx, energies);
  };
}

}  // namespace

int main(int argc, char** argv) {
  const Input kernel{.size = Per::kTaps, .constant = true};
  return Classify({"example_speech",
                   kSamples,
                   kTokens,
                   {{"none", {{{"v", kOfValue}}, Nothing}},
                    {"windowed_attention", {{{"q", kRotated}, {"k", kRotated}, {"v", kOfValue}}, WindowedAttention}},
                    {"selective_scan", {InputsOfSelectiveScan(), SelectiveScan}},
                    {"s4d", {InputsOfS4d(), S4d}},
                    {"long_convolution", {{{"u", kOfValue}, {"kernel", kernel}}, LongConvolution}}},
                   Frames},
                  argc, argv);
}

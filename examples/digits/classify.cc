// Classifies handwritten digits of 8 x 8 pixels, read as 16 patches, with a model that train.py has written.
//
//   example_digits FILE IMAGES.npy [--logits OUT.npy]      IMAGES: f32 [N, 64], from 0 to 1
//
// The layer is ../tasks/layer.h; each mechanism adds one line below.
#include "../tasks/classifier.h"

namespace {

constexpr int64_t kPixels = 64, kPatches = 16;

void Attention(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  heed::attention::Forward(ctx, {Batch(in.at("q")), Batch(in.at("k")), Batch(in.at("v"))}, {}, {Batch(o), {}});
}

void BigBird(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  static const heed::Pattern pattern = heed::patterns::BigBird(/*block=*/1, /*random=*/2);
  heed::attention::Options options;
  options.pattern = pattern;
  heed::attention::Forward(ctx, {Batch(in.at("q")), Batch(in.at("k")), Batch(in.at("v"))}, options, {Batch(o), {}});
}

void Performer(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  heed::performer::Inputs inputs = {Batch(in.at("q")), Batch(in.at("k")), Batch(in.at("v"))};
  inputs.projection = in.at("projection");
  heed::performer::Options options;
  options.kernel = heed::performer::Kernel::kRelu;
  heed::performer::Forward(ctx, inputs, options, {Batch(o), {}});
}

void Linformer(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  heed::linformer::Forward(ctx, {Batch(in.at("q")), Batch(in.at("k")), Batch(in.at("v")), in.at("e"), in.at("f")}, {},
                           {Batch(o)});
}

// A patch is represented by its 2 x 2 values and its position.
Task::Stem Patches(const ModelFile& file, int64_t width) {
  const Linear values(file, "stem.values", width, 4, true);
  const Vector places = file.Read("stem.places", {kPatches, width});
  return [=](heed::Context& ctx, std::span<const float> image) {
    Vector patches;
    for (size_t i = 0; i < kPatches; ++i) {
      const float* const corner = image.data() + 16 * (i / 4) + 2 * (i % 4);
      patches.insert(patches.end(), {corner[0], corner[1], corner[8], corner[9]});
    }
    Vector x = values(ctx, patches);
    Add(x, places);
    return x;
  };
}

}  // namespace

int main(int argc, char** argv) {
  const Inputs qkv = {{"q", kOfKey}, {"k", kOfKey}, {"v", kOfValue}};
  const auto qkv_and = [&](Inputs more) {
    more.insert(qkv.begin(), qkv.end());
    return more;
  };
  const Input features{.size = Per::kFeatures, .constant = true};
  const Input ranks{.size = Per::kRanks, .constant = true};
  return Classify({"example_digits",
                   kPixels,
                   kPatches,
                   {{"none", {{{"v", kOfValue}}, Nothing}},
                    {"attention", {qkv, Attention}},
                    {"bigbird", {qkv, BigBird}},
                    {"performer", {qkv_and({{"projection", features}}), Performer}},
                    {"linformer", {qkv_and({{"e", ranks}, {"f", ranks}}), Linformer}},
                    {"selective_scan", {InputsOfSelectiveScan(), SelectiveScan}},
                    {"s4d", {InputsOfS4d(), S4d}}},
                   Patches},
                  argc, argv);
}

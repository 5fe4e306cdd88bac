// Handwritten digits of 8 x 8 pixels, read pixel by pixel by a model that train.py has written.
//
//   example_digits FILE IMAGES.npy [--logits OUT.npy]      IMAGES: f32 [N, 64], from 0 to 1
//
// The layer is ../tasks/layer.h; what is particular to a mechanism is its line below.
#include "../tasks/classifier.h"

namespace {

constexpr int64_t kPixels = 64;

void Attention(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  heed::attention::Forward(ctx, {Batch(in.at("q")), Batch(in.at("k")), Batch(in.at("v"))}, {},
                           {Batch(o), {}});
}

void BigBird(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  static const heed::Pattern pattern = heed::patterns::BigBird(/*block=*/4, /*random=*/2);
  heed::attention::Options options;
  options.pattern = pattern;
  heed::attention::Forward(ctx, {Batch(in.at("q")), Batch(in.at("k")), Batch(in.at("v"))}, options,
                           {Batch(o), {}});
}

void Performer(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  heed::performer::Inputs inputs = {Batch(in.at("q")), Batch(in.at("k")), Batch(in.at("v"))};
  inputs.projection = in.at("projection");
  heed::performer::Forward(ctx, inputs, {}, {Batch(o), {}});
}

void Linformer(heed::Context& ctx, const Arguments& in, const heed::TensorView& o) {
  heed::linformer::Forward(
      ctx, {Batch(in.at("q")), Batch(in.at("k")), Batch(in.at("v")), in.at("e"), in.at("f")}, {},
      {Batch(o)});
}

// A pixel is its value and its place.
Task::Stem Pixels(const ModelFile& file, int64_t width) {
  const Linear value(file, "stem.value", width, 1, true);
  const Vector places = file.Read("stem.places", {kPixels, width});
  return [=](heed::Context& ctx, std::span<const float> image) {
    Vector x = value(ctx, Vector(image.begin(), image.end()));
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
                   kPixels,
                   {{"none", {{{"v", kOfValue}}, Nothing}},
                    {"attention", {qkv, Attention}},
                    {"bigbird", {qkv, BigBird}},
                    {"performer", {qkv_and({{"projection", features}}), Performer}},
                    {"linformer", {qkv_and({{"e", ranks}, {"f", ranks}}), Linformer}},
                    {"selective_scan", {InputsOfSelectiveScan(), SelectiveScan}},
                    {"s4d", {InputsOfS4d(), S4d}}},
                   Pixels},
                  argc, argv);
}

// One layer of a recorded model, with a window.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "heed/heed.h"

// A tensor of the file, converted to float32.
struct Widened {
  Widened(const heed::SafetensorsFile& file, const std::string& name) {
    const heed::ConstTensorView x = file.tensor(name);
    for (int64_t i = 0; i < x.num_elements(); ++i) {
      memory.push_back(static_cast<float>(heed::LoadAsDouble(x.dtype(), x.data(), i)));
    }
    view = heed::TensorView(memory.data(), heed::DType::kF32, x.sizes());
  }

  std::vector<float> memory;
  heed::TensorView view;
};

int main(int argc, char** argv) {
  try {
    const heed::SafetensorsFile file(argc > 1 ? argv[1] : "data/minilm_alice.safetensors");
    const Widened q(file, "layers.0.q"), k(file, "layers.0.k"), v(file, "layers.0.v");
    std::vector<float> memory(q.memory.size());
    const heed::TensorView o(memory.data(), heed::DType::kF32, q.view.sizes());

    heed::attention::Options options;
    options.window = {.left = 127, .right = 128};
    heed::Context ctx;
    heed::attention::Forward(ctx, {q.view, k.view, v.view}, options, {.o = o, .lse = {}});
    std::printf("o %s, o[0] = %g\n", o.ShapeString().c_str(), memory[0]);
  } catch (const std::exception& error) {  // one line: the error, and what was expected
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

// Any bytes as the state of a model: a FileError of one line, or a state from which the model continues, and which is
// equal after being saved and loaded again.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/io/safetensors.h"
#include "heed/model/model.h"
#include "heed/model/model_case.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/scratch.h"
#include "tests/fuzz/tensors.h"

namespace heed::fuzz {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 20;

// Models whose states have caches, tensors, and several of them. make_seeds.py contains their sizes.
const std::vector<Tiny>& Tinies() {
  static const std::vector<Tiny> tinies = {
      {"llama",
       R"("vocab_size": 5, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
                   "intermediate_size": 3)"},
      {"mamba", R"("vocab_size": 5, "hidden_size": 2, "num_hidden_layers": 1, "state_size": 2)"},
      {"heed_byte_lm", R"("vocab_size": 5, "hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1,
                          "intermediate_size": 3, "mechanism": "mlstm", "key_dim": 1)"}};
  return tinies;
}

struct Opened {
  explicit Opened(const Tiny& tiny) : folder(tiny), model(Model::Open(folder.path())) {
    const Scratch file("_empty");
    model.MakeState().Save(file.path());
    fingerprint = SafetensorsFile(file.path()).metadata().at("model");
  }

  TinyFolder folder;
  Model model;
  std::string fingerprint;
};

void GoOn(const Model& model, ModelState& state) {
  for (const int64_t id : state.pending()) {
    if (id >= 0) return;
  }
  if (state.batch() > 64) return;
  const std::vector<int64_t> ids(static_cast<size_t>(state.batch()), 1);
  const Buffer y(DType::kF32, {state.batch(), 1, model.outputs()});
  Context ctx(1);
  try {
    model.Forward(ctx, View(ids, {state.batch(), 1}), {}, &state, y.view());
  } catch (const InvalidArgument& e) {  // its capacity is reached
    CheckMessage(e.what());
  }
}

void Check(const Model& model, const Scratch& file) {
  ModelState state = model.LoadState(file.path(), kMaxBytes);
  static const Scratch saved("_saved"), again("_again");
  state.Save(saved.path());
  model.LoadState(saved.path(), kMaxBytes).Save(again.path());
  Require(saved.Read() == again.Read(), "a state changes in a file");
  GoOn(model, state);
}

void Run(std::string_view bytes) {
  static const std::vector<std::unique_ptr<Opened>> models = [] {
    std::vector<std::unique_ptr<Opened>> list;
    for (const Tiny& tiny : Tinies()) list.push_back(std::make_unique<Opened>(tiny));
    return list;
  }();
  static const Scratch file("_any");
  for (const auto& of : models) {
    // Seeds have zeros at the place of the model's fingerprint.
    std::string own(bytes);
    const std::string zeros(of->fingerprint.size(), '0');
    if (const size_t at = own.find(zeros); at != std::string::npos) own.replace(at, zeros.size(), of->fingerprint);
    file.Write({reinterpret_cast<const uint8_t*>(own.data()), own.size()});
    try {
      Check(of->model, file);
    } catch (const FileError& e) {
      Require(std::string_view(e.what()).starts_with(file.path() + ": "), "no file named");
      CheckMessage(e.what());
    }
  }
}

}  // namespace
}  // namespace heed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  heed::fuzz::Run({reinterpret_cast<const char*>(data), size});
  return 0;
}

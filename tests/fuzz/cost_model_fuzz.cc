// Any bytes as a cost model: either an error of one line, or numbers within bounds that give finite predictions.
#include <cmath>
#include <cstdint>
#include <string_view>

#include "heed/advise/cost_model_file.h"
#include "heed/core/error.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/tensors.h"

namespace heed::fuzz {
namespace {

void Run(std::string_view text) {
  try {
    const advise::CostModel model = advise::ParseModel("F", text);
    Require(model.threads >= 1 && model.threads <= 4096 && !model.cpu.empty(), "a field is out of bounds");
    for (const auto& [work, coefficients] : model.fits) {
      advise::Load load;
      for (const auto& [unit, seconds] : coefficients) {
        Require(seconds >= 0 && std::isfinite(seconds), "a coefficient is out of bounds");
        load[unit] = 1e9;
      }
      Require(std::isfinite(*model.Predict(work, load)), "a prediction is no number");
    }
    Require(advise::Summarized(model.errors).count == std::ssize(model.errors), "errors are lost");
  } catch (const FileError& e) {
    CheckMessage(e.what());
    Require(std::string_view(e.what()).starts_with("F: "), "no file named");
  }
}

}  // namespace
}  // namespace heed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  heed::fuzz::Run({reinterpret_cast<const char*>(data), size});
  return 0;
}

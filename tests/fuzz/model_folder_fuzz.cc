// Any bytes as config.json, as generation_config.json and as the index of shards: an error of one line, or a plan whose
// sizes are within bounds, end tokens that are numbers and shards inside the folder. No allocation is proportional to a
// number in the file.
#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "heed/core/error.h"
#include "heed/model/folder_internal.h"
#include "heed/model/json_internal.h"
#include "heed/model/plan_internal.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/tensors.h"

namespace heed::fuzz {
namespace {

void ReadConfig(std::string_view text) {
  const model::Fields config("F", model::ParseJson("F", text));
  const model::Configuration read(config);
  const model::Plan& plan = read.plan;
  Require(
      plan.vocabulary >= 1 && plan.vocabulary <= model::kMostSize && plan.width >= 1 && plan.width <= model::kMostSize,
      "a size is out of bounds");
  Require(!plan.blocks.empty() && std::ssize(plan.blocks) <= 2 * model::kMostLayers, "layers are out of bounds");
  // Layers of a folder without tensors: each requests its first tensor, and fails there.
  const layers::Weights none([](const std::string&) { return ConstTensorView(); });
  for (size_t i = 0; i < plan.blocks.size() && i < 4; ++i) {
    try {
      plan.blocks[i].make(none);
      Fail("a layer without weights");
    } catch (const InvalidArgument& e) {
      CheckMessage(e.what());
    }
  }
}

void ReadEnds(std::string_view text) { model::Fields("F", model::ParseJson("F", text)).Integers("eos_token_id"); }

void ReadShards(std::string_view text) {
  for (const auto& [name, shard] : model::ReadIndex("F", text)) {
    Require(!shard.empty() && shard != ".." && shard.find('/') == std::string::npos, "a shard leads out of the folder");
  }
}

void Run(std::string_view text) {
  for (const auto read : {&ReadConfig, &ReadEnds, &ReadShards}) {
    try {
      read(text);
    } catch (const FileError& e) {
      CheckMessage(e.what());
      Require(std::string_view(e.what()).starts_with("F: "), "no file named");
    } catch (const Unsupported& e) {
      CheckMessage(e.what());
    } catch (const InvalidArgument& e) {  // the name of an activation
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

// Tiny random models of every family, and folders with them, for tests.
#ifndef HEED_MODEL_MODEL_CASE_H_
#define HEED_MODEL_MODEL_CASE_H_

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "heed/core/os.h"
#include "heed/harness/buffer.h"
#include "heed/io/safetensors.h"
#include "heed/layers/layer_case.h"
#include "heed/layers/norm.h"
#include "heed/model/plan_internal.h"

namespace heed {

inline constexpr int64_t kVocabulary = 23;

struct Tiny {
  std::string family, config;  // the content of config.json besides model_type and architectures
  bool headed = true;
  std::string more = {};  // second part of the name, if a family has several

  std::string name() const {
    std::string name = family + more + (headed ? "" : "_without_head");
    std::ranges::replace(name, '-', '_');
    return name;
  }
};

inline std::ostream& operator<<(std::ostream& out, const Tiny& tiny) { return out << tiny.name(); }

inline std::vector<Tiny> Tinies() {
  const std::string sizes = R"("vocab_size": 23, "hidden_size": 20, "num_hidden_layers": 3)";
  const std::string decoder =
      sizes + R"(, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 26)";
  const std::string encoder =
      R"(, "num_attention_heads": 2, "intermediate_size": 26, "max_position_embeddings": 17, "type_vocab_size": 1)";
  const std::string bytes = sizes + R"(, "num_attention_heads": 2, "intermediate_size": 26)";
  return {
      {"llama", decoder},
      {"mistral", decoder + R"(, "sliding_window": 4)"},
      {"mistral", decoder + R"(, "sliding_window": 3, "is_causal": false)", true, "_bidirectional"},
      {"qwen2", decoder + R"(, "use_sliding_window": true, "sliding_window": 3, "max_window_layers": 1)"},
      {"qwen3", decoder + R"(, "head_dim": 12, "tie_word_embeddings": true)"},
      {"gpt2", R"("vocab_size": 23, "n_embd": 20, "n_layer": 2, "n_head": 2, "n_positions": 19)"},
      {"gpt2", R"("vocab_size": 23, "n_embd": 20, "n_layer": 2, "n_head": 2, "n_positions": 19, "is_causal": false)",
       true, "_bidirectional"},
      {"bert", sizes + encoder},
      {"bert", sizes + encoder, false},
      {"roberta", sizes + encoder + R"(, "pad_token_id": 2)"},
      {"xlm-roberta", sizes + encoder + R"(, "tie_word_embeddings": false)"},
      {"distilbert",
       R"("vocab_size": 23, "dim": 20, "n_layers": 2, "n_heads": 2, "hidden_dim": 26, "max_position_embeddings": 17)"},
      {"mamba", sizes + R"(, "state_size": 5)"},
      {"mamba2", sizes + R"(, "state_size": 5, "num_heads": 4, "head_dim": 10, "n_groups": 2, "conv_kernel": 1)" +
                     R"(, "time_step_limit": [0.0, Infinity])"},
      {"rwkv", sizes + R"(, "rescale_every": 1)"},
      {"rwkv6", sizes + R"(, "head_size": 5, "head_size_divisor": 4)"},
      {"heed_byte_lm", bytes + R"(, "mechanism": "retention", "key_dim": 8)", true, "_retention"},
      {"heed_byte_lm", bytes + R"(, "mechanism": "attention", "key_dim": 6, "sliding_window": 4)", true, "_attention"},
      {"heed_byte_lm", bytes + R"(, "mechanism": "mlstm", "key_dim": 7)", true, "_mlstm"},
  };
}

// A folder with such a model.
class TinyFolder {
 public:
  explicit TinyFolder(const Tiny& tiny, DType dtype = DType::kF32, uint64_t seed = 5) : path_(Name(tiny)) {
    std::filesystem::create_directories(path_);
    const model::Fields type("config", nlohmann::json{{"model_type", tiny.family}});
    const model::Family& family = model::FamilyOf(type);
    config_ = "{\"model_type\": \"" + tiny.family + "\", \"architectures\": [\"" +
              (tiny.headed ? family.headed : family.plain) + "\"], " + tiny.config + "}";
    WriteConfig(config_);
    // The tensors are those that the plan's layers request under the prefix, and those around the layers.
    const model::Fields fields(path_, model::ParseJson(path_, config_));
    const model::Configuration read(fields);
    const model::Plan& plan = read.plan;
    std::vector<layers::WeightName> names;
    const layers::Weights listing = layers::Weights::Listing(&names).At(plan.prefix);
    const auto table = [&](const std::string& name, int64_t rows) {
      if (!name.empty()) listing.Floats(name + ".weight", {rows, plan.width});
    };
    table(plan.tokens, plan.vocabulary);
    table(plan.before, plan.vocabulary);
    table(plan.positions, plan.most_positions);
    table(plan.types, plan.type_count);
    for (const auto& norm : {plan.embedding_norm, plan.final_norm}) {
      if (norm) layers::Norm(norm->config, listing.At(norm->name + "."));
    }
    for (const model::Block& block : plan.blocks) block.make(listing);
    if (tiny.headed) {
      const layers::Weights whole = layers::Weights::Listing(&names);
      if (plan.transform) {
        whole.Matrix({plan.transform->dense, plan.width, true}, plan.width);
        layers::Norm(plan.transform->norm.config, whole.At(plan.transform->norm.name + "."));
      }
      if (!plan.head_bias.empty()) whole.Floats(plan.head_bias, {plan.vocabulary});
      if (!read.tied) whole.Floats(plan.head + ".weight", {plan.vocabulary, plan.width});
    }
    const layers::RandomWeights random(names, dtype, seed);
    for (const layers::WeightName& name : names)
      tensors_.emplace(name.name, random.weights().Tensor(name.name, name.sizes));
    for (auto& [name, tensor] : tensors_) {
      kept_.push_back(Buffer(tensor.dtype(), tensor.sizes()));
      for (int64_t i = 0; i < tensor.num_elements(); ++i) {
        StoreDouble(tensor.dtype(), kept_.back().view().data(), i, LoadAsDouble(tensor.dtype(), tensor.data(), i));
      }
      tensor = kept_.back().view();
    }
    WriteTensors();
  }
  ~TinyFolder() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }
  const std::string& config() const { return config_; }
  // The configuration with more fields: "\"name\": value".
  std::string ConfigWith(const std::string& fields) const {
    return config_.substr(0, config_.size() - 1) + ", " + fields + "}";
  }
  void WriteConfig(const std::string& text) const { std::ofstream(path_ + "/config.json") << text; }
  void WriteTensors() const {
    std::vector<NamedTensor> list;
    for (const auto& [name, tensor] : tensors_) list.push_back({name, tensor});
    WriteSafetensors(path_ + "/model.safetensors", list);
  }
  std::map<std::string, ConstTensorView>& tensors() { return tensors_; }

 private:
  static std::string Name(const Tiny& tiny) {
    static int count = 0;
    return (std::filesystem::temp_directory_path() /
            ("heed_" + std::to_string(os::ProcessId()) + "_" + tiny.name() + "_" + std::to_string(count++)))
        .string();
  }

  std::string path_, config_;
  std::map<std::string, ConstTensorView> tensors_;
  std::vector<Buffer> kept_;
};

inline std::vector<int64_t> RandomIds(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(random.Integer(0, kVocabulary - 1));
  return ids;
}

inline ConstTensorView View(const std::vector<int64_t>& list, std::vector<int64_t> sizes) {
  return ConstTensorView(list.data(), DType::kI64, sizes);
}
inline ConstTensorView View(const std::vector<int64_t>& list) { return View(list, {std::ssize(list)}); }

}  // namespace heed

#endif  // HEED_MODEL_MODEL_CASE_H_

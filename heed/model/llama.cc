// Llama and related families: rotary attention with grouped key heads, gated MLPs, RMS norms.
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "heed/core/error.h"
#include "heed/layers/grouped_query_attention.h"
#include "heed/layers/mlp.h"
#include "heed/model/plan_internal.h"

namespace heed::model {
namespace {

using layers::GroupedQueryAttention;
using layers::Mlp;

constexpr double kMost = 1e12;
constexpr char kRopeTypes[] = "default, linear, dynamic, yarn, llama3 or longrope";
constexpr char kOriginal[] = "original_max_position_embeddings";

// The object with the scaling: `rope_scaling` takes precedence over `rope_parameters` of Transformers 5, unless it is
// empty.
std::optional<Fields> RopeOf(const Fields& config) {
  config.Ignore({"rope_parameters", "rope_theta"});
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (config.Has(name) && !config.Find(name)->empty()) return config.Object(name);
  }
  return {};
}

// `positions` is the family's default of `max_position_embeddings`.
CacheRotary RotaryOf(const Fields& config, int64_t positions) {
  CacheRotary rotary{RotaryPairs::kHalfSplit};
  const std::optional<Fields> rope = RopeOf(config);
  const Fields& fields = rope ? *rope : config;
  rotary.options.base = (fields.Present("rope_theta") ? fields : config).Number("rope_theta", 1.0001, kMost, 10000);
  for (const Fields* of : {&config, &fields}) {
    if (of->Has("partial_rotary_factor") && of->Number("partial_rotary_factor", 0, 1) != 1)
      throw Unsupported(config.path() + ": 'partial_rotary_factor' is below 1, expected 1");
  }
  const auto most = static_cast<double>(config.Integer("max_position_embeddings", 1, int64_t{1} << 31, positions));
  config.Ignore({kOriginal});
  if (!rope) return rotary;
  fields.Ignore({"attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor",
                 "low_freq_factor", "mscale", "mscale_all_dim", kOriginal, "short_factor", "truncate", "type"});
  const std::string type = fields.Present("rope_type") ? fields.Text("rope_type") : fields.Text("type", "default");
  fields.CheckAllAsked("a rotary embedding");
  RotaryScaling& scaling = rotary.options.scaling;
  try {
    scaling.rope_type = RopeTypeFromName(type);
  } catch (const InvalidArgument&) {
    fields.Fail("rope_type", kRopeTypes);
  }
  if (scaling.rope_type == RopeType::kDefault) return rotary;
  const auto read = [&](const char* name, std::optional<double>& value) {
    if (fields.Has(name)) value = fields.Number(name, -kMost, kMost);
  };
  const auto read_unless_zero = [&](const char* name, std::optional<double>& value) {  // 0 is the default
    read(name, value);
    if (value == 0) value.reset();
  };
  scaling.max_position_embeddings = most;
  read("factor", scaling.factor);
  if (scaling.rope_type != RopeType::kDynamic) {  // Transformers scales it relative to max_position_embeddings
    scaling.original_max_position_embeddings =
        (config.Present(kOriginal) ? config : fields).Number(kOriginal, 1, kMost, most);
  }
  switch (scaling.rope_type) {
    case RopeType::kLinear:
    case RopeType::kDynamic: break;
    case RopeType::kLlama3:
      read("low_freq_factor", scaling.low_freq_factor);
      read("high_freq_factor", scaling.high_freq_factor);
      break;
    case RopeType::kYarn:
      read("attention_factor", scaling.attention_factor);
      read_unless_zero("beta_fast", scaling.beta_fast);
      read_unless_zero("beta_slow", scaling.beta_slow);
      read("mscale", scaling.mscale);
      read("mscale_all_dim", scaling.mscale_all_dim);
      if (fields.Present("truncate")) scaling.truncate = fields.Bool("truncate");
      break;
    case RopeType::kLongrope:
      read("attention_factor", scaling.attention_factor);
      scaling.short_factor = fields.Numbers("short_factor");
      scaling.long_factor = fields.Numbers("long_factor");
      break;
    default: throw Unsupported(config.path() + ": 'rope_type' is \"" + type + "\", expected " + kRopeTypes);
  }
  return rotary;
}

// The fields in which the families differ. `kv_heads`, `head_dim` and `positions` are their defaults; 0 means that the
// first two follow from other fields. Windows are per layer; 0 means none.
struct Traits {
  int64_t kv_heads = 0, head_dim = 0, positions = 0;
  bool qkv_bias = false, output_bias = false, mlp_bias = false, qk_norm = false;
  std::vector<int64_t> windows = {};
};

// `sliding_window`, 4096 if the file lacks it; null is 0, which means none.
int64_t WindowOf(const Fields& config) {
  return config.IntegerOrNull("sliding_window", 1, int64_t{1} << 31, 4096).value_or(0);
}

int64_t LayersOf(const Fields& config) { return config.Integer("num_hidden_layers", 1, kMostLayers); }

// The windows of layers: `window` for layers that `layer_types` names or, without that field, from layer `first` on.
std::vector<int64_t> WindowsOf(const Fields& config, int64_t window, int64_t first) {
  const std::vector<std::string> types = config.Texts("layer_types");
  const int64_t count = LayersOf(config);
  std::vector<int64_t> windows;
  for (int64_t i = 0; !config.Has("layer_types") && i < count; ++i) windows.push_back(i >= first ? window : 0);
  for (const std::string& type : types) {
    if (type == "sliding_attention" && window == 0)
      config.Fail("layer_types", "full_attention alone without use_sliding_window or sliding_window");
    if (type != "full_attention" && type != "sliding_attention")
      config.Fail("layer_types", "full_attention and sliding_attention");
    windows.push_back(type == "sliding_attention" ? window : 0);
  }
  if (std::ssize(windows) != count)
    config.Fail("layer_types", "one for each of the " + std::to_string(count) + " layers");
  return windows;
}

Plan PlanOf(const Fields& config, const Traits& traits) {
  config.Ignore({"attention_dropout", "hidden_dropout", "is_llama_config", "max_sequence_length", "pretraining_tp"});
  Plan plan;
  plan.vocabulary = config.Integer("vocab_size", 1, kMostSize);
  plan.width = config.Integer("hidden_size", 1, kMostSize);
  plan.prefix = "model.";
  plan.tokens = "embed_tokens";
  plan.ignored = {".rotary_emb.inv_freq"};
  const layers::Norm::Config norm = {plan.width, layers::NormKind::kRms, config.Number("rms_norm_eps", 0, 1, 1e-6)};
  plan.final_norm = {"norm", norm};
  GroupedQueryAttention::Config attention;
  attention.width = plan.width;
  attention.heads = config.Integer("num_attention_heads", 1, kMostSize);
  attention.kv_heads = config.IntegerOrNull("num_key_value_heads", 1, kMostSize, traits.kv_heads).value_or(0);
  attention.head_dim = traits.head_dim > 0 ? config.Integer("head_dim", 1, kMostSize, traits.head_dim)
                                           : config.IntegerOrNull("head_dim", 1, kMostSize).value_or(0);
  attention.causal = plan.causal = config.Bool("is_causal", true);
  attention.bias = traits.qkv_bias;
  attention.output_bias = traits.output_bias;
  attention.qk_norm = traits.qk_norm;
  attention.norm_eps = norm.eps;
  attention.rotary = RotaryOf(config, traits.positions);
  Mlp::Config mlp;
  mlp.width = plan.width;
  mlp.inner = config.Integer("intermediate_size", 1, kMostSize);
  mlp.activation = ActivationOf(config, "hidden_act", "silu");
  mlp.bias = traits.mlp_bias;
  const int64_t count = LayersOf(config);
  for (int64_t i = 0; i < count; ++i) {
    const std::string at = "layers." + std::to_string(i) + ".";
    attention.window = traits.windows[static_cast<size_t>(i)];
    plan.blocks.push_back(
        BlockOf<GroupedQueryAttention>(at, "self_attn.", {norm, "input_layernorm", "", false}, attention));
    plan.blocks.push_back(BlockOf<Mlp>(at, "mlp.", {norm, "post_attention_layernorm", "", false}, mlp));
  }
  return plan;
}

// Without `use_sliding_window` no layer has a window.
std::vector<int64_t> QwenWindows(const Fields& config) {
  const int64_t window = WindowOf(config), first = config.Integer("max_window_layers", 0, int64_t{1} << 31, 28);
  return WindowsOf(config, config.Bool("use_sliding_window", false) ? window : 0, first);
}

}  // namespace

Plan PlanLlama(const Fields& config) {
  Traits traits;
  traits.positions = 2048;
  traits.qkv_bias = traits.output_bias = config.Bool("attention_bias", false);
  traits.mlp_bias = config.Bool("mlp_bias", false);
  traits.windows.resize(static_cast<size_t>(LayersOf(config)));
  return PlanOf(config, traits);
}

// A Mistral configuration with `layer_types` is one that Transformers opens as a Ministral.
Plan PlanMistral(const Fields& config) {
  Traits traits;
  traits.kv_heads = 8;
  traits.positions = 4096 * 32;
  traits.windows = WindowsOf(config, WindowOf(config), 0);
  return PlanOf(config, traits);
}

Plan PlanQwen2(const Fields& config) {
  Traits traits;
  traits.kv_heads = 32;
  traits.positions = 32768;
  traits.qkv_bias = true;
  traits.windows = QwenWindows(config);
  return PlanOf(config, traits);
}

Plan PlanQwen3(const Fields& config) {
  Traits traits;
  traits.kv_heads = 32;
  traits.head_dim = 128;
  traits.positions = 32768;
  traits.qkv_bias = traits.output_bias = config.Bool("attention_bias", false);
  traits.qk_norm = true;
  traits.windows = QwenWindows(config);
  return PlanOf(config, traits);
}

}  // namespace heed::model

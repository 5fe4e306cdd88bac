// Llama and its relatives: rotary attention whose key heads serve several query heads, gated MLPs, RMS norms.
#include <set>
#include <string>

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

// `rope_parameters` of Transformers 5, else `rope_theta` and `rope_scaling`.
CacheRotary RotaryOf(const Fields& config) {
  CacheRotary rotary{RotaryPairs::kHalfSplit};
  const bool together = config.Has("rope_parameters");
  const bool scaled = together || config.Has("rope_scaling");
  const Fields fields = together ? config.Object("rope_parameters") : scaled ? config.Object("rope_scaling") : config;
  rotary.options.base = (together ? fields : config).Number("rope_theta", 1.0001, kMost, 10000);
  if (config.Number("partial_rotary_factor", 0, 1, 1) != 1 || fields.Number("partial_rotary_factor", 0, 1, 1) != 1) {
    throw Unsupported(config.path() + ": 'partial_rotary_factor' is below 1, expected 1");
  }
  if (!scaled) return rotary;
  const std::string type = fields.Text("rope_type", fields.Text("type", "default"));
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
  scaling.max_position_embeddings =
      static_cast<double>(config.Integer("max_position_embeddings", 1, int64_t{1} << 31, 2048));
  read("factor", scaling.factor);
  if (scaling.rope_type != RopeType::kDynamic) {  // which Transformers stretches from max_position_embeddings on
    scaling.original_max_position_embeddings =
        (config.Has(kOriginal) ? config : fields).Number(kOriginal, 1, kMost, scaling.max_position_embeddings);
  }
  switch (scaling.rope_type) {
    case RopeType::kLinear:
    case RopeType::kDynamic:
      break;
    case RopeType::kLlama3:
      read("low_freq_factor", scaling.low_freq_factor);
      read("high_freq_factor", scaling.high_freq_factor);
      break;
    case RopeType::kYarn:
      read("attention_factor", scaling.attention_factor);
      read("beta_fast", scaling.beta_fast);
      read("beta_slow", scaling.beta_slow);
      read("mscale", scaling.mscale);
      read("mscale_all_dim", scaling.mscale_all_dim);
      if (fields.Has("truncate")) scaling.truncate = fields.Bool("truncate");
      break;
    case RopeType::kLongrope:
      read("attention_factor", scaling.attention_factor);
      scaling.short_factor = fields.Numbers("short_factor");
      scaling.long_factor = fields.Numbers("long_factor");
      break;
    default:
      throw Unsupported(config.path() + ": 'rope_type' is \"" + type + "\", expected " + kRopeTypes);
  }
  return rotary;
}

// What the relatives differ in. Windows are by layer; 0 is none.
struct Traits {
  bool qkv_bias = false, output_bias = false, mlp_bias = false, qk_norm = false;
  std::function<int64_t(int64_t layer)> window = [](int64_t) { return 0; };
};

Plan PlanOf(const Fields& config, const Traits& traits) {
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
  attention.kv_heads = config.Integer("num_key_value_heads", 1, kMostSize, attention.heads);
  attention.head_dim = config.Integer("head_dim", 1, kMostSize, 0);
  attention.bias = traits.qkv_bias;
  attention.output_bias = traits.output_bias;
  attention.qk_norm = traits.qk_norm;
  attention.norm_eps = norm.eps;
  attention.rotary = RotaryOf(config);
  Mlp::Config mlp;
  mlp.width = plan.width;
  mlp.inner = config.Integer("intermediate_size", 1, kMostSize);
  mlp.activation = layers::ActivationFromName(config.Text("hidden_act", "silu"));
  mlp.bias = traits.mlp_bias;
  const int64_t count = config.Integer("num_hidden_layers", 1, kMostLayers);
  for (int64_t i = 0; i < count; ++i) {
    const std::string at = "layers." + std::to_string(i) + ".";
    attention.window = traits.window(i);
    plan.blocks.push_back(
        BlockOf<GroupedQueryAttention>(at, "self_attn.", {norm, "input_layernorm", "", false}, attention));
    plan.blocks.push_back(BlockOf<Mlp>(at, "mlp.", {norm, "post_attention_layernorm", "", false}, mlp));
  }
  return plan;
}

// `layer_types` says which layers have the window; before it, those from `max_window_layers` on.
std::function<int64_t(int64_t)> QwenWindow(const Fields& config) {
  if (!config.Bool("use_sliding_window", false)) return [](int64_t) { return 0; };
  const int64_t window = config.Integer("sliding_window", 1, int64_t{1} << 31, 4096),
                count = config.Integer("num_hidden_layers", 1, kMostLayers);
  const int64_t first = config.Integer("max_window_layers", 0, int64_t{1} << 31, 28);
  const std::vector<std::string> types = config.Texts("layer_types");
  if (!types.empty() && std::ssize(types) != count)
    config.Fail("layer_types", "one for each of the " + std::to_string(count) + " layers");
  std::set<int64_t> windowed;
  for (int64_t i = 0; i < count; ++i) {
    if (types.empty()) {
      if (i >= first) windowed.insert(i);
      continue;
    }
    const std::string& type = types[static_cast<size_t>(i)];
    if (type != "full_attention" && type != "sliding_attention")
      config.Fail("layer_types", "full_attention and sliding_attention");
    if (type == "sliding_attention") windowed.insert(i);
  }
  return [=](int64_t layer) { return windowed.contains(layer) ? window : 0; };
}

}  // namespace

Plan PlanLlama(const Fields& config) {
  Traits traits;
  traits.qkv_bias = traits.output_bias = config.Bool("attention_bias", false);
  traits.mlp_bias = config.Bool("mlp_bias", false);
  return PlanOf(config, traits);
}

Plan PlanMistral(const Fields& config) {
  const int64_t window = config.Integer("sliding_window", 1, int64_t{1} << 31, 0);
  Traits traits;
  traits.window = [=](int64_t) { return window; };
  return PlanOf(config, traits);
}

Plan PlanQwen2(const Fields& config) {
  Traits traits;
  traits.qkv_bias = true;
  traits.window = QwenWindow(config);
  return PlanOf(config, traits);
}

Plan PlanQwen3(const Fields& config) {
  Traits traits;
  traits.qkv_bias = traits.output_bias = config.Bool("attention_bias", false);
  traits.qk_norm = true;
  traits.window = QwenWindow(config);
  return PlanOf(config, traits);
}

}  // namespace heed::model

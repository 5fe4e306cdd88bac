// Mamba and Mamba-2: one mixer per block, after an RMS norm.
#include <cmath>
#include <string>

#include <nlohmann/json.hpp>

#include "heed/layers/mamba.h"
#include "heed/layers/mamba2.h"
#include "heed/model/plan_internal.h"

namespace heed::model {
namespace {

// The plan of both families. `layer` has no width, `bias` or other common sizes yet.
template <class L>
Plan PlanOf(const Fields& config, typename L::Config layer) {
  // Some of these fields come from the authors' code; Transformers keeps them and does not read them.
  config.Ignore({"d_inner", "d_model", "fused_add_norm", "n_layer", "norm_before_gate", "pad_vocab_size_multiple",
                 "rescale_prenorm_residual", "residual_in_fp32", "rms_norm", "ssm_cfg", "time_step_floor",
                 "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_rank", "time_step_scale"});
  Plan plan;
  plan.vocabulary = config.Integer("vocab_size", 1, kMostSize);
  plan.width = config.Integer("hidden_size", 1, kMostSize);
  plan.prefix = "backbone.";
  plan.tokens = "embeddings";
  const layers::Norm::Config norm = {plan.width, layers::NormKind::kRms,
                                     config.Number("layer_norm_epsilon", 0, 1, 1e-5)};
  plan.final_norm = {"norm_f", norm};
  if (const std::string act = config.Text("hidden_act", "silu"); act != "silu" && act != "swish")
    config.Fail("hidden_act", "silu");
  layer.width = plan.width;
  layer.state = config.Integer("state_size", 1, kMostSize, layer.state);
  layer.conv = config.Integer("conv_kernel", 1, kMostSize, 4);
  layer.bias = config.Bool("use_bias", false);
  layer.conv_bias = config.Bool("use_conv_bias", true);
  const int64_t count = config.Integer("num_hidden_layers", 1, kMostLayers);
  for (int64_t i = 0; i < count; ++i) {
    plan.blocks.push_back(BlockOf<L>("layers." + std::to_string(i) + ".", "mixer.", {norm, "norm", "", false}, layer));
  }
  return plan;
}

// The field `expand`, which need not be an integer, times the width.
int64_t Expanded(const Fields& config) {
  const double inner =
      config.Number("expand", 0, 1024, 2) * static_cast<double>(config.Integer("hidden_size", 1, kMostSize));
  if (inner < 1 || inner > static_cast<double>(kMostSize))
    config.Fail("expand", "channels, 1 to " + std::to_string(kMostSize));
  return static_cast<int64_t>(inner);
}

}  // namespace

Plan PlanMamba(const Fields& config) {
  config.Ignore({"use_associative_scan", "use_mambapy"});
  layers::Mamba::Config layer;
  layer.inner = config.Integer("intermediate_size", 1, kMostSize, Expanded(config));
  const nlohmann::json* rank = config.Find("time_step_rank");
  if (config.Present("time_step_rank") &&
      !(rank != nullptr && rank->is_string() && rank->get_ref<const std::string&>() == "auto"))
    layer.step_rank = config.Integer("time_step_rank", 1, kMostSize);
  Plan plan = PlanOf<layers::Mamba>(config, layer);
  plan.tied = true;
  return plan;
}

Plan PlanMamba2(const Fields& config) {
  config.Ignore({"chunk_size", "intermediate_size"});
  layers::Mamba2::Config layer;
  layer.heads = config.Integer("num_heads", 1, kMostSize, 128);
  layer.head_dim = config.Integer("head_dim", 1, kMostSize, 64);
  layer.groups = config.Integer("n_groups", 1, kMostSize, 8);
  if (layer.heads * layer.head_dim != Expanded(config)) {
    config.Fail("num_heads", "times head_dim, " + std::to_string(layer.head_dim) + ", the " +
                                 std::to_string(Expanded(config)) + " channels of expand");
  }
  layer.norm_eps = config.Number("layer_norm_epsilon", 0, 1, 1e-5);
  if (config.Present("time_step_limit")) {
    const std::vector<double> limit = config.Numbers("time_step_limit");
    if (limit.size() != 2 || !(limit[0] >= 0 && limit[0] <= limit[1]))
      config.Fail("time_step_limit", "two numbers, the first at least 0 and no larger");
    layer.step_min = limit[0];
    layer.step_max = limit[1];
  }
  return PlanOf<layers::Mamba2>(config, layer);
}

}  // namespace heed::model

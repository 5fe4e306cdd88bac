// GPT-2: learned positions, layer norms before attention and MLP.
#include <cmath>
#include <string>
#include <utility>

#include "heed/layers/mlp.h"
#include "heed/layers/multi_head_attention.h"
#include "heed/model/plan_internal.h"

namespace heed::model {

using layers::Mlp;
using layers::MultiHeadAttention;

Plan PlanGpt2(const Fields& config) {
  for (const auto& [name, other] :
       {std::pair("n_embd", "hidden_size"), std::pair("n_layer", "num_hidden_layers"),
        std::pair("n_head", "num_attention_heads"), std::pair("n_positions", "max_position_embeddings")}) {
    config.Alias(name, other);
  }
  config.Ignore({"attn_pdrop", "embd_pdrop", "n_ctx", "predict_special_tokens", "reorder_and_upcast_attn",
                 "resid_pdrop", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
                 "summary_use_proj"});  // reorder_and_upcast_attn computes in f32, as heed does
  Plan plan;
  plan.vocabulary = config.Integer("vocab_size", 1, kMostSize);
  plan.width = config.Integer("n_embd", 1, kMostSize);
  plan.prefix = "transformer.";
  plan.tokens = "wte";
  plan.positions = "wpe";
  plan.most_positions = config.Integer("n_positions", 1, kMostSize, 1024);
  plan.tied = true;
  plan.ignored = {".attn.bias", ".attn.masked_bias"};
  const layers::Norm::Config norm = {plan.width, layers::NormKind::kLayer,
                                     config.Number("layer_norm_epsilon", 0, 1, 1e-5)};
  plan.final_norm = {"ln_f", norm};
  MultiHeadAttention::Config attention;
  attention.width = plan.width;
  attention.heads = config.Integer("n_head", 1, kMostSize);
  attention.causal = plan.causal = config.Bool("is_causal", true);
  attention.names = MultiHeadAttention::Gpt2();
  const double base = config.Bool("scale_attn_weights", true)
                          ? 1 / std::sqrt(static_cast<double>(plan.width) / static_cast<double>(attention.heads))
                          : 1;
  const bool by_layer = config.Bool("scale_attn_by_inverse_layer_idx", false);
  const Mlp::Config mlp = {plan.width, config.IntegerOrNull("n_inner", 1, kMostSize).value_or(4 * plan.width),
                           ActivationOf(config, "activation_function", "gelu_new"), true, Mlp::Gpt2()};
  const int64_t count = config.Integer("n_layer", 1, kMostLayers);
  for (int64_t i = 0; i < count; ++i) {
    const std::string at = "h." + std::to_string(i) + ".";
    attention.scale = by_layer ? base / static_cast<double>(i + 1) : base;
    plan.blocks.push_back(BlockOf<MultiHeadAttention>(at, "attn.", {norm, "ln_1", "", false}, attention));
    plan.blocks.push_back(BlockOf<Mlp>(at, "mlp.", {norm, "ln_2", "", false}, mlp));
  }
  return plan;
}

}  // namespace heed::model

// BERT, and MiniLM with it: an encoder with learned positions and layer norms behind attention and MLP.
#include <string>

#include "heed/core/error.h"
#include "heed/layers/mlp.h"
#include "heed/layers/multi_head_attention.h"
#include "heed/model/plan_internal.h"

namespace heed::model {

using layers::Mlp;
using layers::MultiHeadAttention;

Plan PlanBert(const Fields& config) {
  if (config.Bool("is_decoder", false)) config.Fail("is_decoder", "false");
  if (config.Text("position_embedding_type", "absolute") != "absolute")
    config.Fail("position_embedding_type", "absolute");
  Plan plan;
  plan.vocabulary = config.Integer("vocab_size", 1, kMostSize);
  plan.width = config.Integer("hidden_size", 1, kMostSize);
  plan.prefix = "bert.";
  plan.tokens = "embeddings.word_embeddings";
  plan.positions = "embeddings.position_embeddings";
  plan.most_positions = config.Integer("max_position_embeddings", 1, kMostSize, 512);
  plan.types = "embeddings.token_type_embeddings";
  plan.type_count = config.Integer("type_vocab_size", 1, kMostSize, 2);
  plan.causal = false;
  plan.head.clear();
  plan.ignored = {"pooler.dense.weight", "pooler.dense.bias",
                  "embeddings.position_ids"};  // hidden states do not pass the pooler
  const layers::Norm::Config norm = {plan.width, layers::NormKind::kLayer,
                                     config.Number("layer_norm_eps", 0, 1, 1e-12)};
  plan.embedding_norm = {"embeddings.LayerNorm", norm};
  MultiHeadAttention::Config attention;
  attention.width = plan.width;
  attention.heads = config.Integer("num_attention_heads", 1, kMostSize);
  attention.names = MultiHeadAttention::Bert();
  const Mlp::Config mlp = {plan.width, config.Integer("intermediate_size", 1, kMostSize),
                           layers::ActivationFromName(config.Text("hidden_act", "gelu")), true, Mlp::Bert()};
  const int64_t count = config.Integer("num_hidden_layers", 1, kMostLayers);
  for (int64_t i = 0; i < count; ++i) {
    const std::string at = "encoder.layer." + std::to_string(i) + ".";
    plan.blocks.push_back(
        BlockOf<MultiHeadAttention>(at, "attention.", {norm, "attention.output.LayerNorm", "", true}, attention));
    plan.blocks.push_back(BlockOf<Mlp>(at, "", {norm, "output.LayerNorm", "", true}, mlp));
  }
  return plan;
}

}  // namespace heed::model

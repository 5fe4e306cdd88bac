// BERT (and MiniLM), RoBERTa and DistilBERT: encoders with learned positions and layer norms after attention and MLP.
#include <string>
#include <utility>

#include "heed/core/error.h"
#include "heed/layers/mlp.h"
#include "heed/layers/multi_head_attention.h"
#include "heed/model/plan_internal.h"

namespace heed::model {

using layers::Activation;
using layers::Mlp;
using layers::MultiHeadAttention;

namespace {

// The common plan of BERT and RoBERTa: all but the head and the first position.
Plan EncoderOf(const Fields& config) {
  if (config.Bool("is_causal", false)) config.Fail("is_causal", "false");
  if (config.Text("position_embedding_type", "absolute") != "absolute")
    config.Fail("position_embedding_type", "absolute");
  config.Ignore({"attention_probs_dropout_prob", "directionality", "hidden_dropout_prob", "pooler_fc_size",
                 "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"});
  Plan plan;
  plan.vocabulary = config.Integer("vocab_size", 1, kMostSize);
  plan.width = config.Integer("hidden_size", 1, kMostSize);
  plan.tokens = "embeddings.word_embeddings";
  plan.positions = "embeddings.position_embeddings";
  plan.most_positions = config.Integer("max_position_embeddings", 1, kMostSize, 512);
  plan.types = "embeddings.token_type_embeddings";
  plan.type_count = config.Integer("type_vocab_size", 1, kMostSize, 2);
  plan.causal = false;
  plan.tied = true;
  plan.ignored = {"pooler.dense.weight", "pooler.dense.bias",
                  "embeddings.position_ids"};  // hidden states do not pass the pooler
  plan.renamed = {{"LayerNorm.weight", "LayerNorm.gamma"}, {"LayerNorm.bias", "LayerNorm.beta"}};
  const layers::Norm::Config norm = {plan.width, layers::NormKind::kLayer,
                                     config.Number("layer_norm_eps", 0, 1, 1e-12)};
  plan.embedding_norm = {"embeddings.LayerNorm", norm};
  MultiHeadAttention::Config attention;
  attention.width = plan.width;
  attention.heads = config.Integer("num_attention_heads", 1, kMostSize);
  attention.names = MultiHeadAttention::Bert();
  const Mlp::Config mlp = {plan.width, config.Integer("intermediate_size", 1, kMostSize),
                           ActivationOf(config, "hidden_act", "gelu"), true, Mlp::Bert()};
  const int64_t count = config.Integer("num_hidden_layers", 1, kMostLayers);
  for (int64_t i = 0; i < count; ++i) {
    const std::string at = "encoder.layer." + std::to_string(i) + ".";
    plan.blocks.push_back(
        BlockOf<MultiHeadAttention>(at, "attention.", {norm, "attention.output.LayerNorm", "", true}, attention));
    plan.blocks.push_back(BlockOf<Mlp>(at, "", {norm, "output.LayerNorm", "", true}, mlp));
  }
  return plan;
}

}  // namespace

Plan PlanBert(const Fields& config) {
  Plan plan = EncoderOf(config);
  plan.prefix = "bert.";
  plan.head = "cls.predictions.decoder";
  plan.head_bias = "cls.predictions.bias";
  plan.transform = {"cls.predictions.transform.dense",
                    ActivationOf(config, "hidden_act", "gelu"),
                    {"cls.predictions.transform.LayerNorm", plan.embedding_norm->config}};
  plan.ignored.insert(plan.ignored.end(), {"cls.seq_relationship.weight", "cls.seq_relationship.bias"});
  return plan;
}

Plan PlanRoberta(const Fields& config) {
  Plan plan = EncoderOf(config);
  plan.prefix = "roberta.";
  plan.padding = config.Integer("pad_token_id", 0, plan.vocabulary - 1, 1);
  if (plan.most_positions < *plan.padding + 2)
    config.Fail("max_position_embeddings", "more than pad_token_id + 1, " + std::to_string(*plan.padding + 1));
  plan.head_bias = "lm_head.bias";
  plan.head = "lm_head.decoder";
  plan.transform = {"lm_head.dense", Activation::kGelu, {"lm_head.layer_norm", plan.embedding_norm->config}};
  return plan;
}

Plan PlanDistilbert(const Fields& config) {
  for (const auto& [name, other] : {std::pair("dim", "hidden_size"), std::pair("n_heads", "num_attention_heads"),
                                    std::pair("n_layers", "num_hidden_layers")}) {
    config.Alias(name, other);
  }
  if (config.Bool("is_causal", false)) config.Fail("is_causal", "false");
  config.Ignore({"attention_dropout", "dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds",
                 "tie_weights_"});  // sinusoids are in the table that files have
  Plan plan;
  plan.vocabulary = config.Integer("vocab_size", 1, kMostSize, 30522);
  plan.width = config.Integer("dim", 1, kMostSize);
  plan.prefix = "distilbert.";
  plan.tokens = "embeddings.word_embeddings";
  plan.positions = "embeddings.position_embeddings";
  plan.most_positions = config.Integer("max_position_embeddings", 1, kMostSize, 512);
  plan.causal = false;
  plan.tied = true;
  plan.ignored = {"embeddings.position_ids"};
  const layers::Norm::Config norm = {plan.width, layers::NormKind::kLayer, 1e-12};
  plan.embedding_norm = {"embeddings.LayerNorm", norm};
  const Activation activation = ActivationOf(config, "activation", "gelu");
  plan.head = "vocab_projector";
  plan.head_bias = "vocab_projector.bias";
  plan.transform = {"vocab_transform", activation, {"vocab_layer_norm", norm}};
  MultiHeadAttention::Config attention;
  attention.width = plan.width;
  attention.heads = config.Integer("n_heads", 1, kMostSize);
  attention.names = {"q_lin", "k_lin", "v_lin", "out_lin", "", false};
  const Mlp::Config mlp = {
      plan.width, config.Integer("hidden_dim", 1, kMostSize), activation, true, {"", "lin1", "lin2"}};
  const int64_t count = config.Integer("n_layers", 1, kMostLayers);
  for (int64_t i = 0; i < count; ++i) {
    const std::string at = "transformer.layer." + std::to_string(i) + ".";
    plan.blocks.push_back(BlockOf<MultiHeadAttention>(at, "attention.", {norm, "sa_layer_norm", "", true}, attention));
    plan.blocks.push_back(BlockOf<Mlp>(at, "ffn.", {norm, "output_layer_norm", "", true}, mlp));
  }
  return plan;
}

}  // namespace heed::model

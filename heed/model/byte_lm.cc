// The byte-level model of examples/byte_lm: embeddings of a byte and the one before it, layers of a mechanism by its
// name, each behind an RMS norm, and MLPs with squared ReLU.
#include <string>

#include "heed/layers/gated_mixing.h"
#include "heed/layers/mlp.h"
#include "heed/model/plan_internal.h"

namespace heed::model {

using layers::GatedMixing;
using layers::Mlp;

Plan PlanByteLm(const Fields& config) {
  Plan plan;
  plan.vocabulary = config.Integer("vocab_size", 1, kMostSize);
  plan.width = config.Integer("hidden_size", 1, kMostSize);
  plan.tokens = "byte";
  plan.before = "byte_before";
  plan.head = "head";
  const layers::Norm::Config norm = {plan.width, layers::NormKind::kRms, config.Number("rms_norm_eps", 0, 1, 1e-6)};
  plan.final_norm = {"norm", norm};
  GatedMixing::Config mixing;
  mixing.mechanism = config.Text("mechanism");
  mixing.width = plan.width;
  mixing.heads = config.Integer("num_attention_heads", 1, kMostSize);
  mixing.key_dim = config.Integer("key_dim", 1, kMostSize);
  mixing.window = config.IntegerOrNull("sliding_window", 1, int64_t{1} << 31).value_or(0);
  mixing.norm_eps = norm.eps;
  const Mlp::Config mlp = {plan.width,
                           config.Integer("intermediate_size", 1, kMostSize),
                           layers::Activation::kSquaredRelu,
                           false,
                           {"", "up", "down"}};
  const int64_t count = config.Integer("num_hidden_layers", 1, kMostLayers);
  for (int64_t i = 0; i < count; ++i) {
    const std::string at = "layers." + std::to_string(i) + ".";
    plan.blocks.push_back(BlockOf<GatedMixing>(at, "", {norm, "norm1", "", false}, mixing));
    plan.blocks.push_back(BlockOf<Mlp>(at, "", {norm, "norm2", "", false}, mlp));
  }
  return plan;
}

}  // namespace heed::model

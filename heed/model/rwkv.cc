// RWKV-4. From block to block what passes the layers is halved every `rescale_every` of them, and so are the weights
// that add to it: Transformers does so where it infers, and norms make the same of both, but for their eps.
#include <cmath>
#include <map>
#include <string>

#include "heed/layers/rwkv4_layer.h"
#include "heed/model/plan_internal.h"

namespace heed::model {

using layers::Rwkv4ChannelMixing;
using layers::Rwkv4TimeMixing;

Plan PlanRwkv(const Fields& config) {
  Plan plan;
  plan.vocabulary = config.Integer("vocab_size", 1, kMostSize);
  plan.width = config.Integer("hidden_size", 1, kMostSize);
  plan.prefix = "rwkv.";
  plan.tokens = "embeddings";
  plan.head = "head";
  const layers::Norm::Config norm = {plan.width, layers::NormKind::kLayer,
                                     config.Number("layer_norm_epsilon", 0, 1, 1e-5)};
  plan.embedding_norm = {"blocks.0.pre_ln", norm};
  plan.final_norm = {"ln_out", norm};
  const Rwkv4TimeMixing::Config time = {plan.width, config.Integer("attention_hidden_size", 1, kMostSize, plan.width)};
  const Rwkv4ChannelMixing::Config channel = {plan.width,
                                              config.Integer("intermediate_size", 1, kMostSize, 4 * plan.width)};
  const int64_t count = config.Integer("num_hidden_layers", 1, kMostLayers),
                every = config.Integer("rescale_every", 0, kMostLayers, 6);
  std::map<std::string, double> factors;
  for (int64_t i = 0; i < count; ++i) {
    const std::string at = "blocks." + std::to_string(i) + ".";
    plan.blocks.push_back(BlockOf<Rwkv4TimeMixing>(at, "attention.", {norm, "ln1", "", false}, time));
    plan.blocks.push_back(BlockOf<Rwkv4ChannelMixing>(at, "feed_forward.", {norm, "ln2", "", false}, channel));
    if (every == 0) continue;
    const int64_t halvings = i / every;
    if (halvings > 0) {
      factors[at + "attention.output.weight"] = factors[at + "feed_forward.value.weight"] =
          std::ldexp(1, -static_cast<int>(halvings));
    }
    if ((i + 1) % every == 0) plan.blocks.back().factor = .5;
  }
  plan.factor = [factors = std::move(factors)](const std::string& name) {
    const auto found = factors.find(name);
    return found == factors.end() ? 1. : found->second;
  };
  return plan;
}

}  // namespace heed::model

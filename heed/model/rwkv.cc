// RWKV-4 and RWKV-6. Like Transformers at inference, RWKV-4 here halves its hidden states after every `rescale_every`
// blocks, and the weights that add to them; norms make the results equal to those without, apart from their eps.
// Transformers halves those of RWKV-6 only if weights have 16 bits, to prevent overflow: here they are f32.
#include <cmath>
#include <map>
#include <string>

#include "heed/layers/rwkv4_layer.h"
#include "heed/layers/rwkv6_layer.h"
#include "heed/model/plan_internal.h"

namespace heed::model {

using layers::Rwkv4ChannelMixing;
using layers::Rwkv4TimeMixing;
using layers::Rwkv6ChannelMixing;
using layers::Rwkv6TimeMixing;

namespace {

// The parts around the blocks. `norm` is that of each block's layers.
Plan Around(const Fields& config, layers::Norm::Config* norm) {
  config.Ignore({"context_length", "max_position_embeddings"});
  Plan plan;
  plan.vocabulary = config.Integer("vocab_size", 1, kMostSize);
  plan.width = config.Integer("hidden_size", 1, kMostSize);
  plan.prefix = "rwkv.";
  plan.tokens = "embeddings";
  plan.head = "head";
  *norm = {plan.width, layers::NormKind::kLayer, config.Number("layer_norm_epsilon", 0, 1, 1e-5)};
  plan.embedding_norm = {"blocks.0.pre_ln", *norm};
  plan.final_norm = {"ln_out", {plan.width, layers::NormKind::kLayer, 1e-5}};  // the other norms may have another eps
  return plan;
}

// A size that may be absent or null.
int64_t SizeOf(const Fields& config, const char* name, int64_t otherwise) {
  return config.IntegerOrNull(name, 1, kMostSize).value_or(otherwise);
}

}  // namespace

Plan PlanRwkv(const Fields& config) {
  layers::Norm::Config norm;
  Plan plan = Around(config, &norm);
  const Rwkv4TimeMixing::Config time = {plan.width, SizeOf(config, "attention_hidden_size", plan.width)};
  const Rwkv4ChannelMixing::Config channel = {plan.width, SizeOf(config, "intermediate_size", 4 * plan.width)};
  const int64_t count = config.Integer("num_hidden_layers", 1, kMostLayers),
                every = config.Integer("rescale_every", INT32_MIN, INT32_MAX, 6);
  std::map<std::string, double> factors;
  for (int64_t i = 0; i < count; ++i) {
    const std::string at = "blocks." + std::to_string(i) + ".";
    plan.blocks.push_back(BlockOf<Rwkv4TimeMixing>(at, "attention.", {norm, "ln1", "", false}, time));
    plan.blocks.push_back(BlockOf<Rwkv4ChannelMixing>(at, "feed_forward.", {norm, "ln2", "", false}, channel));
    if (every <= 0) continue;
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

Plan PlanRwkv6(const Fields& config) {
  layers::Norm::Config norm;
  Plan plan = Around(config, &norm);
  config.Ignore({"model_version", "num_attention_heads", "rescale_every"});
  const bool large = plan.width == 4096;  // the ranks of the published models depend on this alone
  const double divisor = config.Number("head_size_divisor", 0, 1e6, 8);
  Rwkv6TimeMixing::Config time;
  time.width = plan.width;
  time.inner = SizeOf(config, "attention_hidden_size", plan.width);
  time.head_dim = config.Integer("head_size", 1, kMostSize, 64);
  time.mix_rank = large ? 64 : 32;
  time.decay_rank = large ? 128 : 64;
  time.norm_eps = 1e-5 * divisor * divisor;
  const Rwkv6ChannelMixing::Config channel = {plan.width, SizeOf(config, "intermediate_size", 0)};
  const int64_t count = config.Integer("num_hidden_layers", 1, kMostLayers);
  for (int64_t i = 0; i < count; ++i) {
    const std::string at = "blocks." + std::to_string(i) + ".";
    plan.blocks.push_back(BlockOf<Rwkv6TimeMixing>(at, "attention.", {norm, "ln1", "", false}, time));
    plan.blocks.push_back(BlockOf<Rwkv6ChannelMixing>(at, "feed_forward.", {norm, "ln2", "", false}, channel));
  }
  return plan;
}

}  // namespace heed::model

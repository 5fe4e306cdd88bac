// The layers that tests run.
#include "heed/layers/gated_delta_net.h"
#include "heed/layers/gated_mixing.h"
#include "heed/layers/grouped_query_attention.h"
#include "heed/layers/h3_layer.h"
#include "heed/layers/latent_attention.h"
#include "heed/layers/layer_case.h"
#include "heed/layers/linear_attention_layer.h"
#include "heed/layers/longformer_attention.h"
#include "heed/layers/mamba.h"
#include "heed/layers/mamba2.h"
#include "heed/layers/mlp.h"
#include "heed/layers/multi_head_attention.h"
#include "heed/layers/residual.h"
#include "heed/layers/rwkv4_layer.h"
#include "heed/layers/rwkv6_layer.h"

namespace heed::layers {
namespace {

// A layer with its norm and residual connection.
template <class L>
LayerCase ResidualOf(std::string name, const Residual::Config& config, const typename L::Config& layer) {
  LayerCase of;
  of.name = std::move(name);
  Residual::Of<L>(config, layer, Weights::Listing(&of.weights));
  of.make = [=](const Weights& weights) -> std::unique_ptr<Layer> { return Residual::Of<L>(config, layer, weights); };
  of.reference = [=](const Weights& weights, const ConstTensorView& x, const Call& call, const TensorView& y) {
    Residual::Reference(
        config, weights, x,
        [&](const Weights& own, const ConstTensorView& in, const TensorView& out) {
          L::Reference(layer, own, in, call, out);
        },
        y);
  };
  return of;
}

void AddAttention(std::vector<LayerCase>& cases) {
  MultiHeadAttention::Config bert;
  bert.width = 36;
  bert.heads = 3;
  bert.names = MultiHeadAttention::Bert();
  Residual::Config post;
  post.norm = {36, NormKind::kLayer, 1e-12};
  post.norm_name = "attention.output.LayerNorm";
  post.layer_name = "attention";
  post.post = true;
  cases.push_back(ResidualOf<MultiHeadAttention>("bert_attention", post, bert));
  cases.back().has_state = false;

  MultiHeadAttention::Config bigbird = bert;
  bigbird.pattern = patterns::BigBird(2, 1, 7);
  cases.push_back(ResidualOf<MultiHeadAttention>("bigbird_attention", post, bigbird));
  cases.back().has_state = cases.back().pads = false;  // every token sees the last block, which padding would change
  cases.push_back(ResidualOf<LongformerAttention>("longformer_attention", post, {36, 3, 4}));
  cases.back().has_state = false;
  cases.push_back(cases.back());
  cases.back().name = "longformer_attention_with_tokens";
  cases.back().global_tokens = true;

  MultiHeadAttention::Config gpt2;
  gpt2.width = 40;
  gpt2.heads = 5;
  gpt2.causal = true;
  gpt2.names = MultiHeadAttention::Gpt2();
  const Residual::Config pre = {{40, NormKind::kLayer, 1e-5}, "ln_1", "attn", false};
  cases.push_back(ResidualOf<MultiHeadAttention>("gpt2_attention", pre, gpt2));

  MultiHeadAttention::Config bart;
  bart.width = 24;
  bart.heads = 2;
  bart.head_dim = 20;
  bart.causal = true;
  bart.key_bias = false;
  cases.push_back(CaseOf<MultiHeadAttention>("bart_attention", bart));
  bart.causal = false;
  bart.memory_width = 28;
  cases.push_back(CaseOf<MultiHeadAttention>("cross_attention", bart));
  cases.back().memory_width = 28;
  cases.back().packs = false;

  GroupedQueryAttention::Config llama;
  llama.width = 48;
  llama.heads = 4;
  llama.kv_heads = 2;
  llama.rotary = CacheRotary{RotaryPairs::kHalfSplit, {.base = 10000}};
  const Residual::Config rms = {{48, NormKind::kRms, 1e-6}, "input_layernorm", "self_attn", false};
  cases.push_back(ResidualOf<GroupedQueryAttention>("llama_attention", rms, llama));
  GroupedQueryAttention::Config mistral = llama;
  mistral.window = 4;
  cases.push_back(CaseOf<GroupedQueryAttention>("mistral_attention", mistral));
  GroupedQueryAttention::Config qwen2 = llama;
  qwen2.bias = true;
  cases.push_back(CaseOf<GroupedQueryAttention>("qwen2_attention", qwen2));
  GroupedQueryAttention::Config qwen3 = llama;
  qwen3.qk_norm = true;
  qwen3.head_dim = 10;
  cases.push_back(CaseOf<GroupedQueryAttention>("qwen3_attention", qwen3));
  qwen3.causal = false;
  qwen3.window = 3;
  cases.push_back(CaseOf<GroupedQueryAttention>("bidirectional_attention", qwen3));
  cases.back().has_state = false;
}

void AddLatentAttention(std::vector<LayerCase>& cases) {
  LatentAttention::Config config;
  config.width = 30;
  config.heads = 3;
  config.latent = 17;
  config.nope = 10;
  config.rope = 6;
  config.value = 13;
  config.query_rank = 11;
  cases.push_back(CaseOf<LatentAttention>("deepseek_attention", config));
  config.query_rank = 0;
  config.bias = true;
  config.scale = .4;
  config.pairs = RotaryPairs::kHalfSplit;
  cases.push_back(CaseOf<LatentAttention>("deepseek_lite_attention", config));
}

void AddMlps(std::vector<LayerCase>& cases) {
  Mlp::Config gated;
  gated.width = 21;
  gated.inner = 70;
  cases.push_back(CaseOf<Mlp>("llama_mlp", gated));
  Mlp::Config gpt2 = {20, 33, Activation::kGeluTanh, true, Mlp::Gpt2()};
  const Residual::Config pre = {{20, NormKind::kLayer, 1e-5}, "ln_2", "mlp", false};
  cases.push_back(ResidualOf<Mlp>("gpt2_mlp", pre, gpt2));
  const Residual::Config post = {{20, NormKind::kLayer, 1e-12}, "output.LayerNorm", "", true};
  cases.push_back(ResidualOf<Mlp>("bert_mlp", post, {20, 33, Activation::kGelu, true, Mlp::Bert()}));
}

void AddRecurrent(std::vector<LayerCase>& cases) {
  Mamba::Config mamba;
  mamba.width = 19;
  mamba.inner = 34;
  mamba.state = 5;
  const Residual::Config rms = {{19, NormKind::kRms, 1e-5}, "norm", "mixer", false};
  cases.push_back(ResidualOf<Mamba>("mamba", rms, mamba));
  mamba.bias = true;
  mamba.conv_bias = false;
  mamba.step_rank = 3;
  mamba.conv = 1;
  cases.push_back(CaseOf<Mamba>("mamba_with_bias", mamba));

  Mamba2::Config mamba2;
  mamba2.width = 22;
  mamba2.heads = 4;
  mamba2.head_dim = 7;
  mamba2.groups = 2;
  mamba2.state = 9;
  cases.push_back(CaseOf<Mamba2>("mamba2", mamba2));
  mamba2.conv = 1;
  mamba2.step_min = .1;
  mamba2.step_max = .5;
  mamba2.groups = 1;
  mamba2.bias = true;
  cases.push_back(CaseOf<Mamba2>("mamba2_with_limits", mamba2));

  GatedDeltaNet::Config delta;
  delta.width = 23;
  delta.key_heads = 2;
  delta.value_heads = 6;
  delta.key_dim = 8;
  delta.value_dim = 11;
  cases.push_back(CaseOf<GatedDeltaNet>("gated_delta_net", delta));
  delta.conv = 1;
  cases.push_back(CaseOf<GatedDeltaNet>("gated_delta_net_of_one_tap", delta));

  for (const char* mechanism :
       {"linear_attention", "retention", "simple_gla", "gla", "delta_rule", "gated_delta_rule"}) {
    LinearAttention::Config linear;
    linear.mechanism = mechanism;
    linear.width = 24;
    linear.heads = 3;
    linear.value_dim = 11;
    linear.gate_rank = 5;
    if (linear.mechanism == "retention") linear.rotary = RotaryOptions();
    if (linear.mechanism == "delta_rule") linear.conv = 4;
    if (linear.mechanism == "gated_delta_rule") linear.conv = 1;
    if (linear.mechanism == "gla") linear.gate = false;
    cases.push_back(CaseOf<LinearAttention>(mechanism, linear));
  }

  for (const char* mechanism : {"none", "attention", "linear_attention", "based", "retention", "lightning",
                                "simple_gla", "gla", "hgrn2", "mlstm", "rwkv6", "gated_delta_rule", "kda", "rwkv7"}) {
    GatedMixing::Config mixing;
    mixing.mechanism = mechanism;
    mixing.width = 24;
    mixing.heads = 3;
    mixing.key_dim = 6;
    mixing.value_dim = 11;
    if (mixing.mechanism == "attention") mixing.window = 4;
    cases.push_back(CaseOf<GatedMixing>(std::string("mixing_of_") + mechanism, mixing));
  }

  for (const int64_t heads : {6, 18}) {
    H3::Config h3;
    h3.width = 18;
    h3.heads = heads;
    h3.modes = 3;
    if (heads == 18) h3.shift = 1;
    cases.push_back(CaseOf<H3>("h3_of_" + std::to_string(heads) + "_heads", h3));
  }

  Rwkv4TimeMixing::Config time;
  time.width = 26;
  time.inner = 30;
  const Residual::Config layer = {{26, NormKind::kLayer, 1e-5}, "ln1", "attention", false};
  cases.push_back(ResidualOf<Rwkv4TimeMixing>("rwkv4_time_mixing", layer, time));
  Rwkv4ChannelMixing::Config channel;
  channel.width = 26;
  channel.inner = 41;
  cases.push_back(CaseOf<Rwkv4ChannelMixing>("rwkv4_channel_mixing", channel));

  const Rwkv6TimeMixing::Config finch = {26, 33, 11, 7, 9, 64e-5};
  cases.push_back(ResidualOf<Rwkv6TimeMixing>("rwkv6_time_mixing", layer, finch));
  cases.push_back(CaseOf<Rwkv6ChannelMixing>("rwkv6_channel_mixing", {26, 41}));
}

}  // namespace

std::vector<LayerCase> LayerCases() {
  std::vector<LayerCase> cases;
  AddAttention(cases);
  AddLatentAttention(cases);
  AddMlps(cases);
  AddRecurrent(cases);
  return cases;
}

}  // namespace heed::layers

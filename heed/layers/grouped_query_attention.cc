// GroupedQueryAttention: projections, norms, rotary positions, and attention with or without a cache.
#include "heed/layers/grouped_query_attention.h"

#include <algorithm>

#include "heed/core/error.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/attend_internal.h"
#include "heed/layers/positions_internal.h"
#include "heed/layers/rows_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed::layers {
namespace {

using mechanism::Fail;
using Config = GroupedQueryAttention::Config;

// Completes the configuration by defaults that depend on other fields.
Config Completed(Config config) {
  const std::string layer = "layers::GroupedQueryAttention";
  CheckConfig(layer, "width", config.width);
  CheckConfig(layer, "heads", config.heads);
  CheckConfig(layer, "kv_heads", config.kv_heads, 0);
  CheckConfig(layer, "head_dim", config.head_dim, 0);
  CheckConfig(layer, "window", config.window, 0);
  if (config.kv_heads == 0) config.kv_heads = config.heads;
  CheckDivisor(layer, "kv_heads", config.kv_heads, "heads", config.heads);
  if (config.head_dim == 0) {
    CheckDivisor(layer, "heads", config.heads, "width", config.width);
    config.head_dim = config.width / config.heads;
  }
  return config;
}

attention::Options OptionsOf(const Config& config) {
  attention::Options options;
  options.causal = config.causal;
  options.scale = config.scale;
  if (config.window > 0) options.window.left = config.window - 1;
  if (config.window > 0 && !config.causal) options.window = {.left = config.window, .right = config.window};
  return options;
}

}  // namespace

GroupedQueryAttention::GroupedQueryAttention(const Config& config, const Weights& weights)
    : Layer("layers::GroupedQueryAttention", config.width), config_(Completed(config)) {
  const int64_t queries = config_.heads * config_.head_dim, keys = config_.kv_heads * config_.head_dim;
  const bool bias = config.bias;
  in_ = weights.Matrix(
      std::vector<LinearName>{{"q_proj", queries, bias}, {"k_proj", keys, bias}, {"v_proj", keys, bias}}, width());
  if (config.qk_norm) {
    query_norm_ = weights.Floats("q_norm.weight", {config_.head_dim});
    key_norm_ = weights.Floats("k_norm.weight", {config_.head_dim});
  }
  out_ = weights.Matrix({"o_proj", width(), config.output_bias}, queries);
  if (config.rotary) {
    const RotaryOptions& options = config.rotary->options;
    // Throws for invalid options.
    ScaledRotaryFrequencies(options.dim.value_or(config_.head_dim), options.base, options.scaling, 0);
  }
}

bool GroupedQueryAttention::CacheRotates() const {
  return config_.rotary && !DependsOnLength(config_.rotary->options.scaling.rope_type);
}

TensorView GroupedQueryAttention::Rotated(Context& ctx, Frame& frame, const Tokens& tokens,
                                          const ConstTensorView& positions, const ConstTensorView& heads) const {
  const int64_t count = heads.size(2), dim = heads.size(3);
  const TensorView rotated = Heads(frame.Floats(tokens.rows() * count * dim), tokens, count, dim, count * dim);
  const auto rotate = [&](int64_t begin, int64_t end) {
    Rotary(ctx, heads.Slice(1, begin, end), positions.Slice(1, begin, end), config_.rotary->pairs,
           config_.rotary->options, rotated.Slice(1, begin, end));
  };
  if (tokens.packed.empty() || CacheRotates()) {
    rotate(0, tokens.T);
  } else {  // packed sequences have different lengths
    for (size_t i = 0; i + 1 < tokens.packed.size(); ++i) rotate(tokens.packed[i], tokens.packed[i + 1]);
  }
  return rotated;
}

State GroupedQueryAttention::MakeState(const StateOptions& options) const {
  if (!config_.causal)
    Fail((name() + "::MakeState").c_str(), "config.causal", "is false", "true: other layers see later tokens");
  State state(name(), options.batch);
  KVCache::Options cache;
  cache.batch = options.batch;
  cache.heads = config_.kv_heads;
  cache.dim = config_.head_dim;
  cache.capacity = options.capacity;
  cache.page = options.page;
  if (CacheRotates()) cache.rotary = config_.rotary;
  state.keys.emplace(cache);
  return state;
}

void GroupedQueryAttention::Check(const Tokens& tokens, const State* state) const {
  const std::string op = name() + "::Forward";
  if (tokens.call.memory) Fail(op.c_str(), "memory", "is given", "none: this is no cross attention");
  if (tokens.call.mask && state != nullptr) Fail(op.c_str(), "mask", "is given with a state", "one of the two");
}

void GroupedQueryAttention::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t dim = config_.head_dim, rows = tokens.rows();
  const int64_t queries = config_.heads * dim, keys = config_.kv_heads * dim, all = queries + 2 * keys;
  Frame frame;
  float* q = frame.Floats(rows * all);
  float* k = q + queries;
  in_.Rows(ctx, x, width(), rows, q, all);
  if (config_.qk_norm) {
    ScaleRows call;
    call.x = call.y = {q, all};
    call.weight = query_norm_.data();
    call.eps = config_.norm_eps;
    call.rows = static_cast<size_t>(rows);
    call.heads = static_cast<size_t>(config_.heads);
    call.size = static_cast<size_t>(dim);
    call.y = {q, all};
    Run(ctx, call);
    call.x = {k, all};
    call.y = {k, all};
    call.weight = key_norm_.data();
    call.heads = static_cast<size_t>(config_.kv_heads);
    Run(ctx, call);
  }
  float* o = frame.Floats(rows * queries);
  const TensorView out = Heads(o, tokens, config_.heads, dim, queries);
  TensorView q_heads = Heads(q, tokens, config_.heads, dim, all),
             k_heads = Heads(k, tokens, config_.kv_heads, dim, all);
  const ConstTensorView values = Heads(k + keys, tokens, config_.kv_heads, dim, all);
  if (config_.rotary && !(state != nullptr && CacheRotates())) {
    const ConstTensorView positions = Positions(frame, tokens, state);
    q_heads = Rotated(ctx, frame, tokens, positions, q_heads);
    k_heads = Rotated(ctx, frame, tokens, positions, k_heads);
  }
  AttendSelf(ctx, tokens, state, q_heads, k_heads, values, OptionsOf(config_), out);
  out_.Rows(ctx, o, queries, rows, y, width());
}

}  // namespace heed::layers

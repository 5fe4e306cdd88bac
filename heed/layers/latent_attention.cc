// LatentAttention: keys and values of all tokens, or queries projected to latents (absorbed).
#include "heed/layers/latent_attention.h"

#include <algorithm>
#include <cmath>

#include "heed/core/error.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/attend_internal.h"
#include "heed/layers/linear_internal.h"
#include "heed/layers/positions_internal.h"
#include "heed/layers/rows_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed::layers {

using mechanism::Fail;

LatentAttention::LatentAttention(const Config& config, const Weights& weights)
    : Layer("layers::LatentAttention", config.width), config_(config) {
  CheckConfig(name(), "heads", config.heads);
  CheckConfig(name(), "query_rank", config.query_rank, 0);
  CheckConfig(name(), "latent", config.latent);
  CheckConfig(name(), "nope", config.nope);
  CheckConfig(name(), "rope", config.rope);
  CheckConfig(name(), "value", config.value);
  if (config.rope % 2 != 0) Fail(name().c_str(), "config.rope", "is " + std::to_string(config.rope), "an even number");
  const int64_t heads = config.heads, query = config.nope + config.rope, latent = config.latent,
                pair = config.nope + config.value;
  scale_ = config.scale.value_or(1 / std::sqrt(static_cast<double>(query)));
  if (config.query_rank == 0) {
    q_b_ = weights.Matrix({"q_proj", heads * query, false}, width());
  } else {
    q_a_ = weights.Matrix({"q_a_proj", config.query_rank, config.bias}, width());
    query_norm_ = weights.Floats("q_a_layernorm.weight", {config.query_rank});
    q_b_ = weights.Matrix({"q_b_proj", heads * query, false}, config.query_rank);
  }
  kv_a_ = weights.Matrix({"kv_a_proj_with_mqa", latent + config.rope, config.bias}, width());
  latent_norm_ = weights.Floats("kv_a_layernorm.weight", {latent});
  const int64_t sizes[] = {heads * pair, latent};
  if (const ConstTensorView both = weights.Tensor("kv_b_proj.weight", sizes)) {
    kv_b_ = Linear(both);
    for (int64_t head = 0; head < heads; ++head) {
      LinearPart part;
      part.weight = both.Slice(0, head * pair, head * pair + config.nope);
      part.transposed = true;
      to_latent_.push_back(Linear(std::span(&part, 1)));
      from_latent_.push_back(Linear(both.Slice(0, head * pair + config.nope, (head + 1) * pair)));
    }
  }
  out_ = weights.Matrix({"o_proj", width(), config.bias}, heads * config.value);
}

State LatentAttention::MakeState(const StateOptions& options) const {
  State state(name(), options.batch);
  LatentKVCache::Options cache;
  cache.batch = options.batch;
  cache.latent = config_.latent;
  cache.rope = config_.rope;
  cache.capacity = options.capacity;
  cache.page = options.page;
  state.latents.emplace(cache);
  return state;
}

void LatentAttention::Check(const Tokens& tokens, const State* state) const {
  const std::string op = name() + "::Forward";
  if (tokens.call.memory) Fail(op.c_str(), "memory", "is given", "none: this is no cross attention");
  if (tokens.call.mask && state != nullptr) Fail(op.c_str(), "mask", "is given with a state", "one of the two");
}

// `rotated` [B, T, heads, rope] holds the rotated channels of q, which replace those in q.
void LatentAttention::AttendExpanded(Context& ctx, const Tokens& tokens, float* q, const ConstTensorView& rotated,
                                     const float* latents, float* o) const {
  const int64_t rows = tokens.rows(), heads = config_.heads, nope = config_.nope, rope = config_.rope,
                value = config_.value;
  const int64_t query = nope + rope, pair = nope + value, row = config_.latent + rope;
  Frame frame;
  float* both = frame.Floats(rows * heads * pair);
  kv_b_.Rows(ctx, latents, row, rows, both, heads * pair);
  float* k = frame.Floats(rows * heads * query);
  const float* rotated_queries = rotated.as<float>();
  ctx.ParallelFor(rows, [&](int64_t i, int) {
    for (int64_t head = 0; head < heads; ++head) {
      std::copy_n(rotated_queries + (i * heads + head) * rope, rope, q + (i * heads + head) * query + nope);
      float* key = k + (i * heads + head) * query;
      std::copy_n(both + (i * heads + head) * pair, nope, key);
      std::copy_n(latents + i * row + config_.latent, rope, key + nope);
    }
  });
  attention::Options options;
  options.causal = true;
  options.scale = scale_;
  ApplyCall(tokens, options);
  options.key_lengths = tokens.call.lengths;
  options.align = attention::Align::kTopLeft;
  const ConstTensorView values(both + nope, DType::kF32, {tokens.B, tokens.T, heads, value},
                               {tokens.T * heads * pair, heads * pair, pair, int64_t{1}});
  attention::Forward(
      ctx, {Heads(q, tokens, heads, query, heads * query), Heads(k, tokens, heads, query, heads * query), values},
      options, {.o = Heads(o, tokens, heads, value, heads * value), .lse = {}});
}

void LatentAttention::AttendAbsorbed(Context& ctx, const Tokens& tokens, const float* q, const ConstTensorView& rotated,
                                     const State& state, float* o) const {
  const int64_t rows = tokens.rows(), heads = config_.heads, rope = config_.rope, latent = config_.latent,
                row = latent + rope;
  const int64_t query = config_.nope + rope;
  Frame frame;
  float* among = frame.Floats(rows * heads * row);  // queries projected to latents
  MultiplyHeads(ctx, to_latent_, {q, heads * query, query}, rows, {among, heads * row, row});
  const float* rotated_queries = rotated.as<float>();
  ctx.ParallelFor(rows, [&](int64_t i, int) {
    for (int64_t head = 0; head < heads; ++head) {
      std::copy_n(rotated_queries + (i * heads + head) * rope, rope, among + (i * heads + head) * row + latent);
    }
  });
  float* sums = frame.Floats(rows * heads * latent);
  attention::Options options;
  options.causal = true;
  options.scale = scale_;
  AttendRows(ctx, state.latents->view(), Longest(tokens), Heads(among, tokens, heads, row, heads * row), options,
             Heads(sums, tokens, heads, latent, heads * latent));
  MultiplyHeads(ctx, from_latent_, {sums, heads * latent, latent}, rows, {o, heads * config_.value, config_.value});
}

void LatentAttention::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows(), heads = config_.heads, rope = config_.rope, latent = config_.latent,
                row = latent + rope;
  const int64_t query = config_.nope + rope;
  Frame frame;
  ScaleRows norm;
  norm.eps = config_.norm_eps;
  norm.rows = static_cast<size_t>(rows);
  float* q = frame.Floats(rows * heads * query);
  if (config_.query_rank == 0) {
    q_b_.Rows(ctx, x, width(), rows, q, heads * query);
  } else {
    float* low = frame.Floats(rows * config_.query_rank);
    q_a_.Rows(ctx, x, width(), rows, low, config_.query_rank);
    norm.x = {low, config_.query_rank};
    norm.y = {low, config_.query_rank};
    norm.weight = query_norm_.data();
    norm.size = static_cast<size_t>(config_.query_rank);
    Run(ctx, norm);
    q_b_.Rows(ctx, low, config_.query_rank, rows, q, heads * query);
  }
  float *raw = frame.Floats(rows * row), *latents = frame.Floats(rows * row);
  kv_a_.Rows(ctx, x, width(), rows, raw, row);
  norm.x = {raw, row};
  norm.y = {latents, row};
  norm.weight = latent_norm_.data();
  norm.size = static_cast<size_t>(latent);
  Run(ctx, norm);

  const ConstTensorView positions = Positions(frame, tokens, state);
  RotaryOptions rotary = config_.rotary;
  rotary.dim.reset();
  const auto part = [&](float* data, int64_t count, int64_t stride, int64_t from) {
    return TensorView(data, DType::kF32, {tokens.B, tokens.T, count, rope},
                      {tokens.T * stride, stride, from, int64_t{1}});
  };
  Rotary(ctx, part(raw + latent, 1, row, row), positions, config_.pairs, rotary, part(latents + latent, 1, row, row));
  const TensorView rotated = part(frame.Floats(rows * heads * rope), heads, heads * rope, rope);
  Rotary(ctx, part(q + config_.nope, heads, heads * query, query), positions, config_.pairs, rotary, rotated);

  const bool begins =
      state == nullptr || std::ranges::all_of(state->lengths(), [](int64_t length) { return length == 0; });
  if (state != nullptr)
    state->latents->Append(ConstTensorView(latents, DType::kF32, {tokens.B, tokens.T, row}), tokens.counts);
  float* o = frame.Floats(rows * heads * config_.value);
  if (begins) {
    AttendExpanded(ctx, tokens, q, rotated, latents, o);
  } else {
    AttendAbsorbed(ctx, tokens, q, rotated, *state, o);
  }
  out_.Rows(ctx, o, heads * config_.value, rows, y, width());
}

}  // namespace heed::layers

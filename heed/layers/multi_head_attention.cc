// MultiHeadAttention: projections, and attention with or without a cache.
#include "heed/layers/multi_head_attention.h"

#include <algorithm>
#include <vector>

#include "heed/core/error.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/attend_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed::layers {

using mechanism::Fail;

MultiHeadAttention::MultiHeadAttention(const Config& config, const Weights& weights)
    : Layer("layers::MultiHeadAttention", config.width), config_(config) {
  CheckConfig(name(), "heads", config.heads);
  CheckConfig(name(), "head_dim", config.head_dim, 0);
  CheckConfig(name(), "memory_width", config.memory_width, 0);
  if (config.head_dim == 0) {
    CheckDivisor(name(), "heads", config.heads, "width", config.width);
    config_.head_dim = config.width / config.heads;
  }
  const Names& names = config.names;
  const int64_t inner = config.heads * config_.head_dim;
  const LinearName key = {names.key, inner, config.bias && config.key_bias}, value = {names.value, inner, config.bias};
  if (cross()) {
    if (config.pattern.present())
      Fail(name().c_str(), "config.pattern", "is given", "none: it says which tokens of one sequence see each other");
    if (!names.fused.empty())
      Fail(name().c_str(), "config.names.fused", "is given", "none: cross attention has matrices of its own");
    in_ = weights.Matrix({names.query, inner, config.bias}, width(), names.transposed);
    memory_ = weights.Matrix(std::vector<LinearName>{key, value}, config.memory_width, names.transposed);
  } else if (names.fused.empty()) {
    in_ = weights.Matrix(std::vector<LinearName>{{names.query, inner, config.bias}, key, value}, width(),
                         names.transposed);
  } else {
    in_ = weights.Matrix({names.fused, 3 * inner, config.bias}, width(), names.transposed);
  }
  out_ = weights.Matrix({names.output, width(), config.bias}, inner, names.transposed);
}

State MultiHeadAttention::MakeState(const StateOptions& options) const {
  if (!cross() && !config_.causal)
    Fail((name() + "::MakeState").c_str(), "config.causal", "is false", "true: other layers see later tokens");
  State state(name(), options.batch);
  KVCache::Options cache;
  cache.batch = options.batch;
  cache.heads = config_.heads;
  cache.dim = config_.head_dim;
  cache.capacity = options.capacity;
  cache.page = options.page;
  (cross() ? state.memory : state.keys).emplace(cache);
  return state;
}

void MultiHeadAttention::Check(const Tokens& tokens, const State* state) const {
  const std::string text = name() + "::Forward";
  const char* op = text.c_str();
  const Call& call = tokens.call;
  if (call.mask && state != nullptr) Fail(op, "mask", "is given with a state", "one of the two");
  if (!cross()) {
    if (call.memory) Fail(op, "memory", "is given", "none: this is no cross attention");
    return;
  }
  if (call.memory) {
    const ConstTensorView& memory = call.memory;
    if (memory.size(2) != config_.memory_width) {
      Fail(op, "memory", "has shape " + memory.ShapeString(), "[B, S, " + std::to_string(config_.memory_width) + "]");
    }
    if (call.cu_seqlens) Fail(op, "cu_seqlens", "is given with memory", "lengths instead");
    if (state != nullptr && std::ranges::max(state->memory->lengths()) > 0) {
      Fail(op, "memory", "is given again", "none: the state has it");
    }
  } else if (state == nullptr || std::ranges::max(state->memory->lengths()) == 0) {
    Fail(op, "memory", "is absent", "the sequence that cross attention reads, in the first call of a state");
  }
}

void MultiHeadAttention::ComputeSelf(Context& ctx, const Tokens& tokens, const float* x, float* o, State* state) const {
  const int64_t heads = config_.heads, dim = config_.head_dim, inner = heads * dim;
  Frame frame;
  float* projected = frame.Floats(tokens.rows() * 3 * inner);
  in_.Rows(ctx, x, width(), tokens.rows(), projected, 3 * inner);
  const float* first = projected;
  const ConstTensorView q = Heads(first, tokens, heads, dim, 3 * inner),
                        k = Heads(first + inner, tokens, heads, dim, 3 * inner),
                        v = Heads(first + 2 * inner, tokens, heads, dim, 3 * inner);
  attention::Options options;
  options.causal = config_.causal;
  options.pattern = config_.pattern;
  options.scale = config_.scale;
  AttendSelf(ctx, tokens, state, q, k, v, options, Heads(o, tokens, heads, dim, inner));
}

void MultiHeadAttention::ComputeCross(Context& ctx, const Tokens& tokens, const float* x, float* o,
                                      State* state) const {
  const int64_t heads = config_.heads, dim = config_.head_dim, inner = heads * dim;
  Frame frame;
  float* projected = frame.Floats(tokens.rows() * inner);
  in_.Rows(ctx, x, width(), tokens.rows(), projected, inner);
  const ConstTensorView q = Heads(static_cast<const float*>(projected), tokens, heads, dim, inner);
  ConstTensorView k, v;
  const Call& call = tokens.call;
  if (call.memory) {
    Tokens other;
    other.B = tokens.B;
    other.T = call.memory.size(1);
    float* both = frame.Floats(other.rows() * 2 * inner);
    memory_.Rows(ctx, call.memory.as<float>(), config_.memory_width, other.rows(), both, 2 * inner);
    const float* first = both;
    k = Heads(first, other, heads, dim, 2 * inner);
    v = Heads(first + inner, other, heads, dim, 2 * inner);
  }
  attention::Options options;
  options.scale = config_.scale;
  const TensorView out = Heads(o, tokens, heads, dim, inner);
  if (state == nullptr) {
    ApplyCall(tokens, options);
    options.key_lengths = call.memory_lengths;
    return attention::Forward(ctx, {q, k, v}, options, {.o = out, .lse = {}});
  }
  if (call.memory) {
    int64_t* lengths = frame.Integers(tokens.B);
    for (int64_t b = 0; b < tokens.B; ++b) {
      lengths[b] = !call.memory_lengths ? call.memory.size(1)
                                        : LoadAsInt64(call.memory_lengths.dtype(), call.memory_lengths.data(),
                                                      b * call.memory_lengths.stride(0));
    }
    state->memory->Append(k, v, {lengths, static_cast<size_t>(tokens.B)});
  }
  // Every row of a call sees the whole cache. The view therefore says that its last tokens were appended with this
  // call.
  KVView view = state->memory->view();
  int64_t* rows = frame.Integers(tokens.B);
  std::ranges::copy(tokens.counts, rows);
  view.appended = {rows, static_cast<size_t>(tokens.B)};
  AttendRows(ctx, view, Longest(tokens), q, options, out);
}

void MultiHeadAttention::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t inner = config_.heads * config_.head_dim;
  Frame frame;
  float* o = frame.Floats(tokens.rows() * inner);
  if (cross()) {
    ComputeCross(ctx, tokens, x, o, state);
  } else {
    ComputeSelf(ctx, tokens, x, o, state);
  }
  out_.Rows(ctx, o, inner, tokens.rows(), y, width());
}

}  // namespace heed::layers

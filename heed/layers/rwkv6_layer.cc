// RWKV-6: token shift, low-rank and full projections, and the recurrence.
#include "heed/layers/rwkv6_layer.h"

#include "heed/core/error.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/recurrence_internal.h"
#include "heed/layers/rows_internal.h"
#include "heed/layers/token_shift_internal.h"

namespace heed::layers {
namespace {

Rwkv6TimeMixing::Config Completed(Rwkv6TimeMixing::Config config) {
  const std::string layer = "layers::Rwkv6TimeMixing";
  CheckConfig(layer, "width", config.width);
  CheckConfig(layer, "inner", config.inner, 0);
  CheckConfig(layer, "head_dim", config.head_dim);
  CheckConfig(layer, "mix_rank", config.mix_rank);
  CheckConfig(layer, "decay_rank", config.decay_rank);
  if (config.inner == 0) config.inner = config.width;
  CheckDivisor(layer, "head_dim", config.head_dim, config.inner == config.width ? "width" : "inner", config.inner);
  return config;
}

// y = x W + bias for W [inputs, outputs]. Absent while weights are listed.
Linear Transposed(const ConstTensorView& weight, const std::vector<float>& bias) {
  if (!weight) return {};
  LinearPart part;
  part.weight = weight;
  part.transposed = true;
  if (!bias.empty()) part.bias = ConstTensorView(bias.data(), DType::kF32, {std::ssize(bias)});
  return Linear(std::span(&part, 1));
}

// Matrix `index` of x [count, inputs, outputs].
ConstTensorView MatrixOf(const ConstTensorView& x, int64_t index) {
  if (!x) return {};
  const ConstTensorView one = x.Slice(0, index, index + 1);
  return ConstTensorView(one.data(), one.dtype(), {one.size(1), one.size(2)}, {one.stride(1), one.stride(2)});
}

}  // namespace

Rwkv6TimeMixing::Rwkv6TimeMixing(const Config& config, const Weights& weights)
    : Layer("layers::Rwkv6TimeMixing", config.width), config_(Completed(config)) {
  const int64_t inner = config_.inner, K = config_.head_dim, rank = config_.mix_rank, decay_rank = config_.decay_rank;
  mix_ = weights.Floats("time_maa_x", {1, 1, width()});
  const int64_t in[] = {width(), 5 * rank}, out[] = {5, rank, width()};
  mix_in_ = Transposed(weights.Tensor("time_maa_w1", in), {});
  const ConstTensorView mix_out = weights.Tensor("time_maa_w2", out);
  const auto mix = [&](int64_t index, const char* name) {
    return Transposed(MatrixOf(mix_out, index), weights.Floats(name, {1, 1, width()}));
  };
  decay_.mix = mix(0, "time_maa_w");
  key_.mix = mix(1, "time_maa_k");
  value_.mix = mix(2, "time_maa_v");
  receptance_.mix = mix(3, "time_maa_r");
  gate_.mix = mix(4, "time_maa_g");
  const int64_t decay_in[] = {width(), decay_rank}, decay_out[] = {decay_rank, inner};
  const std::vector<float> decay = weights.Floats("time_decay", {1, 1, inner});
  decay_.product = Transposed(weights.Tensor("time_decay_w1", decay_in), {});
  decay_out_ = Transposed(weights.Tensor("time_decay_w2", decay_out), decay);
  bonus_ = weights.Floats("time_faaaa", {inner / K, K});
  key_.product = weights.Matrix({"key", inner, false}, width());
  value_.product = weights.Matrix({"value", inner, false}, width());
  receptance_.product = weights.Matrix({"receptance", inner, false}, width());
  gate_.product = weights.Matrix({"gate", inner, false}, width());
  out_ = weights.Matrix({"output", width(), false}, inner);
  norm_weight_ = weights.Floats("ln_x.weight", {inner});
  norm_bias_ = weights.Floats("ln_x.bias", {inner});
}

State Rwkv6TimeMixing::MakeState(const StateOptions& options) const {
  const int64_t K = config_.head_dim;
  State state(name(), options.batch);
  state.Add("shift", {options.batch, width()});
  state.Add("S", {options.batch, config_.inner / K, K, K});
  return state;
}

void Rwkv6TimeMixing::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows(), B = tokens.B, T = tokens.T, inner = config_.inner, K = config_.head_dim,
                H = inner / K, rank = config_.mix_rank;
  Frame frame;
  const float* before = Before(frame, tokens, x, width(), state == nullptr ? nullptr : &state->tensor(0));
  float* mixed = frame.Floats(rows * width());
  float* mix = frame.Floats(rows * width());
  float* ranks = frame.Floats(rows * 5 * rank);
  // x + m .* (before - x) is a mix in which m is the share of the previous token.
  Mix(ctx, {mix_.data(), 0}, before, x, rows, width(), mixed);
  mix_in_.Rows(ctx, mixed, width(), rows, ranks, 5 * rank);
  Activate(ctx, Activation::kTanh, ranks, nullptr, rows, 5 * rank, ranks);
  const auto product = [&](int64_t index, const Part& part) {
    part.mix.Rows(ctx, ranks + index * rank, 5 * rank, rows, mix, width());
    Mix(ctx, {mix, width()}, before, x, rows, width(), mixed);
    float* rows_out = frame.Floats(rows * part.product.outputs());
    part.product.Rows(ctx, mixed, width(), rows, rows_out, part.product.outputs());
    return rows_out;
  };
  float* decay_ranks = product(0, decay_);
  const float *k = product(1, key_), *v = product(2, value_), *r = product(3, receptance_), *g = product(4, gate_);
  float* decay = frame.Floats(rows * inner);
  Activate(ctx, Activation::kTanh, decay_ranks, nullptr, rows, config_.decay_rank, decay_ranks);
  decay_out_.Rows(ctx, decay_ranks, config_.decay_rank, rows, decay, inner);
  Activate(ctx, Activation::kMinusExp, decay, nullptr, rows, inner, decay);

  float* o = frame.Floats(rows * inner);
  const auto heads = [&](const float* data) { return ConstTensorView(data, DType::kF32, {B, T, H, K}); };
  NamedViews in;
  in.Add("r", heads(r));
  in.Add("k", heads(k));
  in.Add("v", heads(v));
  in.Add("log_decay", heads(decay));
  in.Add("u", ConstTensorView(bonus_.data(), DType::kF32, {H, K}));
  RunRecurrence(ctx, RecurrenceNamed("rwkv6"), tokens, in, state, TensorView(o, DType::kF32, {B, T, H, K}), 1);

  ScaleRows norm;
  norm.scaling = Scaling::kLayer;
  norm.x = {o, inner};
  norm.y = {o, inner};
  norm.gate = {g, inner};
  norm.weight = norm_weight_.data();
  norm.bias = norm_bias_.data();
  norm.weight_per_head = true;
  norm.eps = config_.norm_eps;
  norm.rows = static_cast<size_t>(rows);
  norm.heads = static_cast<size_t>(H);
  norm.size = static_cast<size_t>(K);
  Run(ctx, norm);
  out_.Rows(ctx, o, inner, rows, y, width());
}

Rwkv6ChannelMixing::Rwkv6ChannelMixing(const Config& config, const Weights& weights)
    : Layer("layers::Rwkv6ChannelMixing", config.width), config_(config) {
  CheckConfig(name(), "inner", config.inner, 0);
  if (config.inner == 0) config_.inner = config.width * 7 / 2 / 32 * 32;
  CheckConfig(name(), "inner", config_.inner);  // 0 for widths below 10
  mix_key_ = weights.Floats("time_maa_k", {1, 1, width()});
  mix_receptance_ = weights.Floats("time_maa_r", {1, 1, width()});
  key_ = weights.Matrix({"key", config_.inner, false}, width());
  receptance_ = weights.Matrix({"receptance", width(), false}, width());
  value_ = weights.Matrix({"value", width(), false}, config_.inner);
}

State Rwkv6ChannelMixing::MakeState(const StateOptions& options) const {
  State state(name(), options.batch);
  state.Add("shift", {options.batch, width()});
  return state;
}

void Rwkv6ChannelMixing::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows(), inner = config_.inner;
  Frame frame;
  const float* before = Before(frame, tokens, x, width(), state == nullptr ? nullptr : &state->tensor(0));
  float* mixed = frame.Floats(rows * width());
  float* k = frame.Floats(rows * inner);
  float* r = frame.Floats(rows * width());
  Mix(ctx, {mix_key_.data(), 0}, before, x, rows, width(), mixed);
  key_.Rows(ctx, mixed, width(), rows, k, inner);
  Mix(ctx, {mix_receptance_.data(), 0}, before, x, rows, width(), mixed);
  receptance_.Rows(ctx, mixed, width(), rows, r, width());
  Activate(ctx, Activation::kSquaredRelu, k, nullptr, rows, inner, k);
  value_.Rows(ctx, k, inner, rows, y, width());
  Activate(ctx, Activation::kSigmoid, r, y, rows, width(), y);
}

}  // namespace heed::layers

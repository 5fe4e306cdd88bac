// LinearAttention: projections, gates, norms and a recurrence.
#include "heed/layers/linear_attention_layer.h"

#include "heed/core/error.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/convolve_internal.h"
#include "heed/layers/positions_internal.h"
#include "heed/layers/recurrence_internal.h"
#include "heed/layers/rows_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed::layers {
namespace {

using Config = LinearAttention::Config;

Config Completed(Config config) {
  const std::string layer = "layers::LinearAttention";
  CheckConfig(layer, "width", config.width);
  CheckConfig(layer, "heads", config.heads);
  CheckConfig(layer, "key_dim", config.key_dim, 0);
  CheckConfig(layer, "value_dim", config.value_dim, 0);
  CheckConfig(layer, "conv", config.conv, 0);
  CheckConfig(layer, "gate_rank", config.gate_rank);
  if (config.key_dim == 0 || config.value_dim == 0) CheckDivisor(layer, "heads", config.heads, "width", config.width);
  if (!(config.gate_divisor > 0)) {
    mechanism::Fail(layer.c_str(), "config.gate_divisor", "is " + std::to_string(config.gate_divisor),
                    "a positive number");
  }
  if (config.key_dim == 0) config.key_dim = config.width / config.heads;
  if (config.value_dim == 0) config.value_dim = config.width / config.heads;
  return config;
}

// The number of projected channels from which gates are computed: for decays, or for beta.
int64_t DecayChannels(const LinearMechanism& of, const Config& config) {
  return of.decay == LinearMechanism::kNone ? 0 : of.decay == LinearMechanism::kKey ? config.gate_rank : config.heads;
}

}  // namespace

LinearAttention::LinearAttention(const Config& config, const Weights& weights)
    : Layer("layers::LinearAttention", config.width), config_(Completed(config)),
      mechanism_(&LinearMechanismNamed(name(), config.mechanism)) {
  const int64_t heads = config_.heads, keys = heads * config_.key_dim, values = heads * config_.value_dim;
  std::vector<LinearName> first = {{"q_proj", keys, false}, {"k_proj", keys, false}, {"v_proj", values, false}};
  if (config.gate) first.push_back({"g_proj", values, false});
  if (mechanism_->decay == LinearMechanism::kHead) first.push_back({"gk_proj", heads, true});
  if (mechanism_->decay == LinearMechanism::kKey) first.push_back({"gk_proj.0", config_.gate_rank, false});
  if (mechanism_->decay == LinearMechanism::kStep) first.push_back({"a_proj", heads, false});
  if (mechanism_->beta) first.push_back({"b_proj", heads, false});
  in_ = weights.Matrix(first, width());
  const int64_t gates = mechanism_->decay == LinearMechanism::kKey ? keys : heads;
  if (mechanism_->decay == LinearMechanism::kKey) gate_ = weights.Matrix({"gk_proj.1", keys, true}, config_.gate_rank);
  if (mechanism_->decay == LinearMechanism::kStep) {
    factor_ = Rates(weights.Floats("A_log", {heads}));
    bias_ = weights.Floats("dt_bias", {heads});
  } else if (mechanism_->decay != LinearMechanism::kNone) {  // log(sigmoid(x)) = -softplus(-x)
    factor_.assign(static_cast<size_t>(gates), static_cast<float>(-1 / config_.gate_divisor));
    bias_.assign(static_cast<size_t>(gates), 0.f);
  }
  for (const auto& [kind, channels] : {std::pair<const char*, int64_t>{"q", keys}, {"k", keys}, {"v", values}}) {
    if (config_.conv == 0) break;
    const std::vector<float> taps = weights.Floats(std::string(kind) + "_conv1d.weight", {channels, 1, config_.conv});
    conv_.insert(conv_.end(), taps.begin(), taps.end());
  }
  norm_ = weights.Floats(config_.norm + ".weight", {config_.value_dim});
  out_ = weights.Matrix({"o_proj", width(), false}, values);
}

State LinearAttention::MakeState(const StateOptions& options) const {
  const int64_t B = options.batch, H = config_.heads, K = config_.key_dim, V = config_.value_dim;
  State state(name(), B);
  AddRecurrence(mechanism_->passes(), H, K, V, state);
  if (config_.conv != 0) state.Add("conv", {B, H * (2 * K + V), config_.conv - 1});
  return state;
}

void LinearAttention::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows(), B = tokens.B, T = tokens.T, H = config_.heads, K = config_.key_dim,
                V = config_.value_dim;
  const int64_t keys = H * K, values = H * V, mixed = 2 * keys + values, all = in_.outputs();
  const LinearMechanism& of = *mechanism_;
  Frame frame;
  float* projected = frame.Floats(rows * all);
  in_.Rows(ctx, x, width(), rows, projected, all);
  float* decay = projected + mixed + (config_.gate ? values : 0);
  float* beta = decay + DecayChannels(of, config_);

  float* q = projected;
  int64_t stride = all;  // between rows of q, k and v
  ActivateRows activate;
  activate.rows = static_cast<size_t>(rows);
  if (config_.conv != 0) {
    q = frame.Floats(rows * mixed);
    stride = mixed;
    Convolve(ctx, tokens, conv_, {}, mixed, config_.conv, projected, all,
             state == nullptr ? nullptr : &state->tensor(of.passes().states()), q, mixed);
  } else if (of.beta) {
    activate.activation = Activation::kSilu;
    activate.x = {q, stride};
    activate.y = {q, stride};
    activate.size = static_cast<size_t>(mixed);
    Run(ctx, activate);
  }
  ScaleRows scale;
  scale.rows = static_cast<size_t>(rows);
  if (of.beta) {
    scale.scaling = Scaling::kUnit;
    scale.x = {q, stride};
    scale.y = {q, stride};
    scale.eps = 1e-6;
    scale.heads = static_cast<size_t>(2 * H);
    scale.size = static_cast<size_t>(K);
    Run(ctx, scale);
    activate.activation = Activation::kSigmoid;
    activate.x = {beta, all};
    activate.y = {beta, all};
    activate.size = static_cast<size_t>(H);
    Run(ctx, activate);
  }
  int64_t decay_stride = all;
  if (of.decay == LinearMechanism::kKey) {
    float* low = decay;
    decay = frame.Floats(rows * keys);
    gate_.Rows(ctx, low, all, rows, decay, keys);
    decay_stride = keys;
  }
  if (of.decay != LinearMechanism::kNone) {
    DecayRows forget;
    forget.x = {decay, decay_stride};
    forget.y = {decay, decay_stride};
    forget.slope = of.decay == LinearMechanism::kStep ? 1.f : -1.f;
    forget.bias = bias_.data();
    forget.factor = factor_.data();
    forget.rows = static_cast<size_t>(rows);
    forget.size = factor_.size();
    Run(ctx, forget);
  }

  const auto heads = [&](const float* data, int64_t size, int64_t row) {
    return ConstTensorView(data, DType::kF32, {B, T, H, size}, {T * row, row, size, int64_t{1}});
  };
  const auto gates = [&](const float* data, int64_t row) {
    return ConstTensorView(data, DType::kF32, {B, T, H}, {T * row, row, int64_t{1}});
  };
  ConstTensorView queries = heads(q, K, stride), keys_of_heads = heads(q + keys, K, stride);
  if (config_.rotary) {
    const ConstTensorView positions = Positions(frame, tokens, state);
    for (ConstTensorView* part : {&queries, &keys_of_heads}) {
      const TensorView rotated(frame.Floats(rows * keys), DType::kF32, {B, T, H, K});
      Rotary(ctx, *part, positions, RotaryPairs::kHalfSplit, *config_.rotary, rotated);
      *part = rotated;
    }
  }
  NamedViews in;
  in.Add("q", queries);
  in.Add("k", keys_of_heads);
  in.Add("v", heads(q + 2 * keys, V, stride));
  if (of.decay == LinearMechanism::kKey) in.Add("log_decay", heads(decay, K, keys));
  if (of.decay == LinearMechanism::kHead || of.decay == LinearMechanism::kStep) in.Add("log_decay", gates(decay, all));
  if (of.beta) in.Add("beta", gates(beta, all));
  float* o = frame.Floats(rows * values);
  RunRecurrence(ctx, of.passes(), tokens, in, state, TensorView(o, DType::kF32, {B, T, H, V}));
  ScaleRows norm;
  norm.x = {o, values};
  norm.y = {o, values};
  if (config_.gate) norm.gate = {projected + mixed, all};
  norm.weight = norm_.data();
  norm.eps = config_.norm_eps;
  norm.rows = static_cast<size_t>(rows);
  norm.heads = static_cast<size_t>(H);
  norm.size = static_cast<size_t>(V);
  Run(ctx, norm);
  out_.Rows(ctx, o, values, rows, y, width());
}

}  // namespace heed::layers

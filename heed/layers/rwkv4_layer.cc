// RWKV-4: token shift, projections and the recurrence.
#include "heed/layers/rwkv4_layer.h"

#include "heed/layers/arena_internal.h"
#include "heed/layers/convolve_internal.h"
#include "heed/layers/token_shift_internal.h"
#include "heed/ops/gated/rwkv4/rwkv4.h"

namespace heed::layers {
namespace {

// product(mix .* x + (1 - mix) .* before)
float* Mixed(Context& ctx, Frame& frame, const Tokens& tokens, const float* x, const float* before,
             const std::vector<float>& mix, float* mixed, const Linear& product) {
  const int64_t width = product.inputs();
  Mix(ctx, {mix.data(), 0}, x, before, tokens.rows(), width, mixed);
  float* y = frame.Floats(tokens.rows() * product.outputs());
  product.Rows(ctx, mixed, width, tokens.rows(), y, product.outputs());
  return y;
}

}  // namespace

Rwkv4TimeMixing::Rwkv4TimeMixing(const Config& config, const Weights& weights)
    : Layer("layers::Rwkv4TimeMixing", config.width), config_(config) {
  CheckConfig(name(), "inner", config.inner, 0);
  if (config.inner == 0) config_.inner = config.width;
  const int64_t inner = config_.inner;
  decay_ = Rates(weights.Floats("time_decay", {inner}));
  bonus_ = weights.Floats("time_first", {inner});
  mix_key_ = weights.Floats("time_mix_key", {1, 1, width()});
  mix_value_ = weights.Floats("time_mix_value", {1, 1, width()});
  mix_receptance_ = weights.Floats("time_mix_receptance", {1, 1, width()});
  key_ = weights.Matrix({"key", inner, false}, width());
  value_ = weights.Matrix({"value", inner, false}, width());
  receptance_ = weights.Matrix({"receptance", inner, false}, width());
  out_ = weights.Matrix({"output", width(), false}, inner);
}

State Rwkv4TimeMixing::MakeState(const StateOptions& options) const {
  State state(name(), options.batch);
  state.Add("shift", {options.batch, width()});
  state.Add("num", {options.batch, config_.inner});
  state.Add("den", {options.batch, config_.inner});
  state.Add("max", {options.batch, config_.inner}, -1e38f);
  return state;
}

void Rwkv4TimeMixing::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows(), inner = config_.inner, B = tokens.B, T = tokens.T;
  Frame frame;
  const float* before = Before(frame, tokens, x, width(), state == nullptr ? nullptr : &state->tensor(0));
  float* mixed = frame.Floats(rows * width());
  const float* k = Mixed(ctx, frame, tokens, x, before, mix_key_, mixed, key_);
  const float* v = Mixed(ctx, frame, tokens, x, before, mix_value_, mixed, value_);
  const float* r = Mixed(ctx, frame, tokens, x, before, mix_receptance_, mixed, receptance_);
  float* o = frame.Floats(rows * inner);
  const ConstTensorView decay(decay_.data(), DType::kF32, {inner}), bonus(bonus_.data(), DType::kF32, {inner});
  if (state != nullptr && T == 1 && !tokens.call.lengths) {
    rwkv4::StepInputs in;
    in.k = ConstTensorView(k, DType::kF32, {B, inner});
    in.v = ConstTensorView(v, DType::kF32, {B, inner});
    in.log_decay = decay;
    in.u = bonus;
    rwkv4::Step(ctx, in, {}, {state->tensor(1).view(), state->tensor(2).view(), state->tensor(3).view()},
                TensorView(o, DType::kF32, {B, inner}));
  } else {
    rwkv4::Inputs in;
    in.k = ConstTensorView(k, DType::kF32, {B, T, inner});
    in.v = ConstTensorView(v, DType::kF32, {B, T, inner});
    in.log_decay = decay;
    in.u = bonus;
    rwkv4::Options options;
    options.lengths = tokens.call.lengths;
    options.cu_seqlens = tokens.call.cu_seqlens;
    rwkv4::Outputs out;
    out.o = TensorView(o, DType::kF32, {B, T, inner});
    StateTensor after[3];
    if (state != nullptr) {
      for (int i = 0; i < 3; ++i) after[i] = state->tensor(i + 1);
      in.initial = {state->tensor(1).view(), state->tensor(2).view(), state->tensor(3).view()};
      out.final = {after[0].view(), after[1].view(), after[2].view()};
    }
    rwkv4::Forward(ctx, in, options, out);
    for (int i = 0; i < 3 && state != nullptr; ++i) state->tensor(i + 1).values.swap(after[i].values);
  }
  Activate(ctx, Activation::kSigmoid, r, o, rows, inner, o);
  out_.Rows(ctx, o, inner, rows, y, width());
}

Rwkv4ChannelMixing::Rwkv4ChannelMixing(const Config& config, const Weights& weights)
    : Layer("layers::Rwkv4ChannelMixing", config.width), config_(config) {
  CheckConfig(name(), "inner", config.inner, 0);
  if (config.inner == 0) config_.inner = 4 * config.width;
  mix_key_ = weights.Floats("time_mix_key", {1, 1, width()});
  mix_receptance_ = weights.Floats("time_mix_receptance", {1, 1, width()});
  key_ = weights.Matrix({"key", config_.inner, false}, width());
  receptance_ = weights.Matrix({"receptance", width(), false}, width());
  value_ = weights.Matrix({"value", width(), false}, config_.inner);
}

State Rwkv4ChannelMixing::MakeState(const StateOptions& options) const {
  State state(name(), options.batch);
  state.Add("shift", {options.batch, width()});
  return state;
}

void Rwkv4ChannelMixing::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows(), inner = config_.inner;
  Frame frame;
  const float* before = Before(frame, tokens, x, width(), state == nullptr ? nullptr : &state->tensor(0));
  float* mixed = frame.Floats(rows * width());
  float* k = Mixed(ctx, frame, tokens, x, before, mix_key_, mixed, key_);
  const float* r = Mixed(ctx, frame, tokens, x, before, mix_receptance_, mixed, receptance_);
  Activate(ctx, Activation::kSquaredRelu, k, nullptr, rows, inner, k);
  value_.Rows(ctx, k, inner, rows, y, width());
  Activate(ctx, Activation::kSigmoid, r, y, rows, width(), y);
}

}  // namespace heed::layers

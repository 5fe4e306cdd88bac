// Mamba2: projections, a convolution and a recurrence.
#include "heed/layers/mamba2.h"

#include "heed/core/error.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/convolve_internal.h"
#include "heed/layers/rows_internal.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/ssm/ssd/ssd.h"

namespace heed::layers {

Mamba2::Mamba2(const Config& config, const Weights& weights) : Layer("layers::Mamba2", config.width), config_(config) {
  CheckConfig(name(), "heads", config.heads);
  CheckConfig(name(), "head_dim", config.head_dim);
  CheckConfig(name(), "groups", config.groups);
  CheckConfig(name(), "state", config.state);
  CheckConfig(name(), "conv", config.conv);
  CheckDivisor(name(), "groups", config.groups, "heads", config.heads);
  if (!(config.step_min >= 0 && config.step_max >= config.step_min)) {
    mechanism::Fail(name().c_str(), "config.step_min", "is " + std::to_string(config.step_min),
                    "0 to step_max, " + std::to_string(config.step_max));
  }
  inner_ = config.heads * config.head_dim;
  mixed_ = inner_ + 2 * config.groups * config.state;
  in_ = weights.Matrix({"in_proj", inner_ + mixed_ + config.heads, config.bias}, width());
  conv_ = weights.Floats("conv1d.weight", {mixed_, 1, config.conv});
  if (config.conv_bias) conv_bias_ = weights.Floats("conv1d.bias", {mixed_});
  step_bias_ = weights.Floats("dt_bias", {config.heads});
  A_ = Rates(weights.Floats("A_log", {config.heads}));
  D_ = weights.Floats("D", {config.heads});
  norm_ = weights.Floats("norm.weight", {inner_});
  out_ = weights.Matrix({"out_proj", width(), config.bias}, inner_);
}

State Mamba2::MakeState(const StateOptions& options) const {
  State state(name(), options.batch);
  state.Add("conv", {options.batch, mixed_, config_.conv - 1});
  state.Add("ssd", {options.batch, config_.heads, config_.head_dim, config_.state});
  return state;
}

void Mamba2::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows(), B = tokens.B, T = tokens.T;
  const int64_t H = config_.heads, P = config_.head_dim, G = config_.groups, N = config_.state,
                all = inner_ + mixed_ + H;
  Frame frame;
  float* projected = frame.Floats(rows * all);  // z, x' B C, dt
  in_.Rows(ctx, x, width(), rows, projected, all);
  float* mixed = frame.Floats(rows * mixed_);
  Convolve(ctx, tokens, conv_, conv_bias_, mixed_, config_.conv, projected + inner_, all,
           state == nullptr ? nullptr : &state->tensor(0), mixed, mixed_);
  float* o = frame.Floats(rows * inner_);

  ssd::Options options;
  options.dt_softplus = true;
  options.dt_min = config_.step_min;
  options.dt_max = config_.step_max;
  ssd::Inputs in;
  in.A = ConstTensorView(A_.data(), DType::kF32, {H});
  in.D = ConstTensorView(D_.data(), DType::kF32, {H});
  in.dt_bias = ConstTensorView(step_bias_.data(), DType::kF32, {H});
  const float *steps = projected + inner_ + mixed_, *before = mixed + inner_, *after = before + G * N;
  if (state != nullptr && T == 1 && !tokens.call.lengths) {
    in.x = ConstTensorView(mixed, DType::kF32, {B, H, P}, {mixed_, P, int64_t{1}});
    in.dt = ConstTensorView(steps, DType::kF32, {B, H}, {all, int64_t{1}});
    in.B = ConstTensorView(before, DType::kF32, {B, G, N}, {mixed_, N, int64_t{1}});
    in.C = ConstTensorView(after, DType::kF32, {B, G, N}, {mixed_, N, int64_t{1}});
    ssd::Step(ctx, in, options, {state->tensor(1).view()}, TensorView(o, DType::kF32, {B, H, P}));
  } else {
    const auto split = [&](const float* data, int64_t heads, int64_t size) {
      return ConstTensorView(data, DType::kF32, {B, T, heads, size}, {T * mixed_, mixed_, size, int64_t{1}});
    };
    in.x = split(mixed, H, P);
    in.dt = ConstTensorView(steps, DType::kF32, {B, T, H}, {T * all, all, int64_t{1}});
    in.B = split(before, G, N);
    in.C = split(after, G, N);
    options.lengths = tokens.call.lengths;
    options.cu_seqlens = tokens.call.cu_seqlens;
    ssd::Outputs out;
    out.o = TensorView(o, DType::kF32, {B, T, H, P});
    StateTensor final;
    if (state != nullptr) {
      final = state->tensor(1);
      in.initial.S = state->tensor(1).view();
      out.final.S = final.view();
    }
    ssd::Forward(ctx, in, options, out);
    if (state != nullptr) state->tensor(1).values.swap(final.values);
  }

  ScaleRows norm;
  norm.x = {o, inner_};
  norm.y = {o, inner_};
  norm.gate = {projected, all};
  norm.gate_first = true;
  norm.weight = norm_.data();
  norm.weight_per_head = true;
  norm.eps = config_.norm_eps;
  norm.rows = static_cast<size_t>(rows);
  norm.heads = static_cast<size_t>(G);
  norm.size = static_cast<size_t>(inner_ / G);
  Run(ctx, norm);
  out_.Rows(ctx, o, inner_, rows, y, width());
}

}  // namespace heed::layers

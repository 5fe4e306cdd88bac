// Mamba: projections, a convolution and a scan.
#include "heed/layers/mamba.h"

#include <cmath>

#include "heed/layers/arena_internal.h"
#include "heed/layers/convolve_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan.h"

namespace heed::layers {
namespace {

Mamba::Config Completed(Mamba::Config config) {
  const std::string layer = "layers::Mamba";
  CheckConfig(layer, "width", config.width);
  CheckConfig(layer, "inner", config.inner, 0);
  CheckConfig(layer, "state", config.state);
  CheckConfig(layer, "conv", config.conv);
  CheckConfig(layer, "step_rank", config.step_rank, 0);
  if (config.inner == 0) config.inner = 2 * config.width;
  if (config.step_rank == 0) config.step_rank = (config.width + 15) / 16;
  return config;
}

}  // namespace

std::vector<float> Rates(const std::vector<float>& logarithms) {
  std::vector<float> rates;
  for (const float logarithm : logarithms) rates.push_back(static_cast<float>(-std::exp(double{logarithm})));
  return rates;
}

Mamba::Mamba(const Config& config, const Weights& weights)
    : Layer("layers::Mamba", config.width), config_(Completed(config)) {
  const int64_t inner = config_.inner, N = config_.state, rank = config_.step_rank;
  in_ = weights.Matrix({"in_proj", 2 * inner, config.bias}, width());
  conv_ = weights.Floats("conv1d.weight", {inner, 1, config.conv});
  if (config.conv_bias) conv_bias_ = weights.Floats("conv1d.bias", {inner});
  x_ = weights.Matrix({"x_proj", rank + 2 * N, false}, inner);
  step_ = weights.Matrix({"dt_proj", inner, false}, rank);
  step_bias_ = weights.Floats("dt_proj.bias", {inner});
  A_ = Rates(weights.Floats("A_log", {inner, N}));
  D_ = weights.Floats("D", {inner});
  out_ = weights.Matrix({"out_proj", width(), config.bias}, inner);
}

State Mamba::MakeState(const StateOptions& options) const {
  State state(name(), options.batch);
  state.Add("conv", {options.batch, config_.inner, config_.conv - 1});
  state.Add("scan", {options.batch, config_.inner, config_.state});
  return state;
}

void Mamba::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows(), inner = config_.inner, N = config_.state, rank = config_.step_rank;
  const int64_t B = tokens.B, T = tokens.T, picked = rank + 2 * N;
  Frame frame;
  float* projected = frame.Floats(rows * 2 * inner);  // u, z
  in_.Rows(ctx, x, width(), rows, projected, 2 * inner);
  float* u = frame.Floats(rows * inner);
  Convolve(ctx, tokens, conv_, conv_bias_, inner, config_.conv, projected, 2 * inner,
           state == nullptr ? nullptr : &state->tensor(0), u, inner);
  float* selected = frame.Floats(rows * picked);  // d, B, C
  x_.Rows(ctx, u, inner, rows, selected, picked);
  float* delta = frame.Floats(rows * inner);
  step_.Rows(ctx, selected, picked, rows, delta, inner);
  float* o = frame.Floats(rows * inner);

  selective_scan::Options options;
  options.delta_softplus = true;
  selective_scan::Inputs in;
  in.A = ConstTensorView(A_.data(), DType::kF32, {inner, N});
  in.D = ConstTensorView(D_.data(), DType::kF32, {inner});
  in.delta_bias = ConstTensorView(step_bias_.data(), DType::kF32, {inner});
  const float *before = selected + rank, *after = before + N, *z = projected + inner;
  if (state != nullptr && T == 1 && !tokens.call.lengths) {
    in.u = ConstTensorView(u, DType::kF32, {B, inner});
    in.delta = ConstTensorView(delta, DType::kF32, {B, inner});
    in.B = ConstTensorView(before, DType::kF32, {B, int64_t{1}, N}, {picked, N, int64_t{1}});
    in.C = ConstTensorView(after, DType::kF32, {B, int64_t{1}, N}, {picked, N, int64_t{1}});
    in.z = ConstTensorView(z, DType::kF32, {B, inner}, {2 * inner, int64_t{1}});
    selective_scan::Step(ctx, in, options, {state->tensor(1).view()}, TensorView(o, DType::kF32, {B, inner}));
  } else {
    in.u = Channels(static_cast<const float*>(u), tokens, inner, inner);
    in.delta = Channels(static_cast<const float*>(delta), tokens, inner, inner);
    in.B = Channels(before, tokens, N, picked);
    in.C = Channels(after, tokens, N, picked);
    in.z = Channels(z, tokens, inner, 2 * inner);
    options.lengths = tokens.call.lengths;
    options.cu_seqlens = tokens.call.cu_seqlens;
    selective_scan::Outputs out;
    out.o = Channels(o, tokens, inner, inner);
    StateTensor final;
    if (state != nullptr) {
      final = state->tensor(1);
      in.initial.S = state->tensor(1).view();
      out.final.S = final.view();
    }
    selective_scan::Forward(ctx, in, options, out);
    if (state != nullptr) state->tensor(1).values.swap(final.values);
  }
  out_.Rows(ctx, o, inner, rows, y, width());
}

}  // namespace heed::layers

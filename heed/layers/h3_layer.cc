// H3: projections and state spaces.
#include "heed/layers/h3_layer.h"

#include "heed/layers/arena_internal.h"
#include "heed/layers/attend_internal.h"
#include "heed/ops/ssm/h3/h3.h"

namespace heed::layers {

H3::H3(const Config& config, const Weights& weights) : Layer("layers::H3", config.width), config_(config) {
  CheckConfig(name(), "heads", config.heads, 0);
  CheckConfig(name(), "modes", config.modes);
  CheckConfig(name(), "shift", config.shift);
  if (config.heads == 0) config_.heads = width();
  const int64_t heads = config_.heads, modes = config.modes;
  CheckDivisor(name(), "heads", heads, "width", width());
  const auto named = [&](const char* kind) { return LinearName{kind, width(), config.bias}; };
  in_ = weights.Matrix(std::vector{named("q_proj"), named("k_proj"), named("v_proj")}, width());
  shift_ = weights.Floats("shift", {width(), config.shift});
  shift_D_ = weights.Floats("shift_D", {width()});
  log_dt_ = weights.Floats("log_dt", {heads});
  log_A_real_ = weights.Floats("log_A_real", {heads, modes});
  A_imag_ = weights.Floats("A_imag", {heads, modes});
  C_ = weights.Floats("C", {heads, modes, 2});
  D_ = weights.Floats("D", {heads});
  out_ = weights.Matrix(named("out_proj"), width());
}

State H3::MakeState(const StateOptions& options) const {
  const int64_t heads = config_.heads, d = width() / heads;
  State state(name(), options.batch);
  state.Add("S", {options.batch, heads, d, d, config_.modes, 2});
  state.Add("tail", {options.batch, config_.shift - 1, heads, d});
  return state;
}

void H3::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows(), B = tokens.B, heads = config_.heads, d = width() / heads, modes = config_.modes;
  const int64_t all = 3 * width();
  Frame frame;
  float* projected = frame.Floats(rows * all);
  in_.Rows(ctx, x, width(), rows, projected, all);
  float* o = frame.Floats(rows * width());
  h3::Inputs in;
  in.shift = ConstTensorView(shift_.data(), DType::kF32, {width(), config_.shift});
  in.shift_D = ConstTensorView(shift_D_.data(), DType::kF32, {width()});
  in.log_dt = ConstTensorView(log_dt_.data(), DType::kF32, {heads});
  in.log_A_real = ConstTensorView(log_A_real_.data(), DType::kF32, {heads, modes});
  in.A_imag = ConstTensorView(A_imag_.data(), DType::kF32, {heads, modes});
  in.C = ConstTensorView(C_.data(), DType::kF32, {heads, modes, int64_t{2}});
  in.D = ConstTensorView(D_.data(), DType::kF32, {heads});
  if (state != nullptr && tokens.T == 1 && !tokens.call.lengths) {
    const auto now = [&](const float* data) {
      return ConstTensorView(data, DType::kF32, {B, heads, d}, {all, d, int64_t{1}});
    };
    in.q = now(projected);
    in.k = now(projected + width());
    in.v = now(projected + 2 * width());
    h3::Step(ctx, in, {}, {.tail = state->tensor(1).view(), .S = state->tensor(0).view()},
             TensorView(o, DType::kF32, {B, heads, d}));
  } else {
    in.q = Heads(projected, tokens, heads, d, all);
    in.k = Heads(projected + width(), tokens, heads, d, all);
    in.v = Heads(projected + 2 * width(), tokens, heads, d, all);
    h3::Options options;
    options.lengths = tokens.call.lengths;
    options.cu_seqlens = tokens.call.cu_seqlens;
    h3::Outputs out;
    out.o = Heads(o, tokens, heads, d, width());
    StateTensor S, tail;
    if (state != nullptr) {
      S = state->tensor(0);
      tail = state->tensor(1);
      in.initial = {.tail = state->tensor(1).view(), .S = state->tensor(0).view()};
      out.final = {.tail = tail.view(), .S = S.view()};
    }
    h3::Forward(ctx, in, options, out);
    if (state != nullptr) {
      state->tensor(0).values.swap(S.values);
      state->tensor(1).values.swap(tail.values);
    }
  }
  out_.Rows(ctx, o, width(), rows, y, width());
}

}  // namespace heed::layers

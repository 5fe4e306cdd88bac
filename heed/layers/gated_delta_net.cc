// GatedDeltaNet: projections, a convolution and a delta rule.
#include "heed/layers/gated_delta_net.h"

#include "heed/layers/arena_internal.h"
#include "heed/layers/convolve_internal.h"
#include "heed/layers/recurrence_internal.h"
#include "heed/layers/rows_internal.h"

namespace heed::layers {
namespace {

GatedDeltaNet::Config Completed(GatedDeltaNet::Config config) {
  const std::string layer = "layers::GatedDeltaNet";
  CheckConfig(layer, "width", config.width);
  CheckConfig(layer, "key_heads", config.key_heads);
  CheckConfig(layer, "value_heads", config.value_heads, 0);
  CheckConfig(layer, "key_dim", config.key_dim);
  CheckConfig(layer, "value_dim", config.value_dim);
  CheckConfig(layer, "conv", config.conv);
  if (config.value_heads == 0) config.value_heads = config.key_heads;
  CheckDivisor(layer, "key_heads", config.key_heads, "value_heads", config.value_heads);
  return config;
}

// The rows of one kind in a matrix that has a group of rows per head; this kind begins at row `begin` of each group.
void AddKind(std::vector<LinearPart>& parts, const ConstTensorView& weight, int64_t heads, int64_t group, int64_t begin,
             int64_t count) {
  for (int64_t head = 0; head < heads; ++head) {
    LinearPart part;
    part.weight = weight.Slice(0, head * group + begin, head * group + begin + count);
    parts.push_back(part);
  }
}

}  // namespace

GatedDeltaNet::GatedDeltaNet(const Config& config, const Weights& weights)
    : Layer("layers::GatedDeltaNet", config.width), config_(Completed(config)) {
  const int64_t H = config_.key_heads, HV = config_.value_heads, K = config_.key_dim, V = config_.value_dim;
  const int64_t keys = H * K, values = HV * V, shared = HV / H;
  const int64_t first[] = {2 * keys + 2 * values, width()}, second[] = {2 * HV, width()};
  const ConstTensorView qkvz = weights.Tensor("in_proj_qkvz.weight", first),
                        ba = weights.Tensor("in_proj_ba.weight", second);
  if (qkvz) {
    std::vector<LinearPart> parts;
    const int64_t group = 2 * K + 2 * shared * V;
    AddKind(parts, qkvz, H, group, 0, K);
    AddKind(parts, qkvz, H, group, K, K);
    AddKind(parts, qkvz, H, group, 2 * K, shared * V);
    AddKind(parts, qkvz, H, group, 2 * K + shared * V, shared * V);
    AddKind(parts, ba, H, 2 * shared, 0, shared);
    AddKind(parts, ba, H, 2 * shared, shared, shared);
    in_ = Linear(parts);
  }
  conv_ = weights.Floats("conv1d.weight", {2 * keys + values, 1, config_.conv});
  step_bias_ = weights.Floats("dt_bias", {HV});
  rates_ = Rates(weights.Floats("A_log", {HV}));
  norm_ = weights.Floats("norm.weight", {V});
  out_ = weights.Matrix({"out_proj", width(), false}, values);
}

State GatedDeltaNet::MakeState(const StateOptions& options) const {
  const int64_t mixed = 2 * config_.key_heads * config_.key_dim + config_.value_heads * config_.value_dim;
  State state(name(), options.batch);
  state.Add("conv", {options.batch, mixed, config_.conv - 1});
  state.Add("S", {options.batch, config_.value_heads, config_.key_dim, config_.value_dim});
  return state;
}

void GatedDeltaNet::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows(), B = tokens.B, T = tokens.T;
  const int64_t H = config_.key_heads, HV = config_.value_heads, K = config_.key_dim, V = config_.value_dim;
  const int64_t keys = H * K, values = HV * V, mixed = 2 * keys + values, all = mixed + values + 2 * HV;
  Frame frame;
  float* projected = frame.Floats(rows * all);
  in_.Rows(ctx, x, width(), rows, projected, all);
  float* z = projected + mixed;
  float* beta = z + values;
  float* decay = beta + HV;
  float* q = frame.Floats(rows * mixed);
  Convolve(ctx, tokens, conv_, {}, mixed, config_.conv, projected, all, state == nullptr ? nullptr : &state->tensor(0),
           q, mixed);

  ScaleRows unit;  // queries and keys, which are adjacent
  unit.scaling = Scaling::kUnit;
  unit.x = {q, mixed};
  unit.y = {q, mixed};
  unit.eps = 1e-6;
  unit.rows = static_cast<size_t>(rows);
  unit.heads = static_cast<size_t>(2 * H);
  unit.size = static_cast<size_t>(K);
  Run(ctx, unit);
  ActivateRows fraction;
  fraction.activation = Activation::kSigmoid;
  fraction.x = {beta, all};
  fraction.y = {beta, all};
  fraction.rows = static_cast<size_t>(rows);
  fraction.size = static_cast<size_t>(HV);
  Run(ctx, fraction);
  DecayRows forget;
  forget.x = {decay, all};
  forget.y = {decay, all};
  forget.bias = step_bias_.data();
  forget.factor = rates_.data();
  forget.rows = static_cast<size_t>(rows);
  forget.size = static_cast<size_t>(HV);
  Run(ctx, forget);

  float* o = frame.Floats(rows * values);
  const auto heads = [&](const float* data, int64_t count, int64_t size) {
    return ConstTensorView(data, DType::kF32, {B, T, count, size}, {T * mixed, mixed, size, int64_t{1}});
  };
  const auto gates = [&](const float* data) {
    return ConstTensorView(data, DType::kF32, {B, T, HV}, {T * all, all, int64_t{1}});
  };
  NamedViews in;
  in.Add("q", heads(q, H, K));
  in.Add("k", heads(q + keys, H, K));
  in.Add("v", heads(q + 2 * keys, HV, V));
  in.Add("log_decay", gates(decay));
  in.Add("beta", gates(beta));
  RunRecurrence(ctx, RecurrenceNamed("gated_delta_rule"), tokens, in, state, TensorView(o, DType::kF32, {B, T, HV, V}),
                1);

  ScaleRows norm;
  norm.x = {o, values};
  norm.y = {o, values};
  norm.gate = {z, all};
  norm.weight = norm_.data();
  norm.eps = config_.norm_eps;
  norm.rows = static_cast<size_t>(rows);
  norm.heads = static_cast<size_t>(HV);
  norm.size = static_cast<size_t>(V);
  Run(ctx, norm);
  out_.Rows(ctx, o, values, rows, y, width());
}

}  // namespace heed::layers

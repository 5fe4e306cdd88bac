// GatedMixing: one product for all arguments of a mechanism, then the mechanism, norms and gate.
#include "heed/layers/gated_mixing.h"

#include <algorithm>
#include <cmath>

#include "heed/core/error.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/attend_internal.h"
#include "heed/layers/mixing_internal.h"
#include "heed/layers/positions_internal.h"
#include "heed/layers/recurrence_internal.h"
#include "heed/layers/rows_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed::layers {
namespace {

using mechanism::Fail;
using Config = GatedMixing::Config;

constexpr char kLayer[] = "layers::GatedMixing";

Config Completed(Config config) {
  CheckConfig(kLayer, "width", config.width);
  CheckConfig(kLayer, "heads", config.heads);
  CheckConfig(kLayer, "key_dim", config.key_dim, 0);
  CheckConfig(kLayer, "value_dim", config.value_dim, 0);
  CheckConfig(kLayer, "window", config.window, 0);
  if (config.key_dim == 0 || config.value_dim == 0) CheckDivisor(kLayer, "heads", config.heads, "width", config.width);
  if (config.key_dim == 0) config.key_dim = config.width / config.heads;
  if (config.value_dim == 0) config.value_dim = config.width / config.heads;
  return config;
}

// Sizes must agree with each other, and a state must fit into memory: files may request any size.
void CheckSizes(const MixingMechanism& of, const Config& config) {
  if (std::ranges::any_of(of.arguments, &MixingArgument::rotated) && config.key_dim % 2 != 0) {
    Fail(kLayer, "config.key_dim", "is " + std::to_string(config.key_dim),
         "an even number: channels are rotated in pairs");
  }
  if (!of.is_recurrence()) return;
  constexpr double kMost = 0x1p31;
  const double numbers = static_cast<double>(RecurrenceNamed(of.name).features(config.key_dim)) *
                         static_cast<double>(config.heads) * static_cast<double>(config.value_dim);
  if (numbers > kMost) {
    Fail(kLayer, "config.key_dim",
         "is " + std::to_string(config.key_dim) + ", of which a state would have more than 2^31", "a smaller one");
  }
}

std::string NameOf(const MixingArgument& argument) { return "inputs." + std::string(argument.name); }

CacheRotary Rotation() { return {RotaryPairs::kHalfSplit, {}}; }

// Works in place, on rows that are `stride` elements apart.
void Apply(Context& ctx, ArgumentMap map, int64_t rows, int64_t size, int64_t stride, float* x) {
  if (map == ArgumentMap::kSigmoid) {
    ActivateRows call;
    call.activation = Activation::kSigmoid;
    call.x = call.y = {x, stride};
    call.rows = static_cast<size_t>(rows);
    call.size = static_cast<size_t>(size);
    Run(ctx, call);
  }
  if (map == ArgumentMap::kLogSigmoid) {  // -softplus(-x)
    Frame frame;
    DecayRows call;
    float *bias = frame.Floats(size), *factor = frame.Floats(size);
    std::fill_n(bias, size, 0.f);
    std::fill_n(factor, size, -1.f);
    call.x = call.y = {x, stride};
    call.slope = -1;
    call.bias = bias;
    call.factor = factor;
    call.rows = static_cast<size_t>(rows);
    call.size = static_cast<size_t>(size);
    Run(ctx, call);
  }
}

// Normalises heads to norm 1, in place.
void Normalise(Context& ctx, int64_t rows, int64_t heads, int64_t size, int64_t stride, float* x) {
  ScaleRows call;
  call.scaling = Scaling::kUnit;
  call.x = call.y = {x, stride};
  call.eps = 1e-24;
  call.rows = static_cast<size_t>(rows);
  call.heads = static_cast<size_t>(heads);
  call.size = static_cast<size_t>(size);
  Run(ctx, call);
}

}  // namespace

GatedMixing::GatedMixing(const Config& config, const Weights& weights)
    : Layer(kLayer, config.width), config_(Completed(config)),
      mechanism_(&MixingMechanismNamed(name(), config.mechanism)) {
  CheckSizes(*mechanism_, config_);
  const int64_t H = config_.heads, values = H * config_.value_dim;
  std::vector<LinearName> projected;
  for (const MixingArgument& argument : mechanism_->arguments) {
    const int64_t size = H * argument.PerHead(config_.key_dim, config_.value_dim);
    if (argument.constant) {
      std::vector<float>& constant = constants_[argument.name] = weights.Floats(NameOf(argument) + ".bias", {size});
      if (argument.map == ArgumentMap::kLogSigmoid) {
        for (float& value : constant) value = static_cast<float>(-std::log1p(std::exp(-double{value})));
      }
    } else {
      projected.push_back({NameOf(argument), size, argument.has_bias()});
    }
  }
  projected.push_back({"gate", values, false});
  in_ = weights.Matrix(projected, width());
  out_ = weights.Matrix({"out", width(), false}, values);
}

State GatedMixing::MakeState(const StateOptions& options) const {
  State state(name(), options.batch);
  if (mechanism_->is_recurrence()) {
    AddRecurrence(RecurrenceNamed(mechanism_->name), config_.heads, config_.key_dim, config_.value_dim, state);
  }
  if (mechanism_->is_attention()) {
    KVCache::Options cache;
    cache.batch = options.batch;
    cache.heads = config_.heads;
    cache.dim = config_.key_dim;
    cache.value_dim = config_.value_dim;
    cache.capacity = options.capacity;
    cache.page = options.page;
    cache.rotary = Rotation();
    state.keys.emplace(cache);
  }
  return state;
}

void GatedMixing::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows(), B = tokens.B, T = tokens.T, H = config_.heads, K = config_.key_dim,
                V = config_.value_dim, values = H * V, all = in_.outputs();
  const MixingMechanism& of = *mechanism_;
  Frame frame;
  float* next = frame.Floats(rows * all);  // projected arguments, from the next one on
  in_.Rows(ctx, x, width(), rows, next, all);
  NamedViews in;
  for (const MixingArgument& argument : of.arguments) {
    const int64_t size = argument.PerHead(K, V);
    const bool per_head = argument.size == MixingArgument::kHead;
    if (argument.constant) {
      const float* constant = constants_.at(argument.name).data();
      in.Add(argument.name, per_head ? ConstTensorView(constant, DType::kF32, {H})
                                     : ConstTensorView(constant, DType::kF32, {H, size}));
      continue;
    }
    float* data = next;
    next += H * size;
    Apply(ctx, argument.map, rows, H * size, all, data);
    if (argument.unit) Normalise(ctx, rows, H, size, all, data);
    ConstTensorView heads = Heads(data, tokens, H, size, all);
    if (per_head) heads = ConstTensorView(data, DType::kF32, {B, T, H}, {T * all, all, int64_t{1}});
    if (argument.rotated && !(of.is_attention() && state != nullptr)) {  // a cache rotates the keys that it takes
      const TensorView rotated = Heads(frame.Floats(rows * H * size), tokens, H, size, H * size);
      Rotary(ctx, heads, Positions(frame, tokens, state), Rotation().pairs, Rotation().options, rotated);
      heads = rotated;
    }
    if (argument.name != kShare) {
      in.Add(argument.name, heads);
      continue;
    }
    // RWKV-7 removes a share of the value that is stored under its key.
    float *a = frame.Floats(rows * H * K), *b = frame.Floats(rows * H * K);
    const auto* key = in.at("k").as<float>();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < H * K; ++i) {
        a[row * H * K + i] = -key[row * all + i];
        b[row * H * K + i] = key[row * all + i] * data[row * all + i];
      }
    }
    in.Add("a", Heads(a, tokens, H, K, H * K));
    in.Add("b", Heads(b, tokens, H, K, H * K));
  }

  float* o = frame.Floats(rows * values);
  const TensorView out = Heads(o, tokens, H, V, values);
  ScaleRows norm;
  norm.x = norm.y = {o, values};
  if (of.is_recurrence()) {
    RunRecurrence(ctx, RecurrenceNamed(of.name), tokens, in, state, out);
  } else if (!of.is_attention()) {
    norm.x = {in.at("v").as<float>(), all};
  } else {
    attention::Options options;
    options.causal = true;
    if (config_.window > 0) options.window.left = config_.window - 1;
    AttendSelf(ctx, tokens, state, in.at("q"), in.at("k"), in.at("v"), options, out);
  }
  norm.gate = {next, all};
  norm.eps = config_.norm_eps;
  norm.rows = static_cast<size_t>(rows);
  norm.heads = static_cast<size_t>(H);
  norm.size = static_cast<size_t>(V);
  Run(ctx, norm);
  out_.Rows(ctx, o, values, rows, y, width());
}

}  // namespace heed::layers

// The mechanisms of the byte-level model: the arguments of each for one byte, and its state.
#ifndef HEED_EXAMPLES_BYTE_LM_MECHANISMS_H_
#define HEED_EXAMPLES_BYTE_LM_MECHANISMS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

#include "../tasks/layer.h"
#include "heed/heed.h"

inline int64_t SameFeatures(int64_t K) { return K; }
inline int64_t TaylorFeatures(int64_t K) { return 1 + K + K * (K + 1) / 2; }

// The arguments of a mechanism for one byte, by their names.
template <class StepInputs>
StepInputs InputsOf(const Arguments& in) {
  StepInputs step;
  if constexpr (requires { step.q; }) step.q = Get(in, "q");
  if constexpr (requires { step.r; }) step.r = Get(in, "r");
  if constexpr (requires { step.k; }) step.k = Get(in, "k");
  if constexpr (requires { step.v; }) step.v = Get(in, "v");
  if constexpr (requires { step.log_decay; }) step.log_decay = Get(in, "log_decay");
  if constexpr (requires { step.beta; }) step.beta = Get(in, "beta");
  if constexpr (requires { step.i; }) step.i = Get(in, "i");
  if constexpr (requires { step.f; }) step.f = Get(in, "f");
  if constexpr (requires { step.u; }) step.u = Get(in, "u");
  if constexpr (requires { step.a; }) step.a = Get(in, "a");
  if constexpr (requires { step.b; }) step.b = Get(in, "b");
  return step;
}

// Mechanisms with a state S, with a normaliser z and a maximum m if the mechanism has them. They differ in their Step
// and in the number of features of a key.
template <class StepInputs, class Options, class State>
Mix RecurrentOf(const Shape& n, int64_t features,
                void (*step)(heed::Context&, const StepInputs&, const Options&, const State&,
                             const heed::TensorView&)) {
  if (features > (int64_t{1} << 20) / (n.heads * n.value)) {
    throw std::runtime_error("a layer's state is larger than 4 MiB");  // a file may say so
  }
  Vector z(static_cast<size_t>(n.heads * features)), S(z.size() * static_cast<size_t>(n.value));
  Vector m(static_cast<size_t>(n.heads));
  return [=](heed::Context& ctx, const Arguments& in, const heed::TensorView& o) mutable {
    State state;
    state.S = View(S, {1, n.heads, features, n.value});
    if constexpr (requires { state.z; }) state.z = View(z, {1, n.heads, features});
    if constexpr (requires { state.m; }) state.m = View(m, {1, n.heads});
    step(ctx, InputsOf<StepInputs>(in), Options(), state, o);
  };
}

template <auto kStep, int64_t (*kFeatures)(int64_t) = SameFeatures>
Mix Recurrent(const Shape& n) {
  return RecurrentOf(n, kFeatures(n.key), kStep);
}

// RWKV-7 removes a share of the value that is stored under its key: a and b are that key.
inline Mix Rwkv7(const Shape& n) {
  const Sizes sizes = {1, n.heads, n.key};
  Vector a(static_cast<size_t>(n.heads * n.key)), b(a.size());
  const Mix mix = Recurrent<heed::rwkv7::Step>(n);
  return [=](heed::Context& ctx, const Arguments& in, const heed::TensorView& o) mutable {
    const float *key = in.at("k").as<float>(), *share = in.at("share").as<float>();
    for (size_t i = 0; i < a.size(); ++i) {
      a[i] = -key[i];
      b[i] = key[i] * share[i];
    }
    Arguments all = in;
    all["a"] = View(a, sizes);
    all["b"] = View(b, sizes);
    mix(ctx, all, o);
  };
}

// Keys or values of the last bytes: up to twice as many as attention reads, so that old ones are rarely moved.
class Cache {
 public:
  Cache(int64_t heads, int64_t channels, int64_t window) : heads_(heads), channels_(channels), window_(window) {}

  // The last rows including this one, [1, rows, H, D].
  heed::TensorView Append(const heed::TensorView& row) {
    const int64_t size = heads_ * channels_;
    if (rows_ == 2 * window_) {
      memory_.erase(memory_.begin(), memory_.begin() + window_ * size);
      rows_ = window_;
    }
    memory_.insert(memory_.end(), row.as<float>(), row.as<float>() + size);
    const int64_t seen = std::min(++rows_, window_);
    return heed::TensorView(memory_.data() + (rows_ - seen) * size, heed::DType::kF32, {1, seen, heads_, channels_});
  }

 private:
  int64_t heads_, channels_, window_, rows_ = 0;
  Vector memory_;
};

inline Mix Attention(const Shape& n) {
  Cache keys(n.heads, n.key, n.window), values(n.heads, n.value, n.window);
  return [=](heed::Context& ctx, const Arguments& in, const heed::TensorView& o) mutable {
    const auto query = [&](const heed::TensorView& x, int64_t channels) {  // with Tq = 1
      return heed::TensorView(x.data(), x.dtype(), {1, 1, n.heads, channels});
    };
    heed::attention::Forward(ctx, {query(in.at("q"), n.key), keys.Append(in.at("k")), values.Append(in.at("v"))}, {},
                             {query(o, n.value), {}});
  };
}

// SSD: its arguments have other names, and its state is [1, H, V, K].
inline Mix Ssd(const Shape& n) {
  if (n.key > (int64_t{1} << 20) / (n.heads * n.value)) {
    throw std::runtime_error("a layer's state is larger than 4 MiB");
  }
  Vector S(static_cast<size_t>(n.heads * n.value * n.key));
  return [=](heed::Context& ctx, const Arguments& in, const heed::TensorView& o) mutable {
    heed::ssd::StepInputs step;
    step.x = Get(in, "x");
    step.dt = Get(in, "dt");
    step.A = Get(in, "A");
    step.B = Get(in, "B");
    step.C = Get(in, "C");
    heed::ssd::Step(ctx, step, {}, {View(S, {1, n.heads, n.value, n.key})}, o);
  };
}

// Scans: their channels are those of all heads in a row.
struct Channels {
  explicit Channels(const Shape& n) : D(n.heads * n.value) {
    if (n.key > (int64_t{1} << 19) / D) {
      throw std::runtime_error("a layer's state is larger than 4 MiB");
    }
  }
  heed::TensorView Tokens(const Arguments& in, const char* name) const { return As(Get(in, name), {1, D}); }
  int64_t D;
};

// Selective scan, after the short convolution of Mamba.
inline Mix SelectiveScan(const Shape& n) {
  constexpr int64_t kTaps = 4;
  const Channels c(n);
  Vector h(static_cast<size_t>(c.D * n.key)), filtered(static_cast<size_t>(c.D));
  Vector tail(filtered.size() * (kTaps - 1));
  return [=](heed::Context& ctx, const Arguments& in, const heed::TensorView& o) mutable {
    heed::causal_conv1d::Options silu;
    silu.activation = heed::causal_conv1d::Activation::kSilu;
    const heed::TensorView u = View(filtered, {1, c.D});
    heed::causal_conv1d::Step(ctx, {c.Tokens(in, "u"), As(Get(in, "filter"), {c.D, kTaps}), {}}, silu,
                              {View(tail, {1, c.D, kTaps - 1})}, u);
    heed::selective_scan::StepInputs step;
    step.u = u;
    step.delta = c.Tokens(in, "delta");
    step.A = As(Get(in, "A"), {c.D, n.key});
    step.B = Get(in, "B");
    step.C = Get(in, "C");
    heed::selective_scan::Step(ctx, step, {}, {View(h, {1, c.D, n.key})}, As(o, {1, c.D}));
  };
}

inline Mix S4d(const Shape& n) {
  const Channels c(n);
  Vector h(static_cast<size_t>(c.D * n.key * 2));
  return [=](heed::Context& ctx, const Arguments& in, const heed::TensorView& o) mutable {
    heed::s4d::StepInputs step;
    step.u = c.Tokens(in, "u");
    step.log_dt = As(Get(in, "log_dt"), {c.D});
    step.log_A_real = As(Get(in, "log_A_real"), {c.D, n.key});
    step.A_imag = As(Get(in, "A_imag"), {c.D, n.key});
    step.C = As(Get(in, "C"), {c.D, n.key, 2});
    heed::s4d::Step(ctx, step, {}, {View(h, {1, c.D, n.key, 2})}, As(o, {1, c.D}));
  };
}

// H3: its heads are separate. The tail has the last keys.
inline Mix H3(const Shape& n) {
  constexpr int64_t kTaps = 4;
  const Channels c(n);
  if (n.key > (int64_t{1} << 19) / (c.D * n.value)) {
    throw std::runtime_error("a layer's state is larger than 4 MiB");
  }
  Vector S(static_cast<size_t>(c.D * n.value * n.key * 2));
  Vector tail(static_cast<size_t>(c.D * (kTaps - 1)));
  return [=](heed::Context& ctx, const Arguments& in, const heed::TensorView& o) mutable {
    heed::h3::StepInputs step;
    step.q = Get(in, "q");
    step.k = Get(in, "k");
    step.v = Get(in, "v");
    step.shift = As(Get(in, "shift"), {c.D, kTaps});
    step.log_dt = Get(in, "log_dt");
    step.log_A_real = Get(in, "log_A_real");
    step.A_imag = Get(in, "A_imag");
    step.C = As(Get(in, "C"), {n.heads, n.key, 2});
    heed::h3::Step(
        ctx, step, {},
        {.tail = View(tail, {1, kTaps - 1, n.heads, n.value}), .S = View(S, {1, n.heads, n.value, n.value, n.key, 2})},
        o);
  };
}

inline Mix RgLru(const Shape& n) {
  const Channels c(n);
  Vector h(static_cast<size_t>(c.D));
  return [=](heed::Context& ctx, const Arguments& in, const heed::TensorView& o) mutable {
    heed::rg_lru::StepInputs step;
    step.x = c.Tokens(in, "x");
    step.input_gate = c.Tokens(in, "input_gate");
    step.recurrence_gate = c.Tokens(in, "recurrence_gate");
    step.a = As(Get(in, "a"), {c.D});
    heed::rg_lru::Step(ctx, step, {}, {View(h, {1, c.D})}, As(o, {1, c.D}));
  };
}

inline Mix None(const Shape&) { return Nothing; }

struct Mechanism {
  Inputs inputs;
  Mix (*make)(const Shape&);
};

// The table of byte_lm.py.
inline const std::map<std::string, Mechanism>& Mechanisms() {
  const Input key = kOfKey, value = kOfValue, rotated = kRotated;
  const Input constant{Per::kHead, LogSigmoid, true}, by_head{Per::kHead, LogSigmoid};
  const Input by_key{Per::kKey, LogSigmoid}, unit{.size = Per::kKey, .unit = true};
  const Inputs rotated_qkv = {{"q", rotated}, {"k", rotated}, {"v", value}};
  const auto qkv_and = [&](const Input& log_decay) {
    return Inputs{{"q", key}, {"k", key}, {"v", value}, {"log_decay", log_decay}};
  };
  const auto delta_and = [&](const Input& log_decay) {
    return Inputs{{"q", key}, {"k", unit}, {"v", value}, {"beta", {Per::kHead, Sigmoid}}, {"log_decay", log_decay}};
  };
  static const std::map<std::string, Mechanism> mechanisms = {
      {"none", {{{"v", value}}, None}},
      {"attention", {rotated_qkv, Attention}},
      {"linear_attention", {rotated_qkv, Recurrent<heed::linear_attention::Step>}},
      {"based", {rotated_qkv, Recurrent<heed::based::Step, TaylorFeatures>}},
      {"retention", {rotated_qkv, Recurrent<heed::retention::Step>}},
      {"lightning", {qkv_and(constant), Recurrent<heed::lightning::Step>}},
      {"simple_gla", {qkv_and(by_head), Recurrent<heed::simple_gla::Step>}},
      {"gla", {qkv_and(by_key), Recurrent<heed::gla::Step>}},
      {"hgrn2", {{{"q", key}, {"log_decay", by_key}, {"i", value}}, Recurrent<heed::hgrn2::Step>}},
      {"mlstm",
       {{{"q", key}, {"k", key}, {"v", value}, {"i", {Per::kHead}}, {"f", {Per::kHead, Same}}},
        Recurrent<heed::mlstm::Step>}},
      {"rwkv6",
       {{{"r", key}, {"k", key}, {"v", value}, {"log_decay", by_key}, {"u", {.size = Per::kKey, .constant = true}}},
        Recurrent<heed::rwkv6::Step>}},
      {"gated_delta_rule", {delta_and(by_head), Recurrent<heed::gated_delta_rule::Step>}},
      {"kda", {delta_and(by_key), Recurrent<heed::kda::Step>}},
      {"rwkv7",
       {{{"r", key}, {"log_decay", by_key}, {"k", unit}, {"v", value}, {"share", {Per::kKey, Sigmoid}}}, Rwkv7}},
      {"selective_scan", {InputsOfSelectiveScan(), SelectiveScan}},
      {"s4d", {InputsOfS4d(), S4d}},
      {"h3",
       {{{"q", value},
         {"k", value},
         {"v", value},
         {"shift", {Per::kFilter, Share, true}},
         {"log_dt", {Per::kHead, Negative, true}},
         {"log_A_real", {.size = Per::kKey, .constant = true}},
         {"A_imag", {Per::kKey, Same, true}},
         {"C", {Per::kKeyPairs, Same, true}}},
        H3}},
      {"rg_lru",
       {{{"x", value}, {"input_gate", value}, {"recurrence_gate", value}, {"a", {Per::kValue, Negative, true}}},
        RgLru}},
      {"ssd",
       {{{"x", value}, {"dt", {Per::kHead, Softplus}}, {"A", {Per::kHead, Rate, true}}, {"B", key}, {"C", key}}, Ssd}},
  };
  return mechanisms;
}

#endif  // HEED_EXAMPLES_BYTE_LM_MECHANISMS_H_

// Reference of GatedMixing.
#include <cmath>
#include <map>
#include <vector>

#include "heed/layers/gated_mixing.h"
#include "heed/layers/mixing_internal.h"
#include "heed/layers/recurrence_internal.h"
#include "heed/layers/reference_internal.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/positions/rotary.h"

namespace heed::layers {

using reference::Array;

namespace {

double Mapped(ArgumentMap map, double x) {
  if (map == ArgumentMap::kSigmoid) return 1 / (1 + std::exp(-x));
  if (map == ArgumentMap::kLogSigmoid) return -std::log1p(std::exp(-x));
  return x;
}

}  // namespace

void GatedMixing::Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                            const TensorView& y) {
  const MixingMechanism& of = MixingMechanismNamed("layers::GatedMixing", config.mechanism);
  const int64_t H = config.heads, K = config.key_dim == 0 ? config.width / H : config.key_dim,
                V = config.value_dim == 0 ? config.width / H : config.value_dim;
  const Array rows(x);
  const int64_t B = rows.sizes[0], T = rows.sizes[1];
  const std::vector<int64_t> positions = reference::Positions(B, T, call);
  std::map<std::string_view, Array> arguments;
  NamedViews in;
  for (const MixingArgument& argument : of.arguments) {
    const int64_t size = argument.PerHead(K, V);
    const std::string name = "inputs." + std::string(argument.name);
    Array& a = arguments[argument.name] = argument.constant
                                              ? reference::Tensor(weights, name + ".bias", {H * size})
                                              : Product(rows, weights, {name, H * size, argument.has_bias()});
    a = Map(a, [&](double value) { return Mapped(argument.map, value); });
    a.sizes = argument.constant ? std::vector<int64_t>{H} : std::vector<int64_t>{B, T, H};
    if (argument.size != MixingArgument::kHead) a.sizes.push_back(size);
    if (argument.rotated) {
      Array rotated(a.sizes);
      RotaryReference(a.view(), ConstTensorView(positions.data(), DType::kI64, {B, T}), RotaryPairs::kHalfSplit, {},
                      rotated.view());
      a = rotated;
    }
    for (int64_t begin = 0; argument.unit && begin < std::ssize(a.values); begin += size) {
      double squares = 0;
      for (int64_t i = 0; i < size; ++i) squares += a[begin + i] * a[begin + i];
      for (int64_t i = 0; i < size; ++i) a[begin + i] /= std::max(std::sqrt(squares), 1e-12);
    }
    if (argument.name != kShare) in.Add(argument.name, a.view());
  }
  Array minus, shared;
  if (arguments.contains(kShare)) {
    minus = Map(arguments["k"], [](double value) { return -value; });
    shared = Times(arguments["k"], arguments[kShare]);
    in.Add("a", minus.view());
    in.Add("b", shared.view());
  }

  Array o({B, T, H, V});
  if (of.is_recurrence()) {
    RecurrenceReference(RecurrenceNamed(of.name), in, call, o.view());
  } else if (of.is_attention()) {
    attention::Options options;
    options.causal = true;
    options.align = attention::Align::kTopLeft;
    if (config.window > 0) options.window.left = config.window - 1;
    options.key_lengths = call.lengths;
    options.cu_seqlens_q = call.cu_seqlens;
    attention::Reference({in.at("q"), in.at("k"), in.at("v")}, options, {.o = o.view(), .lse = {}});
  } else {
    o = arguments["v"];
  }
  const auto silu = [](double value) { return ActivationReference(Activation::kSilu, value); };
  const Array gate = Map(Product(rows, weights, {"gate", H * V, false}), silu);
  const Array normed = Times(RmsNorm(o, Array({V}, 1), config.norm_eps), gate);
  Product(normed.Reshaped({B, T, H * V}), weights, {"out", config.width, false}).Store(y);
}

}  // namespace heed::layers

// The table of GatedMixing.
#include "heed/core/error.h"
#include "heed/layers/mixing_internal.h"

namespace heed::layers {
namespace {

using recurrent::Inputs;
using Argument = MixingArgument;
using Arguments = std::vector<MixingArgument>;

Argument Projected(std::string_view name, Argument::Size size, ConstTensorView Inputs::* to,
                   ArgumentMap map = ArgumentMap::kNone) {
  Argument argument{name, size};
  argument.map = map;
  argument.to = to;
  return argument;
}

Argument Rotated(Argument argument) {
  argument.rotated = true;
  return argument;
}

Argument Unit(Argument argument) {
  argument.unit = true;
  return argument;
}

Argument Constant(Argument argument) {
  argument.constant = true;
  return argument;
}

Argument LogDecay(Argument::Size size) {
  return Projected("log_decay", size, &Inputs::log_decay, ArgumentMap::kLogSigmoid);
}

std::vector<MixingMechanism> MakeTable() {
  constexpr auto kKey = Argument::kKey, kValue = Argument::kValue, kHead = Argument::kHead;
  const Argument q = Projected("q", kKey, &Inputs::q), k = Projected("k", kKey, &Inputs::k),
                 v = Projected("v", kValue, &Inputs::v), r = Projected("r", kKey, &Inputs::q),
                 beta = Projected("beta", kHead, &Inputs::beta, ArgumentMap::kSigmoid);
  const Arguments rotated = {Rotated(q), Rotated(k), v};
  return {
      {"none", {v}},
      {"attention", rotated},
      {"linear_attention", rotated},
      {"based", rotated},
      {"retention", rotated},
      {"lightning", {q, k, v, Constant(LogDecay(kHead))}},
      {"simple_gla", {q, k, v, LogDecay(kHead)}},
      {"gla", {q, k, v, LogDecay(kKey)}},
      {"hgrn2", {q, LogDecay(kKey), Projected("i", kValue, &Inputs::v)}},
      {"mlstm", {q, k, v, Projected("i", kHead, &Inputs::i), Projected("f", kHead, &Inputs::f, ArgumentMap::kBiased)}},
      {"rwkv6", {r, k, v, LogDecay(kKey), Constant(Projected("u", kKey, &Inputs::u))}},
      {"gated_delta_rule", {q, Unit(k), v, beta, LogDecay(kHead)}},
      {"kda", {q, Unit(k), v, beta, LogDecay(kKey)}},
      {"rwkv7", {r, Unit(k), v, LogDecay(kKey), Projected("share", kKey, nullptr, ArgumentMap::kSigmoid)}}};
}

}  // namespace

const MixingMechanism& MixingMechanismNamed(const std::string& layer, std::string_view name) {
  static const std::vector<MixingMechanism> table = MakeTable();
  std::string known;
  for (const MixingMechanism& mechanism : table) {
    if (mechanism.name == name) return mechanism;
    known += (known.empty() ? "'" : ", '") + std::string(mechanism.name) + "'";
  }
  throw InvalidArgument(layer + ": config.mechanism is '" + std::string(name) + "', expected one of " + known);
}

}  // namespace heed::layers

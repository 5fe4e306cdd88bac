// The table of GatedMixing.
#include "heed/core/error.h"
#include "heed/layers/mixing_internal.h"

namespace heed::layers {
namespace {

using Argument = MixingArgument;
using Arguments = std::vector<MixingArgument>;

Argument Projected(std::string_view name, Argument::Size size, ArgumentMap map = ArgumentMap::kNone) {
  return {.name = name, .size = size, .map = map};
}

Argument Turned(Argument argument) {
  argument.turned = true;
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

Argument LogDecay(Argument::Size size) { return Projected("log_decay", size, ArgumentMap::kLogSigmoid); }

std::vector<MixingMechanism> MakeTable() {
  constexpr auto kKey = Argument::kKey, kValue = Argument::kValue, kHead = Argument::kHead;
  const Argument q = Projected("q", kKey), k = Projected("k", kKey), v = Projected("v", kValue),
                 r = Projected("r", kKey), beta = Projected("beta", kHead, ArgumentMap::kSigmoid);
  const Arguments turned = {Turned(q), Turned(k), v};
  return {{"none", {v}},
          {"attention", turned},
          {"linear_attention", turned},
          {"based", turned},
          {"retention", turned},
          {"lightning", {q, k, v, Constant(LogDecay(kHead))}},
          {"simple_gla", {q, k, v, LogDecay(kHead)}},
          {"gla", {q, k, v, LogDecay(kKey)}},
          {"hgrn2", {q, LogDecay(kKey), Projected("i", kValue)}},
          {"mlstm", {q, k, v, Projected("i", kHead), Projected("f", kHead, ArgumentMap::kBiased)}},
          {"rwkv6", {r, k, v, LogDecay(kKey), Constant(Projected("u", kKey))}},
          {"gated_delta_rule", {q, Unit(k), v, beta, LogDecay(kHead)}},
          {"kda", {q, Unit(k), v, beta, LogDecay(kKey)}},
          {"rwkv7", {r, Unit(k), v, LogDecay(kKey), Projected(kShare, kKey, ArgumentMap::kSigmoid)}}};
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

// The table of GatedMixing: the arguments of recurrences follow from their own tables.
#include "heed/layers/mixing_internal.h"

#include <algorithm>

#include "heed/core/error.h"
#include "heed/layers/recurrence_internal.h"

namespace heed::layers {
namespace {

using mechanism::Role;
using Argument = MixingArgument;

constexpr const char* kRecurrences[] = {
    "linear_attention", "based", "retention", "lightning", "simple_gla", "gla", "hgrn2", "mlstm", "rwkv6",
    "gated_delta_rule", "kda",   "rwkv7"};

Argument::Size SizeOf(std::string_view axes) {
  return axes.back() == 'K' ? Argument::kKey : axes.back() == 'V' ? Argument::kValue : Argument::kHead;
}

// The arguments that a recurrence requires, in the order of its table.
std::vector<Argument> ArgumentsOf(const recurrent::Definition& definition) {
  const auto is_required = [](const mechanism::Tensor& tensor) { return !tensor.optional; };
  // Positions are known from rotated queries and keys alone where nothing decays.
  const bool rotated = std::ranges::none_of(definition.table.tensors, [&](const mechanism::Tensor& tensor) {
    return is_required(tensor) && tensor.role != Role::kQuery && tensor.role != Role::kKey &&
           tensor.role != Role::kValue;
  });
  std::vector<Argument> arguments;
  for (const mechanism::Tensor& tensor : definition.table.tensors) {
    if (!is_required(tensor) || tensor.role == Role::kReadKey) continue;
    Argument argument = {.name = tensor.name, .size = SizeOf(tensor.axes), .constant = !tensor.over_tokens()};
    switch (tensor.role) {
      case Role::kQuery: argument.rotated = rotated; break;
      case Role::kKey:
        argument.rotated = rotated;
        argument.unit = definition.delta() != recurrence::Delta::kNone;
        break;
      case Role::kLogDecay: argument.map = ArgumentMap::kLogSigmoid; break;
      case Role::kForgetGate: argument.map = ArgumentMap::kBiased; break;
      case Role::kBeta: argument.map = ArgumentMap::kSigmoid; break;
      case Role::kWriteKey:
        argument.name = kShare;
        argument.map = ArgumentMap::kSigmoid;
        break;
      default: break;
    }
    arguments.push_back(argument);
  }
  return arguments;
}

std::vector<MixingMechanism> MakeTable() {
  const Argument q = {.name = "q", .size = Argument::kKey, .rotated = true},
                 k = {.name = "k", .size = Argument::kKey, .rotated = true},
                 v = {.name = "v", .size = Argument::kValue};
  std::vector<MixingMechanism> table = {{"none", {v}}, {"attention", {q, k, v}}};
  for (const char* name : kRecurrences) table.push_back({name, ArgumentsOf(RecurrenceNamed(name).definition)});
  return table;
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

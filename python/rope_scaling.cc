// Reads the dict `rope_scaling` or `rope_parameters` of a Transformers config.
#include "python/rope_scaling.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace heed::python {
namespace {

struct NumberKey {
  std::string_view key;
  std::optional<double> RotaryScaling::* value;
};

constexpr NumberKey kNumbers[] = {
    {"factor", &RotaryScaling::factor},
    {"original_max_position_embeddings", &RotaryScaling::original_max_position_embeddings},
    {"max_position_embeddings", &RotaryScaling::max_position_embeddings},
    {"attention_factor", &RotaryScaling::attention_factor},
    {"beta_fast", &RotaryScaling::beta_fast},
    {"beta_slow", &RotaryScaling::beta_slow},
    {"mscale", &RotaryScaling::mscale},
    {"mscale_all_dim", &RotaryScaling::mscale_all_dim},
    {"low_freq_factor", &RotaryScaling::low_freq_factor},
    {"high_freq_factor", &RotaryScaling::high_freq_factor},
};

constexpr char kKeys[] =
    "rope_type (or type), factor, original_max_position_embeddings, "
    "max_position_embeddings, attention_factor, beta_fast, beta_slow, mscale, "
    "mscale_all_dim, truncate, low_freq_factor, high_freq_factor, "
    "short_factor, long_factor, rope_theta, partial_rotary_factor";

std::vector<double> ToNumbers(const Argument& argument) {
  PyObject* const p = argument.value.ptr();
  if (!PyList_Check(p) && !PyTuple_Check(p)) Fail(argument, "a list of numbers");
  std::vector<double> numbers;
  for (nb::handle item : argument.value) {
    const std::string name = std::string(argument.name) + "[" + std::to_string(numbers.size()) + "]";
    numbers.push_back(ToFinite({argument.operation, name.c_str(), item}));
  }
  return numbers;
}

void Set(const Argument& argument, std::string_view key, RopeConfig& config) {
  RotaryScaling& s = config.scaling;
  for (const NumberKey& number : kNumbers) {
    if (key != number.key) continue;
    s.*number.value = ToFinite(argument);
    return;
  }
  if (key == "truncate") {
    s.truncate = ToBool(argument);
  } else if (key == "short_factor") {
    s.short_factor = ToNumbers(argument);
  } else if (key == "long_factor") {
    s.long_factor = ToNumbers(argument);
  } else if (key == "rope_theta") {
    config.rope_theta = ToFinite(argument);
  } else if (key == "partial_rotary_factor") {
    config.partial_rotary_factor = ToFinite(argument);
  } else {
    Fail(argument.operation, "scaling", "has the key '" + std::string(key) + "'", std::string("only keys of ") + kKeys);
  }
}

}  // namespace

RopeConfig ToRopeConfig(const Argument& argument) {
  constexpr char kExpected[] = "the dict of a Transformers config, or None";
  if (!PyDict_Check(argument.value.ptr())) Fail(argument, kExpected);
  RopeConfig config;
  std::optional<RopeType> type;
  for (const auto& [key, value] : nb::borrow<nb::dict>(argument.value)) {
    const std::string name = ToString({argument.operation, "scaling's key", key}, "a string");
    if (value.is_none()) continue;
    const std::string full = "scaling." + name;
    const Argument item{argument.operation, full.c_str(), value};
    if (name != "rope_type" && name != "type") {
      Set(item, name, config);
      continue;
    }
    const RopeType named = RopeTypeFromName(ToString(item, "a string"));
    if (type && *type != named) {
      Fail(argument.operation, "scaling", "has two different types", "rope_type and type to be equal");
    }
    type = named;
  }
  config.scaling.rope_type = type.value_or(RopeType::kDefault);
  return config;
}

}  // namespace heed::python

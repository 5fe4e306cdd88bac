// Signatures of a mechanism's Python functions, for inspect and the stubs, and its types.
#include <cctype>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "python/mechanism/bound.h"
#include "python/numpy_array.h"

namespace heed::binding {
namespace {

namespace nb = nanobind;

std::string Signature(const SettingSpec& spec) {
  const std::string name = spec.name;
  const auto text = [](double x) {
    return std::isinf(x) ? std::string("float('inf')") : nb::cast<std::string>(nb::repr(nb::float_(x)));
  };
  if (const bool* flag = std::get_if<bool>(&spec.value)) {
    return name + ": bool = " + (*flag ? "True, " : "False, ");
  }
  if (const double* number = std::get_if<double>(&spec.value)) {
    return name + ": float = " + text(*number) + ", ";
  }
  if (const Range* range = std::get_if<Range>(&spec.value)) {
    return name + ": tuple[float, float] | None = (" + text(range->first) + ", " + text(range->second) + "), ";
  }
  std::string choices;
  for (const std::string& choice : spec.choices) {
    choices += (choices.empty() ? "'" : ", '") + choice + "'";
  }
  return name + ": typing.Literal[" + choices + "]" +
         (MayBeNone(spec) ? " | None = None, " : " = '" + std::get<std::string>(spec.value) + "', ");
}

// "simple_gla" -> "SimpleGla".
std::string TypeOf(std::string_view name) {
  std::string type;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '_') continue;
    const bool first = i == 0 || name[i - 1] == '_';
    type += first ? static_cast<char>(std::toupper(static_cast<unsigned char>(name[i]))) : name[i];
  }
  return type;
}

}  // namespace

void Bound::WriteSignatures(nb::module_& m) {
  const std::string base = name, type = TypeOf(name);
  std::string fields, by_place, own;
  std::vector<std::string> of_step;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Parameter& tensor = tensors[i];
    if (tensor.reading != Parameter::kMask) fields += "d" + tensor.name + " ";
    const bool numbers = tensor.keyword && tensor.reading == Parameter::kNumbers;
    const std::string array = tensor.name + (numbers ? ": Floats" : ": Array");
    const auto argument = [&](bool has_default) {
      return array + (tensor.optional ? " | None" : "") + (has_default ? " = None, " : ", ");
    };
    const bool has_default = tensor.optional && i >= num_required;
    (tensor.keyword ? own : by_place) += argument(has_default);
    if (!tensor.keyword) of_step.push_back(argument(has_default && i >= state_place));
  }
  for (const SettingSpec& spec : settings) own += Signature(spec);
  if (has_scale) own += "scale: float | None = None, ";
  const bool alone = states.size() == 1 && states_together;  // otherwise a type that the signatures define
  const std::string state_type = alone ? "Array" : "State";
  const std::string ints = ": Ints | None = None, ";
  const std::string tokens =
      "lengths" + ints + "starts" + ints + "cu_seqlens" + ints + (has_direction ? "reverse: bool = False, " : "");
  const std::string group =
      has_state() ? "comm: typing.Any | None = None, relay: bool = False, segment: int | None = None, " : "";
  const std::string initial = has_state() ? "initial_state: " + state_type + " | None = None, " : "";
  const std::string d_state = has_state() ? "dstate: " + state_type + " | None = None" : "";
  const std::string out = "out: OutArray | None = None, ", threads = "threads: int | None = None";
  const auto forward_of = [&](const std::string& returns, const std::string& result) {
    return "def " + base + "(" + by_place + "*, " + own + initial + returns + tokens + group + out + threads + ") -> " +
           result;
  };
  forward_signature = forward_of(has_state() ? "return_state: typing.Literal[False] = False, " : "", "Result");
  state_signature = forward_of("return_state: typing.Literal[True], ", "tuple[Result, " +
                                                                           (alone             ? std::string("Result")
                                                                            : states_together ? type + "State"
                                                                                              : "StateResult") +
                                                                           "]");
  backward_signature = "def " + op_backward + "(do: Array, " + by_place + (dstate_by_place ? d_state + ", " : "") +
                       "*, " + own + initial + tokens + group + threads +
                       (has_state() && !dstate_by_place ? ", " + d_state : "") + ") -> " + type + "Gradients";
  of_step.insert(of_step.begin() + static_cast<std::ptrdiff_t>(state_place),
                 alone ? "state: OutArray, " : "state: State, ");
  step_signature = "def " + op_step + "(";
  for (const std::string& argument : of_step) step_signature += argument;
  step_signature += "*, " + own + out + threads + ") -> Result";

  if (has_state()) {
    fields += "dinitial_state";
  } else {
    fields.pop_back();
  }
  gradients = python::NamedTupleType(m, type + "Gradients", fields, python::GradientsDoc(op_backward));
  if (states.size() > 1) {
    std::string names;
    for (const StateParameter& one : states) names += (names.empty() ? "" : " ") + one.name;
    state = python::NamedTupleType(m, type + "State", names, "The state of " + base + " between two calls.");
  }
  WriteTexts(type + "Gradients", fields);
}

}  // namespace heed::binding

// Keywords, signatures and texts of the Python functions of recurrent mechanisms.
#include "heed/ops/mechanism/recurrent_bound_py.h"

#include <nanobind/stl/pair.h>  // IWYU pragma: keep

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "python/arguments.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"

namespace heed::recurrent {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

template <ConstTensorView Inputs::*kField>
void ReadInput(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}

template <ConstTensorView Inputs::*kField>
void ReadNumbers(Call& call, const Argument& a) {  // one number per row has no rows
  call.in.*kField = call.arrays.ReadList(a, Kind::kFloat);
}

void ReadOther(Call& call, const Argument& a) {
  call.in.others[a.name] = call.arrays.Read(a, Kind::kFloat);
}

void ReadMask(Call& call, const Argument& a) {
  call.in.others[a.name] = call.arrays.Read(a, Kind::kBool);
}

void ReadConstants(Call& call, const Argument& a) {
  call.in.others[a.name] = call.arrays.ReadList(a, Kind::kFloat);
}

void ReadGradientOfO(Call& call, const Argument& a) {
  call.in.d_o = call.arrays.Read(a, Kind::kFloat);
}

template <ConstTensorView Options::*kField>
void ReadInts(Call& call, const Argument& a) {
  call.options.*kField = call.arrays.ReadList(a, Kind::kInt);
}

void ReadOut(Call& call, const Argument& a) {
  if (call.describe) return;
  call.out = a.value;
  call.out_view = call.arrays.Write(a, Kind::kFloat);
}

// A pair of numbers, of which infinity is one.
Range ToRange(const Argument& a) {
  const bool pair = (PyTuple_Check(a.value.ptr()) || PyList_Check(a.value.ptr())) &&
                    PyObject_Size(a.value.ptr()) == 2;
  if (!pair) Fail(a, "a pair of numbers");
  const auto number = [&](int i) {
    const nb::object item = a.value[i];
    const bool infinite =
        PyFloat_Check(item.ptr()) && PyFloat_AS_DOUBLE(item.ptr()) == HUGE_VAL;
    return infinite ? HUGE_VAL : ToFinite({a.operation, a.name, item});
  };
  return {number(0), number(1)};
}

void ReadSetting(Call& call, const Argument& a) {
  const auto spec = std::ranges::find_if(*call.specs, [&](const SettingSpec& s) {
    return std::string_view(s.name) == a.name;
  });
  Setting& value = call.settings[a.name];
  if (std::holds_alternative<bool>(spec->value)) {
    value = ToBool(a);
  } else if (std::holds_alternative<double>(spec->value)) {
    value = ToFinite(a);
  } else if (std::holds_alternative<Range>(spec->value)) {
    value = ToRange(a);
  } else {
    value = ToChoice(a, spec->choices);
  }
}

// An array, or some of them: (S, z), or (S, z, m). Of gradients the last is None.
template <class Read>
auto ReadState(const Argument& a, const Read& read) {
  using View = decltype(read(a));
  struct {
    View S, z, m;
  } state;
  if (!PyTuple_Check(a.value.ptr()) && !PyList_Check(a.value.ptr())) {
    state.S = read(a);
    return state;
  }
  const auto size = PyObject_Size(a.value.ptr());
  if (size != 2 && size != 3) Fail(a, "an array, or arrays (S, z) or (S, z, m)");
  View* const parts[] = {&state.S, &state.z, &state.m};
  for (Py_ssize_t i = 0; i < size; ++i) {
    const nb::object part = a.value[i];
    if (!part.is_none()) *parts[i] = read({a.operation, a.name, part});
  }
  return state;
}

ConstState ReadableState(Call& call, const Argument& a) {
  if (call.describe && PyTuple_Check(a.value.ptr()) && PyObject_Size(a.value.ptr()) > 0 &&
      PyLong_Check(nb::object(a.value[0]).ptr())) {
    return {call.arrays.Read(a, Kind::kFloat), {}, {}};  // explain is given a shape
  }
  const auto state =
      ReadState(a, [&](const Argument& x) { return call.arrays.Read(x, Kind::kFloat); });
  return {state.S, state.z, state.m};
}

constexpr Keyword<Call> kOptions[] = {
    {"scale", true,
     [](Call& c, const Argument& a) { c.options.scale = ToFinite(a); }},
    {"initial_state", true,
     [](Call& c, const Argument& a) { c.in.initial = ReadableState(c, a); }},
    {"return_state", false,
     [](Call& c, const Argument& a) { c.return_state = ToBool(a); }},
    {"lengths", true, &ReadInts<&Options::lengths>},
    {"starts", true, &ReadInts<&Options::starts>},
    {"cu_seqlens", true, &ReadInts<&Options::cu_seqlens>},
    {"reverse", false,
     [](Call& c, const Argument& a) { c.options.reverse = ToBool(a); }},
    {"out", true, &ReadOut},
    {"threads", true,
     [](Call& c, const Argument& a) {
       c.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads));
     }},
};
constexpr Keyword<Call> kGradientOfState = {
    "dstate", true,
    [](Call& c, const Argument& a) { c.in.d_final = ReadableState(c, a); }};
constexpr Keyword<Call> kState = {
    "state", false, [](Call& c, const Argument& a) {
      const auto state = ReadState(
          a, [&](const Argument& x) { return c.arrays.Write(x, Kind::kFloat); });
      c.state = {state.S, state.z, state.m};
    }};

// PyTorch's operators take tensors alone, all by position, results among them.
template <ConstTensorView ConstState::*kField>
void ReadInitial(Call& call, const Argument& a) {
  call.in.initial.*kField = call.arrays.Read(a, Kind::kFloat);
}
template <ConstTensorView ConstState::*kField>
void ReadGradientOfFinal(Call& call, const Argument& a) {
  call.in.d_final.*kField = call.arrays.Read(a, Kind::kFloat);
}
template <TensorView State::*kField>
void WriteFinal(Call& call, const Argument& a) {
  call.state.*kField = call.arrays.Write(a, Kind::kFloat);
}
template <TensorView Gradients::*kField>
void WriteGradient(Call& call, const Argument& a) {
  call.gradients.*kField = call.arrays.Write(a, Kind::kFloat);
}
void WriteOther(Call& call, const Argument& a) {
  call.gradients.others[a.name] = call.arrays.Write(a, Kind::kFloat);
}
template <TensorView State::*kField>
void WriteInitialGradient(Call& call, const Argument& a) {
  call.gradients.dinitial.*kField = call.arrays.Write(a, Kind::kFloat);
}
constexpr Keyword<Call> kTorchInitial[] = {
    {"initial_state", true, &ReadInitial<&ConstState::S>},
    {"initial_state.z", true, &ReadInitial<&ConstState::z>}};
constexpr Keyword<Call> kTorchInitialMaximum = {"initial_state.m", true,
                                                &ReadInitial<&ConstState::m>};
constexpr Keyword<Call> kTorchFinal[] = {
    {"out", false, &ReadOut},
    {"final_state", true, &WriteFinal<&State::S>},
    {"final_state.z", true, &WriteFinal<&State::z>}};
constexpr Keyword<Call> kTorchFinalMaximum = {"final_state.m", true, &WriteFinal<&State::m>};
constexpr Keyword<Call> kTorchIncoming[] = {
    {"the gradient of o", false, &ReadGradientOfO},
    {"the gradient of the state", true, &ReadGradientOfFinal<&ConstState::S>},
    {"the gradient of the state's z", true, &ReadGradientOfFinal<&ConstState::z>}};
constexpr Keyword<Call> kTorchInitialGradients[] = {
    {"dinitial_state", true, &WriteInitialGradient<&State::S>},
    {"dinitial_state.z", true, &WriteInitialGradient<&State::z>}};

const Keyword<Call>& Option(std::string_view name) {
  for (const Keyword<Call>& option : kOptions) {
    if (name == option.name) return option;
  }
  throw InternalError("recurrent: no option " + std::string(name));
}

// How the tensors of the table are read, and PyTorch's places for their gradients.
constexpr struct {
  std::string_view name;
  decltype(Keyword<Call>::read) read, write;
} kAccess[] = {
    {"q", &ReadInput<&Inputs::q>, &WriteGradient<&Gradients::dq>},
    {"k", &ReadInput<&Inputs::k>, &WriteGradient<&Gradients::dk>},
    {"v", &ReadInput<&Inputs::v>, &WriteGradient<&Gradients::dv>},
    {"log_decay", &ReadNumbers<&Inputs::log_decay>, &WriteGradient<&Gradients::dlog_decay>},
    {"log_decay_v", &ReadInput<&Inputs::log_decay_v>, &WriteGradient<&Gradients::dlog_decay_v>},
    {"projection", &ReadInput<&Inputs::projection>, &WriteGradient<&Gradients::dprojection>},
    {"u", &ReadInput<&Inputs::u>, &WriteGradient<&Gradients::du>},
    {"beta", &ReadNumbers<&Inputs::beta>, &WriteGradient<&Gradients::dbeta>},
    {"p", &ReadInput<&Inputs::p>, &WriteGradient<&Gradients::dp>},
    {"erase", &ReadInput<&Inputs::erase>, &WriteGradient<&Gradients::derase>},
    {"write", &ReadInput<&Inputs::write>, &WriteGradient<&Gradients::dwrite>},
    {"a", &ReadInput<&Inputs::a>, &WriteGradient<&Gradients::da>},
    {"b", &ReadInput<&Inputs::b>, &WriteGradient<&Gradients::db>},
    {"i", &ReadNumbers<&Inputs::i>, &WriteGradient<&Gradients::di>},
    {"f", &ReadNumbers<&Inputs::f>, &WriteGradient<&Gradients::df>},
};

const auto& AccessOf(const Input& input) {
  for (const auto& access : kAccess) {
    if (access.name == input.tensor->name) return access;
  }
  throw InternalError("recurrent: no access to " + input.name);
}

decltype(Keyword<Call>::read) ReaderOf(const Input& input) {
  if (input.tensor != nullptr) return AccessOf(input).read;
  return input.role == Input::kOther  ? &ReadOther
         : input.role == Input::kMask ? &ReadMask
                                      : &ReadConstants;
}

// PyTorch's operators have no default for a range: None stands for it.
Keyword<Call> SettingKeyword(const SettingSpec& spec) {
  return {spec.name, std::holds_alternative<Range>(spec.value), &ReadSetting};
}

decltype(Keyword<Call>::read) WriterOf(const Input& input) {
  return input.tensor != nullptr ? AccessOf(input).write : &WriteOther;
}

std::string Signature(const SettingSpec& spec) {
  const std::string name = spec.name;
  if (const bool* flag = std::get_if<bool>(&spec.value)) {
    return name + ": bool = " + (*flag ? "True, " : "False, ");
  }
  if (const double* number = std::get_if<double>(&spec.value)) {
    return name + ": float = " + nb::cast<std::string>(nb::repr(nb::float_(*number))) +
           ", ";
  }
  if (std::holds_alternative<Range>(spec.value)) {
    const auto text = [](double x) {
      return std::isinf(x) ? std::string("float('inf')")
                           : nb::cast<std::string>(nb::repr(nb::float_(x)));
    };
    const Range& range = std::get<Range>(spec.value);
    return name + ": tuple[float, float] = (" + text(range.first) + ", " +
           text(range.second) + "), ";
  }
  std::string choices;
  for (const std::string& choice : spec.choices) {
    choices += (choices.empty() ? "'" : ", '") + choice + "'";
  }
  return name + ": typing.Literal[" + choices + "] = '" +
         std::get<std::string>(spec.value) + "', ";
}

}  // namespace

Bound::Bound(nb::module_& m, const Binding& binding) : Binding(binding) {
  for (const Input& input : inputs) {
    positional.push_back(
        {input.name.c_str(), input.optional || input.nullable, ReaderOf(input)});
    num_positional += input.optional ? 0 : 1;
    has_maximum = has_maximum || input.role == Input::kProjection;
  }
  forward_keywords = backward_keywords = step_keywords = positional;
  for (const SettingSpec& spec : settings) {
    const Keyword<Call> keyword = SettingKeyword(spec);
    for (auto* keywords : {&forward_keywords, &backward_keywords, &step_keywords}) {
      keywords->push_back(keyword);
    }
  }
  for (const Keyword<Call>& option : kOptions) {
    const std::string_view option_name = option.name;
    const bool of_states = option_name == "initial_state" ||
                           option_name == "return_state" || option_name == "reverse";
    if (of_states && !has_state) continue;
    forward_keywords.push_back(option);
    if (option_name != "return_state" && option_name != "out") {
      backward_keywords.push_back(option);
    }
  }
  backward_keywords.insert(backward_keywords.begin(), {"do", false, &ReadGradientOfO});
  if (has_state) backward_keywords.push_back(kGradientOfState);
  step_keywords.insert(
      step_keywords.begin() + static_cast<int64_t>(num_positional), kState);
  for (const char* option : {"scale", "out", "threads"}) {
    step_keywords.push_back(Option(option));
  }
  DescribeTorch();
  Describe(m);
}

void Bound::DescribeTorch() {
  const auto append = [](auto& to, const auto& from) {
    to.insert(to.end(), std::begin(from), std::end(from));
  };
  append(torch_keywords, positional);
  for (const SettingSpec& spec : settings) {
    torch_keywords.push_back(SettingKeyword(spec));
  }
  torch_keywords.push_back(Option("scale"));
  append(torch_keywords, kTorchInitial);
  if (has_maximum) torch_keywords.push_back(kTorchInitialMaximum);
  for (const char* option : {"lengths", "starts", "cu_seqlens", "reverse", "threads"}) {
    torch_keywords.push_back(Option(option));
  }
  append(torch_backward_keywords, kTorchIncoming);
  append(torch_backward_keywords, torch_keywords);
  append(torch_keywords, kTorchFinal);
  if (has_maximum) torch_keywords.push_back(kTorchFinalMaximum);
  for (const Input& input : inputs) {
    torch_backward_keywords.push_back({input.name.c_str(), true, WriterOf(input)});
  }
  append(torch_backward_keywords, kTorchInitialGradients);
}

void Bound::Describe(nb::module_& m) {
  const std::string array = ": Array", ints = ": Ints | None = None";
  const std::string base = name;
  std::string fields;
  for (const Input& input : inputs) {
    if (input.role != Input::kMask) fields += "d" + input.name + " ";
  }
  if (has_state) fields += "dinitial_state";
  std::string type;  // "simple_gla" -> "SimpleGlaGradients"
  for (size_t i = 0; i < base.size(); ++i) {
    if (base[i] == '_') continue;
    const bool capital = i == 0 || base[i - 1] == '_';
    type += capital ? static_cast<char>(base[i] - 'a' + 'A') : base[i];
  }
  std::string arguments, decay;
  for (const Input& input : inputs) {
    if (!input.optional) {
      arguments += input.name + array + (input.nullable ? " | None, " : ", ");
    } else if (input.role == Input::kOther || input.role == Input::kMask ||
               input.role == Input::kTensor) {
      decay += input.name + ": Array | None = None, ";
    } else {
      decay += input.name + ": Floats | None = None, ";
    }
  }
  for (const SettingSpec& spec : settings) decay += Signature(spec);
  const std::string scale = "scale: float | None = None, ";
  const std::string tokens = "lengths" + ints + ", starts" + ints + ", cu_seqlens" + ints +
                             (has_state ? ", reverse: bool = False, " : ", ");
  const std::string initial =
      has_state ? "initial_state: State | None = None, " : "";
  const std::string threads = "threads: int | None = None";
  const std::string out = "out: OutArray | None = None, ";
  const auto forward_of = [&](const std::string& returns, const std::string& result) {
    const std::string with_state = has_state ? "return_state: " + returns + ", " : "";
    return "def " + base + "(" + arguments + "*, " + decay + scale + initial + with_state +
           tokens + out + threads + ") -> " + result;
  };
  forward_signature =
      forward_of("typing.Literal[False] = False", "Result");
  state_signature = forward_of("typing.Literal[True]",
                               "tuple[Result, StateResult]");
  backward_signature = "def " + base + "_backward(do" + array + ", " + arguments + "*, " +
                       decay + scale + initial + tokens + threads +
                       (has_state ? ", dstate: State | None = None" : "") +
                       ") -> " + type + "Gradients";
  step_signature = "def " + base + "_step(" + arguments + "state: State, *, " +
                   decay + scale + out + threads + ") -> Result";

  op_backward = base + "_backward";
  op_step = base + "_step";
  gradients = NamedTupleType(m, type + "Gradients", fields, GradientsDoc(op_backward));
  Settings defaults;
  for (const SettingSpec& spec : settings) defaults.emplace(spec.name, spec.value);
  if (has_state && bind(defaults).normalizer) {
    state = NamedTupleType(m, type + "State", has_maximum ? state_names : "S z",
                           "The state of " + base + " between two calls.");
  }
  WriteTexts(type + "Gradients", fields);
}

}  // namespace heed::recurrent

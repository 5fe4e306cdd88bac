// Keywords and signatures of a mechanism's Python functions, and readers of their arguments.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "python/mechanism/bound.h"
#include "python/arguments.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"

namespace heed::binding {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

ConstTensorView ReadAs(PythonCall& call, const Argument& a, Parameter::Reading reading) {
  switch (reading) {
    case Parameter::kRows: return call.arrays.Read(a, Kind::kFloat);
    case Parameter::kNumbers: return call.arrays.ReadList(a, Kind::kFloat);
    case Parameter::kInPlace: return call.arrays.ReadInPlace(a, Kind::kFloat);
    case Parameter::kMask: return call.arrays.Read(a, Kind::kBool);
  }
  return {};
}

void ReadTensor(PythonCall& call, const Argument& a) {
  call.in[a.index] = ReadAs(call, a, call.bound.tensors[a.index].reading);
}
void ReadGradientOfO(PythonCall& call, const Argument& a) {
  call.d_o = ReadAs(call, a, call.bound.output_tensor().reading);
}
void WriteGradient(PythonCall& call, const Argument& a) {
  call.gradients.resize(call.in.size());
  call.gradients[a.index] = call.arrays.Write(a, Kind::kFloat);
}
template <ConstTensorView Call::* kField>
void ReadInts(PythonCall& call, const Argument& a) {
  call.*kField = call.arrays.ReadList(a, Kind::kInt);
}
void ReadOut(PythonCall& call, const Argument& a) {
  if (call.describe) return;
  call.out = a.value;
  call.o = call.arrays.Write(a, Kind::kFloat);
}

// Reads one state; PyTorch's operators take each of them separately.
template <auto kField>
void ReadState(PythonCall& call, const Argument& a) {
  (call.*kField).resize(call.bound.states.size());
  (call.*kField)[a.index] = ReadAs(call, a, call.bound.output_tensor().reading);
}
void WriteState(PythonCall& call, const Argument& a) {
  call.states.resize(call.bound.states.size());
  call.states[a.index] = call.arrays.Write(a, Kind::kFloat);
}

std::string ExpectedStates(const Bound& b) {
  std::string text = b.states_together ? "" : "an array";
  if (b.states.size() == 1) return text;
  text += b.states_together ? "arrays (" : ", or arrays (";
  for (const auto& state : b.states) text += (&state == &b.states[0] ? "" : ", ") + state.name;
  return text + ")";
}

// Calls `read` for an array, or for each array of a tuple that is given.
void ForStates(PythonCall& call, const Argument& a, void (*read)(PythonCall&, const Argument&)) {
  const bool together = call.bound.states_together;
  const size_t count = call.bound.states.size();
  PyObject* const p = a.value.ptr();
  const bool sequence = PyTuple_Check(p) || PyList_Check(p);
  const size_t size = sequence ? static_cast<size_t>(PyObject_Size(p)) : 1;
  const bool shape = sequence && call.describe && size > 0 && PyLong_Check(nb::object(a.value[0]).ptr());
  const bool tuple = sequence && !shape;
  if (together ? count == 1 : !tuple) return read(call, {a.operation, a.name, a.value});
  const size_t least = together ? count : 2, most = together ? count : 3;  // trailing states may be None
  if (!tuple || size < least || size > most) Fail(a, ExpectedStates(call.bound));
  for (size_t i = 0; i < size; ++i) {
    const nb::object part = a.value[i];
    if (part.is_none()) continue;
    if (i >= count) Fail(a, ExpectedStates(call.bound));
    const std::string name = std::string(a.name) + "." + call.bound.states[i].name;
    read(call, {a.operation, name.c_str(), part, i});
  }
}
template <void (*kRead)(PythonCall&, const Argument&)>
void ReadStates(PythonCall& call, const Argument& a) {
  ForStates(call, a, kRead);
}

// Reads a pair of numbers, which may be infinite.
Range ToRange(const Argument& a) {
  const bool pair = (PyTuple_Check(a.value.ptr()) || PyList_Check(a.value.ptr())) && PyObject_Size(a.value.ptr()) == 2;
  if (!pair) Fail(a, "a pair of numbers");
  const auto number = [&](int i) {
    const nb::object item = a.value[i];
    const bool infinite = PyFloat_Check(item.ptr()) && PyFloat_AsDouble(item.ptr()) == HUGE_VAL;
    return infinite ? HUGE_VAL : ToFinite({a.operation, a.name, item});
  };
  return {number(0), number(1)};
}

std::string ToWord(const SettingSpec& spec, const Argument& a) {
  for (const std::string& choice : spec.choices) {
    const bool text = PyUnicode_Check(a.value.ptr());
    if (text && PyUnicode_CompareWithASCIIString(a.value.ptr(), choice.c_str()) == 0) return choice;
  }
  if (!MayBeNone(spec)) return ToChoice(a, spec.choices);
  std::string expected = "None";
  for (const std::string& choice : spec.choices) {
    expected += (&choice == &spec.choices.back() ? " or '" : ", '") + choice + "'";
  }
  Fail(a, expected);
}

void ReadSetting(PythonCall& call, const Argument& a) {
  const SettingSpec& spec = call.bound.settings[a.index];
  const auto read = [&](const auto& known) -> Setting {
    using T = std::decay_t<decltype(known)>;
    if constexpr (std::is_same_v<T, bool>) return ToBool(a);
    if constexpr (std::is_same_v<T, double>) return ToFinite(a);
    if constexpr (std::is_same_v<T, Range>) return ToRange(a);
    if constexpr (std::is_same_v<T, std::string>) return ToWord(spec, a);
  };
  call.settings.Set(a.index, std::visit(read, spec.value));
}

using Keyword = python::Keyword<PythonCall>;
constexpr Keyword kScale = {"scale", true, [](PythonCall& c, const Argument& a) { c.scale = ToFinite(a); }};
constexpr Keyword kInitial = {"initial_state", true, &ReadStates<&ReadState<&Call::initial>>};
constexpr Keyword kGradient = {"dstate", true, &ReadStates<&ReadState<&Call::d_final>>};
constexpr Keyword kState = {"state", false, &ReadStates<&WriteState>};
constexpr Keyword kReturnState = {"return_state", false,
                                  [](PythonCall& c, const Argument& a) { c.return_state = ToBool(a); }};
constexpr Keyword kReverse = {"reverse", false, [](PythonCall& c, const Argument& a) { c.reverse = ToBool(a); }};
constexpr Keyword kComm = {"comm", true, [](PythonCall& c, const Argument& a) {
                             if (c.describe) Fail(a, "None: explain describes the call of one process");
                             c.comm = a.value;
                           }};
constexpr Keyword kRelay = {"relay", false, [](PythonCall& c, const Argument& a) { c.sequence.relay = ToBool(a); }};
constexpr Keyword kSegment = {"segment", true, [](PythonCall& c, const Argument& a) {
                                c.segment = ToInt(a, 0, std::numeric_limits<int64_t>::max() / 2);
                              }};
constexpr Keyword kOut = {"out", true, &ReadOut};
constexpr Keyword kThreads = {"threads", true, [](PythonCall& c, const Argument& a) {
                                c.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads));
                              }};

template <class... Parts>
void Append(Bound::Keywords& to, const Parts&... parts) {
  const auto append = [&](const auto& part) {
    if constexpr (std::is_same_v<std::decay_t<decltype(part)>, Keyword>) {
      to.push_back(part);
    } else {
      to.insert(to.end(), part.begin(), part.end());
    }
  };
  (append(parts), ...);
}

}  // namespace

Bound::Bound(nb::module_& m, const Binding& binding) : Binding(binding) {
  op_backward = std::string(name) + "_backward";
  op_step = std::string(name) + "_step";
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].keyword) num_positional = i + 1;
    if (!tensors[i].optional) num_required = i + 1;
    if (tensors[i].name == output) output_index = i;
  }
  const std::string& axes = output_tensor().axes;
  if (output_axes.empty()) output_axes = axes;
  for (int i = 0; std::string_view axis : AxesIn(axes)) {
    if (PlaceOf(axis, output_axes) < 0) dropped_axis = i;
    ++i;
  }
  state_place = state_last ? tensors.size() : num_required;
  dstate_by_place = state_last;
  for (const Parameter& tensor : tensors) {
    unsigned ranks = 0;
    for (int rank = 0; rank < kMaxRank; ++rank) {
      const auto has_tokens = [&](int of) { return PlaceOf("T", FormOf(tensor.axes, of)) >= 0; };
      const bool constant = !FormOf(tensor.axes, rank).empty() && !has_tokens(rank);
      if (constant || has_tokens(rank + 1)) ranks |= 1U << rank;
    }
    const bool over_tokens = tensor.axes.find(", T") != std::string::npos;
    ranks_of_step.push_back(over_tokens ? ranks : ~0U);
  }
  for (const StateParameter& one : states) {
    std::vector<AxisPlace>& places = axes_of_states.emplace_back();
    for (const std::string_view axis : AxesIn(one.axes)) places.push_back(PlaceOfAxis(axis));
  }
  ListKeywords();
  WriteSignatures(m);
}

AxisPlace Bound::PlaceOfAxis(std::string_view axis) const {
  if (axis == "2") return {.tensor = 0, .place = -1, .others = 2};
  const std::string_view size = axis == "F" ? "K" : axis.substr(0, axis.find(' '));
  AxisPlace at = {.others = size == axis ? 0 : -1, .sequences = axis == "B", .features = axis == "F"};
  for (; at.tensor < tensors.size(); ++at.tensor) {
    const Parameter& tensor = tensors[at.tensor];
    at.place = PlaceOf(size, tensor.axes);
    const bool always = !tensor.optional && tensor.axes.find('|') == std::string::npos;
    if (always && at.place >= 0) return at;
  }
  throw InternalError("binding: no tensor that is always there has the axis " + std::string(size));
}

void Bound::ListKeywords() {
  Keywords by_place, own, of_tokens, initial, d_final, final, gradients_of_inputs, gradients_of_states;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const char* const tensor = tensors[i].name.c_str();
    (tensors[i].keyword ? own : by_place).push_back({tensor, tensors[i].optional, &ReadTensor, i});
    if (tensors[i].reading != Parameter::kMask) {
      gradients_of_inputs.push_back({tensor, true, &WriteGradient, i});
    }
  }
  for (size_t i = 0; i < settings.size(); ++i) {
    const bool none = MayBeNone(settings[i]) || std::holds_alternative<Range>(settings[i].value);
    own.push_back({settings[i].name, none, &ReadSetting, i});
  }
  if (has_scale) own.push_back(kScale);
  of_tokens = {{"lengths", true, &ReadInts<&Call::lengths>},
               {"starts", true, &ReadInts<&Call::starts>},
               {"cu_seqlens", true, &ReadInts<&Call::cu_seqlens>}};
  if (has_direction) of_tokens.push_back(kReverse);
  for (size_t i = 0; i < states.size(); ++i) {
    const std::string part = states.size() > 1 ? "." + states[i].name : "";
    const auto named = [&](const char* what) { return names_.emplace_back(what + part).c_str(); };
    initial.push_back({named("initial_state"), true, &ReadState<&Call::initial>, i});
    final.push_back({named("final_state"), true, &WriteState, i});
    if (!states[i].has_gradient) continue;
    d_final.push_back({named("the gradient of the state"), true, &ReadState<&Call::d_final>, i});
    gradients_of_states.push_back({named("dinitial_state"), true, &WriteState, i});
  }

  Append(forward_keywords, by_place, own);
  if (has_state()) Append(forward_keywords, kInitial, kReturnState);
  Append(forward_keywords, of_tokens);
  if (has_state()) Append(forward_keywords, kComm, kRelay, kSegment);
  Append(forward_keywords, kOut, kThreads);

  const Keyword d_o = {"do", false, &ReadGradientOfO};
  Append(backward_keywords, d_o, by_place);
  if (dstate_by_place) Append(backward_keywords, kGradient);
  Append(backward_keywords, own);
  if (has_state()) Append(backward_keywords, kInitial);
  Append(backward_keywords, of_tokens);
  if (has_state()) Append(backward_keywords, kComm, kRelay, kSegment);
  Append(backward_keywords, kThreads);
  if (has_state() && !dstate_by_place) Append(backward_keywords, kGradient);

  Append(step_keywords, by_place, own, kOut, kThreads);
  step_keywords.insert(step_keywords.begin() + static_cast<std::ptrdiff_t>(state_place), kState);

  Append(torch_keywords, by_place, own, initial, of_tokens, kThreads);
  if (has_state()) torch_keywords.push_back(kSegment);
  const Keyword d_o_of_torch = {"the gradient of o", false, &ReadGradientOfO};
  Append(torch_backward_keywords, d_o_of_torch, d_final, torch_keywords, gradients_of_inputs, gradients_of_states);
  Append(torch_keywords, kOut, final);
}

}  // namespace heed::binding

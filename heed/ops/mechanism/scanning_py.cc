// Python functions of mechanisms on the scan engine.
#include "heed/ops/mechanism/scanning_bound_py.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::scanning {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

void ReadTensor(PythonCall& call, const Argument& a) {
  call.in.*call.bound.TensorOf(a.name).input = call.arrays.ReadInPlace(a, Kind::kFloat);
}
void WriteGradient(PythonCall& call, const Argument& a) {
  call.gradients.*call.bound.TensorOf(a.name).gradient = call.arrays.Write(a, Kind::kFloat);
}

template <auto kField>
void ReadInput(PythonCall& call, const Argument& a) {
  call.in.*kField = call.arrays.ReadInPlace(a, Kind::kFloat);
}

template <ConstTensorView Options::*kField>
void ReadInts(PythonCall& call, const Argument& a) {
  call.options.*kField = call.arrays.ReadList(a, Kind::kInt);
}

void ReadSetting(PythonCall& call, const Argument& a) {
  const Setting& known = call.bound.settings.find(a.name)->second;
  Setting& value = call.settings[a.name];
  if (std::holds_alternative<bool>(known)) {
    value = ToBool(a);
  } else if (const Word* word = std::get_if<Word>(&known)) {
    value = Word{ToChoice(a, word->choices), word->choices};
  } else {
    value = ToFinite(a);
  }
}

void ReadOut(PythonCall& call, const Argument& a) {
  if (call.describe) return;
  call.out = a.value;
  call.out_view = call.arrays.Write(a, Kind::kFloat);
}

// f(state, argument) for the one of the mechanism, or for those of a tuple: (tail, S).
template <class F>
void ForStates(const PythonCall& call, const Argument& a, const F& f) {
  const States& states = call.bound.states;
  if (states.size() == 1) return f(states[0], a);
  std::string names;
  for (const StateTensor& state : states) names += (names.empty() ? "" : ", ") + std::string(state.name);
  const bool several = PyTuple_Check(a.value.ptr()) || PyList_Check(a.value.ptr());
  if (!several || PyObject_Size(a.value.ptr()) != static_cast<Py_ssize_t>(states.size())) {
    Fail(a, "arrays (" + names + ")");
  }
  for (size_t i = 0; i < states.size(); ++i) {
    const nb::object part = a.value[i];
    if (!part.is_none()) f(states[i], Argument{a.operation, a.name, part});
  }
}

template <auto kMember>
void ReadStates(PythonCall& call, const Argument& a) {
  ForStates(call, a, [&](const StateTensor& state, const Argument& part) {
    call.in.*(state.*kMember) = call.arrays.ReadInPlace(part, Kind::kFloat);
  });
}
void WriteStates(PythonCall& call, const Argument& a) {
  ForStates(call, a, [&](const StateTensor& state, const Argument& part) {
    call.state.*state.step = call.arrays.Write(part, Kind::kFloat);
  });
}

constexpr Keyword<PythonCall> kInitial = {"initial_state", true, &ReadStates<&StateTensor::initial>};

// PyTorch's operators take each state by itself: the first, or the second.
template <auto kMember, size_t kIndex>
void ReadState(PythonCall& call, const Argument& a) {
  call.in.*(call.bound.states[kIndex].*kMember) = call.arrays.ReadInPlace(a, Kind::kFloat);
}
template <size_t kIndex>
void WriteFinal(PythonCall& call, const Argument& a) {
  call.finals.*call.bound.states[kIndex].final = call.arrays.Write(a, Kind::kFloat);
}
template <size_t kIndex>
void WriteInitialGradient(PythonCall& call, const Argument& a) {
  call.gradients.*call.bound.states[kIndex].dinitial = call.arrays.Write(a, Kind::kFloat);
}
constexpr Keyword<PythonCall> kTorchInitial[] = {
    {"initial_state", true, &ReadState<&StateTensor::initial, 0>},
    {"initial_state (second)", true, &ReadState<&StateTensor::initial, 1>}};
constexpr Keyword<PythonCall> kTorchGradient[] = {
    {"the gradient of the state", true, &ReadState<&StateTensor::d_final, 0>},
    {"the gradient of the state (second)", true, &ReadState<&StateTensor::d_final, 1>}};
constexpr Keyword<PythonCall> kTorchFinal[] = {{"final_state", true, &WriteFinal<0>},
                                         {"final_state (second)", true, &WriteFinal<1>}};
constexpr Keyword<PythonCall> kTorchInitialGradient[] = {
    {"dinitial_state", true, &WriteInitialGradient<0>},
    {"dinitial_state (second)", true, &WriteInitialGradient<1>}};
constexpr Keyword<PythonCall> kOfTokens[] = {
    {"lengths", true, &ReadInts<&Options::lengths>},
    {"starts", true, &ReadInts<&Options::starts>},
    {"cu_seqlens", true, &ReadInts<&Options::cu_seqlens>},
    {"reverse", false, [](PythonCall& c, const Argument& a) { c.options.reverse = ToBool(a); }}};
constexpr Keyword<PythonCall> kReturnState = {
    "return_state", false, [](PythonCall& c, const Argument& a) { c.return_state = ToBool(a); }};
constexpr Keyword<PythonCall> kOut = {"out", true, &ReadOut};
constexpr Keyword<PythonCall> kThreads = {
    "threads", true, [](PythonCall& c, const Argument& a) {
      c.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads));
    }};

// "simple_gla" -> "SimpleGlaGradients".
std::string GradientsName(std::string_view name) {
  std::string type;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '_') continue;
    const bool capital = i == 0 || name[i - 1] == '_';
    type += capital ? static_cast<char>(name[i] - 'a' + 'A') : name[i];
  }
  return type + "Gradients";
}

std::string SettingText(const std::string& name, const Setting& value) {
  if (const bool* flag = std::get_if<bool>(&value)) {
    return name + ": bool = " + (*flag ? "True, " : "False, ");
  }
  if (const Word* word = std::get_if<Word>(&value)) {
    std::string choices;
    for (const std::string& choice : word->choices) {
      choices += (choices.empty() ? "'" : ", '") + choice + "'";
    }
    return name + ": typing.Literal[" + choices + "] = '" + word->value + "', ";
  }
  const nb::float_ number(std::get<double>(value));
  return name + ": float = " + nb::cast<std::string>(nb::repr(number)) + ", ";
}

}  // namespace

Bound::Bound(nb::module_& m, const Binding& binding) : Binding(binding) {
  op_backward = std::string(name) + "_backward";
  op_step = std::string(name) + "_step";
  states = definition.states();
  std::vector<Keyword<PythonCall>> own;
  for (const Tensor& tensor : definition.tensors) {
    own.push_back({tensor.name, tensor.optional, &ReadTensor});
    num_required += tensor.optional ? 0 : 1;
  }
  for (const auto& [setting, value] : settings) own.push_back({setting.c_str(), false, &ReadSetting});

  const auto append = [](std::vector<Keyword<PythonCall>>& to, const auto& from) {
    to.insert(to.end(), std::begin(from), std::end(from));
  };
  const Keyword<PythonCall> d_o = {"do", false, &ReadInput<&BackwardInputs::d_o>};
  const Keyword<PythonCall> d_state = {"dstate", true, &ReadStates<&StateTensor::d_final>};
  const auto of_states = [&](const Keyword<PythonCall> (&keywords)[2]) {
    return std::vector(keywords, keywords + states.size());
  };
  const bool has_state = definition.has_state();
  append(forward_keywords, own);
  if (has_state) append(forward_keywords, std::vector{kInitial, kReturnState});
  append(forward_keywords, kOfTokens);
  append(forward_keywords, std::vector{kOut, kThreads});

  backward_keywords = {d_o};
  append(backward_keywords, own);
  if (has_state) append(backward_keywords, std::vector{d_state, kInitial});
  append(backward_keywords, kOfTokens);
  backward_keywords.push_back(kThreads);

  append(step_keywords, own);
  step_keywords.insert(step_keywords.begin() + static_cast<std::ptrdiff_t>(num_required),
                       {"state", false, &WriteStates});
  append(step_keywords, std::vector{kOut, kThreads});

  append(torch_keywords, own);
  append(torch_keywords, of_states(kTorchInitial));
  append(torch_keywords, kOfTokens);
  torch_keywords.push_back(kThreads);
  torch_backward_keywords = {{"the gradient of o", false, d_o.read}};
  append(torch_backward_keywords, of_states(kTorchGradient));
  append(torch_backward_keywords, torch_keywords);
  torch_keywords.push_back(kOut);
  append(torch_keywords, of_states(kTorchFinal));
  for (const Tensor& tensor : definition.tensors) {
    torch_backward_keywords.push_back({tensor.name, true, &WriteGradient});
  }
  append(torch_backward_keywords, of_states(kTorchInitialGradient));
  DescribeCalls(m);
}

void Bound::DescribeCalls(nb::module_& m) {
  const std::string base = name, ints = ": Ints | None = None, ";
  std::string fields, required, rest;
  size_t index = 0;
  for (const Tensor& tensor : definition.tensors) {
    fields += "d" + std::string(tensor.name) + " ";
    if (!tensor.optional) required += tensor.name + std::string(": Array, ");
    if (index++ == num_positional) rest += "*, ";
    if (tensor.optional) rest += tensor.name + std::string(": Array | None = None, ");
  }
  const bool has_state = definition.has_state();
  if (has_state) {
    fields += "dinitial_state";
  } else {
    fields.pop_back();
  }
  if (index == num_positional) rest += "*, ";
  for (const auto& [setting, value] : settings) rest += SettingText(setting, value);
  const std::string array = states.size() > 1 ? "State" : "Array";
  const std::string initial = has_state ? "initial_state: " + array + " | None = None, " : "";
  const std::string tokens = "lengths" + ints + "starts" + ints + "cu_seqlens" + ints +
                             "reverse: bool = False, ";
  const std::string out = "out: OutArray | None = None, ", threads = "threads: int | None = None";
  const auto forward_of = [&](const std::string& returns, const std::string& result) {
    return "def " + base + "(" + required + rest + initial + returns + tokens + out + threads +
           ") -> " + result;
  };
  const std::string type = GradientsName(base);
  forward_signature =
      forward_of(has_state ? "return_state: typing.Literal[False] = False, " : "", "Result");
  const std::string base_type = type.substr(0, type.size() - std::string_view("Gradients").size());
  const std::string result = states.size() > 1 ? base_type + "State" : "Result";
  state_signature =
      forward_of("return_state: typing.Literal[True], ", "tuple[Result, " + result + "]");
  backward_signature = "def " + op_backward + "(do: Array, " + required + rest +
                       (has_state ? "dstate: " + array + " | None = None, " : "") + initial + tokens +
                       threads + ") -> " + type;
  step_signature = "def " + op_step + "(" + required + "state: " +
                   (states.size() > 1 ? "State, " : "OutArray, ") + rest + out + threads +
                   ") -> Result";
  gradients = NamedTupleType(m, type, fields, GradientsDoc(op_backward));
  if (states.size() > 1) {
    std::string names;
    for (const StateTensor& one : states) names += (names.empty() ? "" : " ") + std::string(one.name);
    state = NamedTupleType(m, result, names, "The state of " + base + " between two calls.");
  }
  WriteTexts(type, fields);
}

namespace {

constexpr Renamed kRenamed[] = {{"o", "out"}, {"d_o", "do"}, {"d_state", "dstate"}};

void CheckRequired(const char* op, const PythonCall& call) {
  for (const Tensor& tensor : call.bound.definition.tensors) {
    if (!tensor.optional && !(call.in.*tensor.input).present()) FailMissing(op, tensor.name);
  }
}

// A new array of a tensor's shape and dtype, of whose last two axes the one is contiguous that
// is so there.
nb::object NewLike(const char* op, const ConstTensorView& x, TensorView& view) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  const int last = x.rank() - 1;
  const bool swapped = last > 1 && x.size(last) > 1 && x.stride(last - 1) == 1 && x.stride(last) != 1;
  if (swapped) std::swap(sizes.end()[-1], sizes.end()[-2]);
  NewArray array(op, x.dtype(), sizes);
  view = array.view;
  if (!swapped) return std::move(array.array);
  std::vector<int64_t> strides(view.strides().begin(), view.strides().end());
  std::swap(sizes.end()[-1], sizes.end()[-2]);
  std::swap(strides.end()[-1], strides.end()[-2]);
  view = TensorView(view.data(), x.dtype(), sizes, strides);
  return array.array.attr("swapaxes")(-1, -2);
}

// One state of a call whose shapes the mechanism has not checked yet: what cannot be known is 0.
nb::object NewState(const char* op, const PythonCall& call, const StateTensor& state, TensorView& view) {
  const Definition& d = call.bound.definition;
  const auto size_of = [&](char letter) -> int64_t {
    if (letter == 'B' && call.options.cu_seqlens.present()) {
      return std::max<int64_t>(call.options.cu_seqlens.num_elements(), 1) - 1;
    }
    for (const Tensor& tensor : d.tensors) {
      const ConstTensorView& t = call.in.*tensor.input;
      const size_t at = t.present() ? AxesOf(tensor, t.rank()).find(letter) : std::string::npos;
      if (at != std::string::npos) return t.size(static_cast<int>(at));
    }
    return 0;
  };
  std::vector<int64_t> sizes;
  for (const char letter : std::string_view(state.axes)) {
    sizes.push_back(letter == '2'   ? 2
                    : letter == 'w' ? std::max<int64_t>(size_of('W'), 1) - 1
                                    : size_of(letter));
  }
  NewArray array(op, StateDType((call.in.*call.bound.first().input).dtype()), sizes);
  view = array.view;
  return std::move(array.array);
}

// All of them, in `views`, as Python has them.
template <auto kMember, class Views>
nb::object NewStates(const char* op, const PythonCall& call, Views& views) {
  nb::list states;
  for (const StateTensor& state : call.bound.states) {
    states.append(NewState(op, call, state, views.*(state.*kMember)));
  }
  return call.bound.states.size() > 1 ? NewNamedTuple(call.bound.state, nb::tuple(states))
                                      : nb::object(states[0]);
}

nb::object OutputOf(const char* op, const PythonCall& call, TensorView& view) {
  if (!call.out.is_valid()) return NewLike(op, call.in.*call.bound.first().input, view);
  view = call.out_view;
  return nb::borrow(call.out);
}

// The call's settings over the defaults, bound.
Functions FunctionsOf(const PythonCall& call) {
  Settings settings = call.settings;
  settings.insert(call.bound.settings.begin(), call.bound.settings.end());
  return call.bound.bind(settings);
}

nb::object RunForward(const Bound& b, PyObject* args, PyObject* kwargs) {
  PythonCall call(b);
  Read<PythonCall>(b.name, b.forward_keywords, b.num_positional, args, kwargs, call);
  CheckRequired(b.name, call);
  Outputs outputs;
  const nb::object o = OutputOf(b.name, call, outputs.o);
  nb::object state;
  if (call.return_state) state = NewStates<&StateTensor::final>(b.name, call, outputs);
  const Functions functions = FunctionsOf(call);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(b.name, kRenamed, [&] { functions.forward(ctx, call.in, call.options, outputs); });
  if (!call.return_state) return o;
  return nb::make_tuple(o, state);
}

nb::object RunBackward(const Bound& b, PyObject* args, PyObject* kwargs) {
  const char* op = b.op_backward.c_str();
  PythonCall call(b);
  Read<PythonCall>(op, b.backward_keywords, b.num_positional + 1, args, kwargs, call);
  if (!call.in.d_o.present()) FailMissing(op, "do");
  CheckRequired(op, call);
  Gradients out;
  nb::list results;
  for (const Tensor& tensor : b.definition.tensors) {
    const ConstTensorView& x = call.in.*tensor.input;
    if (x.present()) {
      results.append(NewLike(op, x, out.*tensor.gradient));
    } else {
      results.append(nb::none());
    }
  }
  const bool has_initial = call.in.initial.present() || call.in.initial_tail.present();
  if (has_initial) {
    results.append(NewStates<&StateTensor::dinitial>(op, call, out));
  } else if (b.definition.has_state()) {
    results.append(nb::none());
  }
  const Functions functions = FunctionsOf(call);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(op, kRenamed, [&] { functions.backward(ctx, call.in, call.options, out); });
  return NewNamedTuple(b.gradients, nb::tuple(results));
}

nb::object RunStep(const Bound& b, PyObject* args, PyObject* kwargs) {
  const char* op = b.op_step.c_str();
  PythonCall call(b);
  const size_t positional = b.num_positional + 1;
  Read<PythonCall>(op, b.step_keywords, positional, args, kwargs, call);
  CheckRequired(op, call);
  const auto is_given = [&](const StateTensor& state) { return (call.state.*state.step).present(); };
  if (std::none_of(b.states.begin(), b.states.end(), is_given)) FailMissing(op, "state");
  TensorView o;
  const nb::object result = OutputOf(op, call, o);
  const Functions functions = FunctionsOf(call);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(op, kRenamed, [&] { functions.step(ctx, call.in, call.state, o); });
  return result;
}

constexpr Renamed kTorchRenamed[] = {{"o", "out"},
                                     {"d_o", "the gradient of o"},
                                     {"d_state", "the gradient of the state"}};

void RunTorch(const Bound& b, PyObject* args) {
  PythonCall call(b);
  call.arrays.AllowTorch();
  Read<PythonCall>(b.name, b.torch_keywords, b.torch_keywords.size(), args, nullptr, call);
  const Functions functions = FunctionsOf(call);
  Context& ctx = TorchContext(call.num_threads);
  Compute(b.name, kTorchRenamed,
          [&] {
            call.finals.o = call.out_view;
            functions.forward(ctx, call.in, call.options, call.finals);
          });
}

void RunTorchBackward(const Bound& b, PyObject* args) {
  PythonCall call(b);
  call.arrays.AllowTorch();
  Read<PythonCall>(b.name, b.torch_backward_keywords, b.torch_backward_keywords.size(), args, nullptr,
             call);
  const Functions functions = FunctionsOf(call);
  Context& ctx = TorchContext(call.num_threads);
  Compute(b.name, kTorchRenamed,
          [&] { functions.backward(ctx, call.in, call.options, call.gradients); });
}

nb::dict RunExplain(const Bound& b, DType dtype, int num_threads, PyObject* kwargs) {
  PythonCall call(b);
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  Read<PythonCall>(b.name, b.forward_keywords, b.num_positional, nullptr, kwargs, call);
  CheckRequired(b.name, call);
  const Context& ctx = ThreadContext(num_threads);
  const Functions functions = FunctionsOf(call);
  Explanation e;
  Compute(b.name, kRenamed, [&] { e = functions.explain(ctx, call.in, call.options); });
  return Described(e.kernel, e.target, e.why, e.flops, e.bytes, e.workspace_bytes, 0, false,
                   call.arrays.copied());
}

// What other layers read instead of a list of their own.
nb::dict DescriptionOf(const Bound& b) {
  nb::dict description, axes, settings;
  nb::list inputs, optional;
  for (const Tensor& tensor : b.definition.tensors) {
    inputs.append(tensor.name);
    axes[tensor.name] = tensor.axes;
    if (tensor.optional) optional.append(tensor.name);
  }
  for (const auto& [name, value] : b.settings) {
    const Word* word = std::get_if<Word>(&value);
    const bool* flag = std::get_if<bool>(&value);
    settings[name.c_str()] = word   ? nb::cast(word->value)
                             : flag ? nb::cast(*flag)
                                    : nb::cast(std::get<double>(value));
  }
  description["inputs"] = inputs;
  description["optional"] = optional;
  description["positional"] = b.num_positional;
  description["axes"] = axes;
  nb::list state_axes;
  for (const StateTensor& state : b.states) state_axes.append(state.axes);
  description["state_axes"] = state_axes;
  description["state_type"] = b.state.is_valid() ? b.state : nb::none();
  description["settings"] = settings;
  return description;
}

}  // namespace

void Bind(nb::module_& m, const Binding& binding) {
  // Lives as long as the module, which is never unloaded.
  const Bound* b = new Bound(m, binding);
  const auto forward = [b](const nb::args& args, const nb::kwargs& kwargs) {
    return RunForward(*b, args.ptr(), kwargs.ptr());
  };
  m.def(b->name, forward, nb::sig(b->forward_signature.c_str()), b->forward_text.c_str());
  const bool has_state = b->definition.has_state();
  if (has_state) {
    m.def(b->name, forward, nb::sig(b->state_signature.c_str()), b->forward_text.c_str());
  }
  m.def(b->op_backward.c_str(),
        [b](const nb::args& args, const nb::kwargs& kwargs) {
          return RunBackward(*b, args.ptr(), kwargs.ptr());
        },
        nb::sig(b->backward_signature.c_str()), b->backward_text.c_str());
  if (has_state) {
    m.def(b->op_step.c_str(),
          [b](const nb::args& args, const nb::kwargs& kwargs) {
            return RunStep(*b, args.ptr(), kwargs.ptr());
          },
          nb::sig(b->step_signature.c_str()), b->step_text.c_str());
  }
  m.def(("_torch_" + std::string(b->name)).c_str(),
        [b](const nb::args& args) { RunTorch(*b, args.ptr()); });
  m.def(("_torch_" + b->op_backward).c_str(),
        [b](const nb::args& args) { RunTorchBackward(*b, args.ptr()); });
  if (!nb::hasattr(m, "_scanning")) m.attr("_scanning") = nb::dict();
  nb::cast<nb::dict>(m.attr("_scanning"))[b->name] = DescriptionOf(*b);
  RegisterExplain(b->name, [b](DType dtype, int num_threads, PyObject* kwargs) {
    return RunExplain(*b, dtype, num_threads, kwargs);
  });
}

}  // namespace heed::scanning

// Python functions of mechanisms on the scan engine.
#include "heed/ops/parts/scanning_py.h"

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

struct Bound;

// A call on its way in.
struct Call {
  explicit Call(const Bound& mechanism) : bound(mechanism) {}

  const Bound& bound;
  Arrays arrays;
  BackwardInputs in;
  Options options;
  Settings settings;
  TensorView state;     // of a step, or the final one of PyTorch's
  Gradients gradients;  // PyTorch's
  nb::handle out;
  TensorView out_view;
  bool return_state = false, describe = false;
  int num_threads = 0;
};

// A mechanism with the tables and texts that its functions need for as long as the module lives.
struct Bound : Binding {
  Bound(nb::module_& m, const Binding& binding);

  std::string op_backward, op_step;
  std::vector<Keyword<Call>> forward_keywords, backward_keywords, step_keywords;
  // Of PyTorch's operators: [incoming gradients,] inputs, settings, options, results.
  std::vector<Keyword<Call>> torch_keywords, torch_backward_keywords;
  size_t num_required = 0;
  std::string forward_signature, state_signature, backward_signature, step_signature;
  std::string forward_text, backward_text, step_text;
  nb::object gradients;  // a type of named tuples

  const Tensor& first() const { return definition.tensors[0]; }
  const Tensor& TensorOf(std::string_view tensor_name) const {
    for (const Tensor& tensor : definition.tensors) {
      if (tensor_name == tensor.name) return tensor;
    }
    throw InternalError("scanning: no tensor " + std::string(tensor_name));
  }

 private:
  void DescribeCalls(nb::module_& m);
  void WriteTexts(const std::string& type, const std::string& fields);
};

void ReadTensor(Call& call, const Argument& a) {
  call.in.*call.bound.TensorOf(a.name).input = call.arrays.ReadInPlace(a, Kind::kFloat);
}
void WriteGradient(Call& call, const Argument& a) {
  call.gradients.*call.bound.TensorOf(a.name).gradient = call.arrays.Write(a, Kind::kFloat);
}

template <auto kField>
void ReadInput(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.ReadInPlace(a, Kind::kFloat);
}

template <ConstTensorView Options::*kField>
void ReadInts(Call& call, const Argument& a) {
  call.options.*kField = call.arrays.ReadList(a, Kind::kInt);
}

void ReadSetting(Call& call, const Argument& a) {
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

void ReadOut(Call& call, const Argument& a) {
  if (call.describe) return;
  call.out = a.value;
  call.out_view = call.arrays.Write(a, Kind::kFloat);
}

void ReadState(Call& call, const Argument& a) {
  call.state = call.arrays.Write(a, Kind::kFloat);
}

constexpr Keyword<Call> kInitial = {"initial_state", true, &ReadInput<&BackwardInputs::initial>};
constexpr Keyword<Call> kOfTokens[] = {
    {"lengths", true, &ReadInts<&Options::lengths>},
    {"starts", true, &ReadInts<&Options::starts>},
    {"cu_seqlens", true, &ReadInts<&Options::cu_seqlens>},
    {"reverse", false, [](Call& c, const Argument& a) { c.options.reverse = ToBool(a); }}};
constexpr Keyword<Call> kReturnState = {
    "return_state", false, [](Call& c, const Argument& a) { c.return_state = ToBool(a); }};
constexpr Keyword<Call> kOut = {"out", true, &ReadOut};
constexpr Keyword<Call> kThreads = {
    "threads", true, [](Call& c, const Argument& a) {
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

Bound::Bound(nb::module_& m, const Binding& binding) : Binding(binding) {
  op_backward = std::string(name) + "_backward";
  op_step = std::string(name) + "_step";
  std::vector<Keyword<Call>> own;
  for (const Tensor& tensor : definition.tensors) {
    own.push_back({tensor.name, tensor.optional, &ReadTensor});
    num_required += tensor.optional ? 0 : 1;
  }
  for (const auto& [setting, value] : settings) own.push_back({setting.c_str(), false, &ReadSetting});

  const auto append = [](std::vector<Keyword<Call>>& to, const auto& from) {
    to.insert(to.end(), std::begin(from), std::end(from));
  };
  const Keyword<Call> d_o = {"do", false, &ReadInput<&BackwardInputs::d_o>};
  const Keyword<Call> d_state = {"dstate", true, &ReadInput<&BackwardInputs::d_final>};
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
                       {"state", false, &ReadState});
  append(step_keywords, std::vector{kOut, kThreads});

  append(torch_keywords, own);
  if (has_state) torch_keywords.push_back(kInitial);
  append(torch_keywords, kOfTokens);
  torch_keywords.push_back(kThreads);
  torch_backward_keywords = {{"the gradient of o", false, d_o.read}};
  if (has_state) {
    torch_backward_keywords.push_back({"the gradient of the state", true, d_state.read});
  }
  append(torch_backward_keywords, torch_keywords);
  torch_keywords.push_back(kOut);
  if (has_state) torch_keywords.push_back({"final_state", true, &ReadState});
  for (const Tensor& tensor : definition.tensors) {
    torch_backward_keywords.push_back({tensor.name, true, &WriteGradient});
  }
  if (has_state) {
    torch_backward_keywords.push_back({"dinitial_state", true, [](Call& c, const Argument& a) {
      c.gradients.dinitial = c.arrays.Write(a, Kind::kFloat);
    }});
  }
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
  const std::string initial = has_state ? "initial_state: Array | None = None, " : "";
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
  state_signature = forward_of("return_state: typing.Literal[True], ", "tuple[Result, Result]");
  backward_signature = "def " + op_backward + "(do: Array, " + required + rest +
                       (has_state ? "dstate: Array | None = None, " : "") + initial + tokens +
                       threads + ") -> " + type;
  step_signature = "def " + op_step + "(" + required + "state: OutArray, " + rest + out + threads +
                   ") -> Result";
  gradients = NamedTupleType(m, type, fields, GradientsDoc(op_backward));
  WriteTexts(type, fields);
}

// Sizes of the examples, by letters of axes.
constexpr AxisSizes kExampleSizes = {.B = 1, .D = 8, .T = 6, .N = 16, .G = 1, .L = 6};

std::string TupleText(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + (sizes.size() == 1 ? ",)" : ")");
}

// What is said of a tensor, of one token of each sequence: without the axis T.
std::string OfOneToken(std::string text) {
  for (const std::string_view axis : {", T", "T, "}) {
    for (size_t at; (at = text.find(axis)) != std::string::npos;) text.erase(at, axis.size());
  }
  return text;
}

void Bound::WriteTexts(const std::string& type, const std::string& fields) {
  std::string lines = "Example:\n\n  >>> import heed, numpy as np\n  >>> rng = np.random.default_rng(0)";
  std::string given, newest;
  for (const Tensor& tensor : definition.tensors) {
    if (tensor.optional) continue;
    // Constants, or the form without groups.
    std::string axes;
    for (const int rank : {3, 2, 1}) {
      if (axes.empty()) axes = AxesOf(tensor, rank);
    }
    const bool negative = tensor.values == Tensor::kRates || tensor.values == Tensor::kDecays;
    const bool normal = tensor.values == Tensor::kNormal;
    lines += std::string("\n  >>> ") + tensor.name + " = " + (negative ? "-" : "") + "rng." +
             (normal ? "standard_normal" : "random") + "(" +
             TupleText(ShapeOf(axes, kExampleSizes)) + ", np.float32)";
    const std::string comma = given.empty() ? "" : ", ";
    given += comma + tensor.name;
    newest += comma + tensor.name +
              (axes.back() == 'T' ? "[..., -1]" : axes.find('T') == 1 ? "[:, -1]" : "");
  }
  const std::vector<int64_t> scanned = ShapeOf(first().axes, kExampleSizes);
  const bool has_state = definition.has_state();
  const std::string call = "\n  >>> o" + std::string(has_state ? ", state" : "") + " = heed." + name +
                           "(" + given + (has_state ? ", return_state=True)" : ")");

  const std::string state_is(has_state ? Find({docs.fields}, "initial") : "");
  std::string state_axes;
  for (const char axis : std::string_view(definition.state_axes)) {
    state_axes += state_axes.empty() ? "" : ", ";
    state_axes += axis;
  }
  const std::string updated =
      "what a call with return_state=True returned, updated in place: [" + state_axes + "]";
  const std::vector<Said> known = {{"initial_state", state_is.c_str()},
                                   {"state", updated.c_str()}};
  const std::string o = "o, in the shape of " + std::string(first().name);
  forward_text = Docstring(
      docs.forward, forward_signature, {known, docs.fields},
      "Any strides are read in place; o lies in memory as " + std::string(first().name) +
          " does. Returns " + o +
          (has_state ? ",\nor (o, state) with return_state=True, as NumPy arrays.\n\n"
                     : ", as a NumPy array.\n\n") +
          lines + call +
          (has_state ? "\n  >>> o.shape, state.shape\n  (" + TupleText(scanned) + ", " +
                           TupleText(ShapeOf(definition.state_axes, kExampleSizes)) + ")"
                     : "\n  >>> o.shape\n  " + TupleText(scanned)));
  backward_text = Docstring(
      docs.backward, backward_signature, {known, docs.fields},
      "Returns the named tuple heed." + type + ": " + fields +
          ", NumPy arrays in the\nshape and dtype of what they are the gradients of; None where "
          "that was not given.\n\n" + lines + "\n  >>> gradients = heed." + op_backward +
          "(np.ones_like(" + first().name + "), " + given + ")\n  >>> gradients.d" +
          first().name + ".shape\n  " + TupleText(scanned));
  if (!has_state) return;
  std::vector<std::string> texts;
  for (const Tensor& tensor : definition.tensors) {
    texts.push_back(OfOneToken(std::string(Find({docs.fields}, tensor.name))));
  }
  std::vector<Said> of_one_token;
  for (size_t i = 0; i < texts.size(); ++i) {
    of_one_token.push_back({definition.tensors[i].name, texts[i].c_str()});
  }
  step_text = Docstring(docs.step, step_signature, {of_one_token, known, docs.fields},
                        "Returns " + o + ".\n\n" + lines + call + "\n  >>> heed." + op_step + "(" +
                            newest + ", state).shape\n  " +
                            TupleText({kExampleSizes.B, kExampleSizes.D}));
}

constexpr Renamed kRenamed[] = {{"o", "out"}, {"d_o", "do"}, {"d_state", "dstate"}};

void CheckRequired(const char* op, const Call& call) {
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

// Of a call whose shapes the mechanism has not checked yet: what cannot be known is 0.
nb::object NewState(const char* op, const Call& call, TensorView& view) {
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
  for (const char letter : std::string_view(d.state_axes)) sizes.push_back(size_of(letter));
  NewArray array(op, StateDType((call.in.*call.bound.first().input).dtype()), sizes);
  view = array.view;
  return std::move(array.array);
}

nb::object OutputOf(const char* op, const Call& call, TensorView& view) {
  if (!call.out.is_valid()) return NewLike(op, call.in.*call.bound.first().input, view);
  view = call.out_view;
  return nb::borrow(call.out);
}

// The call's settings over the defaults, bound.
Functions FunctionsOf(const Call& call) {
  Settings settings = call.settings;
  settings.insert(call.bound.settings.begin(), call.bound.settings.end());
  return call.bound.bind(settings);
}

nb::object RunForward(const Bound& b, PyObject* args, PyObject* kwargs) {
  Call call(b);
  Read<Call>(b.name, b.forward_keywords, b.num_positional, args, kwargs, call);
  CheckRequired(b.name, call);
  Outputs outputs;
  const nb::object o = OutputOf(b.name, call, outputs.o);
  nb::object state;
  if (call.return_state) state = NewState(b.name, call, outputs.final);
  const Functions functions = FunctionsOf(call);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(b.name, kRenamed, [&] { functions.forward(ctx, call.in, call.options, outputs); });
  if (!call.return_state) return o;
  return nb::make_tuple(o, state);
}

nb::object RunBackward(const Bound& b, PyObject* args, PyObject* kwargs) {
  const char* op = b.op_backward.c_str();
  Call call(b);
  Read<Call>(op, b.backward_keywords, b.num_positional + 1, args, kwargs, call);
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
  if (call.in.initial.present()) {
    results.append(NewState(op, call, out.dinitial));
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
  Call call(b);
  const size_t positional = b.num_positional + 1;
  Read<Call>(op, b.step_keywords, positional, args, kwargs, call);
  CheckRequired(op, call);
  if (!call.state.present()) FailMissing(op, "state");
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
  Call call(b);
  call.arrays.AllowTorch();
  Read<Call>(b.name, b.torch_keywords, b.torch_keywords.size(), args, nullptr, call);
  const Functions functions = FunctionsOf(call);
  Context& ctx = TorchContext(call.num_threads);
  Compute(b.name, kTorchRenamed,
          [&] { functions.forward(ctx, call.in, call.options, {call.out_view, call.state}); });
}

void RunTorchBackward(const Bound& b, PyObject* args) {
  Call call(b);
  call.arrays.AllowTorch();
  Read<Call>(b.name, b.torch_backward_keywords, b.torch_backward_keywords.size(), args, nullptr,
             call);
  const Functions functions = FunctionsOf(call);
  Context& ctx = TorchContext(call.num_threads);
  Compute(b.name, kTorchRenamed,
          [&] { functions.backward(ctx, call.in, call.options, call.gradients); });
}

nb::dict RunExplain(const Bound& b, DType dtype, int num_threads, PyObject* kwargs) {
  Call call(b);
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  Read<Call>(b.name, b.forward_keywords, b.num_positional, nullptr, kwargs, call);
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
  description["state_axes"] = b.definition.state_axes;
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

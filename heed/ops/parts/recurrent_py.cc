// Python functions of recurrent mechanisms.
#include "heed/ops/parts/recurrent_py.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/arguments.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::recurrent {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

// A call on its way in.
struct Call {
  Arrays arrays;
  BackwardInputs in;
  Options options;
  State state;  // of a step, or the final one of PyTorch's
  Gradients gradients;  // PyTorch's
  nb::handle out;
  TensorView out_view;
  bool return_state = false, describe = false;
  int num_threads = 0;
  const std::vector<SettingSpec>* specs = nullptr;
  Settings settings;
};

constexpr Renamed kRenamed[] = {{"o", "out"}, {"d_o", "do"}, {"d_state", "dstate"}};

template <ConstTensorView Inputs::*kField>
void ReadInput(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}

void ReadDecay(Call& call, const Argument& a) {  // one number per row has no rows
  call.in.log_decay = call.arrays.ReadList(a, Kind::kFloat);
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

void ReadSetting(Call& call, const Argument& a) {
  const auto spec = std::ranges::find_if(*call.specs, [&](const SettingSpec& s) {
    return std::string_view(s.name) == a.name;
  });
  Setting& value = call.settings[a.name];
  if (std::holds_alternative<bool>(spec->value)) {
    value = ToBool(a);
  } else if (std::holds_alternative<double>(spec->value)) {
    value = ToFinite(a);
  } else {
    std::string expected;
    for (const std::string& choice : spec->choices) {
      expected += (expected.empty() ? "'" : ", '") + choice + "'";
    }
    const std::string text = ToString(a, expected.c_str());
    if (std::ranges::find(spec->choices, text) == spec->choices.end()) {
      Fail(a, "one of " + expected);
    }
    value = text;
  }
}

// An array, or a pair (S, z) of them.
template <class Read>
auto ReadState(const Argument& a, const Read& read) {
  using View = decltype(read(a));
  struct {
    View S, z;
  } state;
  if (!PyTuple_Check(a.value.ptr()) && !PyList_Check(a.value.ptr())) {
    state.S = read(a);
    return state;
  }
  if (PyObject_Size(a.value.ptr()) != 2) Fail(a, "an array, or a pair of arrays (S, z)");
  const nb::object S = a.value[0], z = a.value[1];
  state.S = read({a.operation, a.name, S});
  state.z = read({a.operation, a.name, z});
  return state;
}

ConstState ReadableState(Call& call, const Argument& a) {
  if (call.describe && PyTuple_Check(a.value.ptr()) && PyObject_Size(a.value.ptr()) > 0 &&
      PyLong_Check(nb::object(a.value[0]).ptr())) {
    return {call.arrays.Read(a, Kind::kFloat), {}};  // explain is given a shape
  }
  const auto state =
      ReadState(a, [&](const Argument& x) { return call.arrays.Read(x, Kind::kFloat); });
  return {state.S, state.z};
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
      c.state = {state.S, state.z};
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
template <TensorView State::*kField>
void WriteInitialGradient(Call& call, const Argument& a) {
  call.gradients.dinitial.*kField = call.arrays.Write(a, Kind::kFloat);
}
constexpr Keyword<Call> kTorchInitial[] = {
    {"initial_state", true, &ReadInitial<&ConstState::S>},
    {"initial_state.z", true, &ReadInitial<&ConstState::z>}};
constexpr Keyword<Call> kTorchFinal[] = {
    {"out", false, &ReadOut},
    {"final_state", true, &WriteFinal<&State::S>},
    {"final_state.z", true, &WriteFinal<&State::z>}};
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

// A mechanism with the tables and texts that its functions need for as long as the module
// lives.
struct Bound : Binding {
  explicit Bound(const Binding& binding) : Binding(binding) {
    for (const std::string& input : inputs) {
      const bool optional = input == "log_decay" && decay_optional;
      positional.push_back({input.c_str(), optional, ReaderOf(input)});
    }
    // A decay that may be left out is a keyword.
    num_positional = inputs.size() - (decay_optional ? 1 : 0);
    forward_keywords = backward_keywords = step_keywords = positional;
    for (const SettingSpec& spec : settings) {
      const Keyword<Call> keyword = {spec.name, false, &ReadSetting};
      for (auto* keywords : {&forward_keywords, &backward_keywords, &step_keywords}) {
        keywords->push_back(keyword);
      }
    }
    for (const Keyword<Call>& option : kOptions) {
      const std::string_view option_name = option.name;
      forward_keywords.push_back(option);
      if (option_name != "return_state" && option_name != "out") {
        backward_keywords.push_back(option);
      }
    }
    backward_keywords.insert(backward_keywords.begin(), {"do", false, &ReadGradientOfO});
    backward_keywords.push_back(kGradientOfState);
    step_keywords.insert(
        step_keywords.begin() + static_cast<int64_t>(num_positional), kState);
    for (const char* option : {"scale", "out", "threads"}) {
      step_keywords.push_back(Option(option));
    }
    DescribeTorch();
    Describe();
  }

  std::string op_backward, op_step;
  std::vector<Keyword<Call>> positional, forward_keywords, backward_keywords,
      step_keywords;
  // Of PyTorch's operators: [incoming gradients,] inputs, settings, options, results.
  std::vector<Keyword<Call>> torch_keywords, torch_backward_keywords;
  size_t num_positional;
  std::string forward_signature, state_signature, backward_signature, step_signature;
  std::string forward_text, backward_text, step_text;
  nb::object gradients, state;  // named tuples

 private:
  decltype(Keyword<Call>::read) ReaderOf(const std::string& input) const {
    if (input == "log_decay") return &ReadDecay;
    if (input == value_name) return &ReadInput<&Inputs::v>;
    return input == "q" ? &ReadInput<&Inputs::q> : &ReadInput<&Inputs::k>;
  }

  void DescribeTorch() {
    const auto append = [](auto& to, const auto& from) {
      to.insert(to.end(), std::begin(from), std::end(from));
    };
    append(torch_keywords, positional);
    for (const SettingSpec& spec : settings) {
      torch_keywords.push_back({spec.name, false, &ReadSetting});
    }
    torch_keywords.push_back(Option("scale"));
    append(torch_keywords, kTorchInitial);
    for (const char* option : {"lengths", "starts", "cu_seqlens", "reverse", "threads"}) {
      torch_keywords.push_back(Option(option));
    }
    append(torch_backward_keywords, kTorchIncoming);
    append(torch_backward_keywords, torch_keywords);
    append(torch_keywords, kTorchFinal);
    for (const std::string& input : inputs) {
      torch_backward_keywords.push_back({"a gradient", true, WriterOf(input)});
    }
    append(torch_backward_keywords, kTorchInitialGradients);
  }

  decltype(Keyword<Call>::read) WriterOf(const std::string& input) const {
    if (input == "log_decay") return &WriteGradient<&Gradients::dlog_decay>;
    if (input == value_name) return &WriteGradient<&Gradients::dv>;
    return input == "q" ? &WriteGradient<&Gradients::dq> : &WriteGradient<&Gradients::dk>;
  }

  static nb::object NamedTuple(const std::string& type, const std::string& fields) {
    nb::object result =
        nb::module_::import_("collections").attr("namedtuple")(type, fields);
    result.attr("__module__") = "heed";
    return result;
  }

  static std::string Signature(const SettingSpec& spec) {
    const std::string name = spec.name;
    if (const bool* flag = std::get_if<bool>(&spec.value)) {
      return name + ": bool = " + (*flag ? "True, " : "False, ");
    }
    if (const double* number = std::get_if<double>(&spec.value)) {
      return name + ": float = " + nb::cast<std::string>(nb::repr(nb::float_(*number))) +
             ", ";
    }
    std::string choices;
    for (const std::string& choice : spec.choices) {
      choices += (choices.empty() ? "'" : ", '") + choice + "'";
    }
    return name + ": typing.Literal[" + choices + "] = '" +
           std::get<std::string>(spec.value) + "', ";
  }

  void Describe() {
    const std::string array = ": heed._typing.Array", ints = ": heed._typing.Ints | None = None";
    const std::string base = name;
    std::string arguments, decay;
    for (size_t i = 0; i < num_positional; ++i) arguments += inputs[i] + array + ", ";
    if (decay_optional) decay = "log_decay: heed._typing.Floats | None = None, ";
    for (const SettingSpec& spec : settings) decay += Signature(spec);
    const std::string scale = "scale: float | None = None, ";
    const std::string tokens = "lengths" + ints + ", starts" + ints + ", cu_seqlens" + ints +
                               ", reverse: bool = False, ";
    const std::string initial = "initial_state: heed._typing.State | None = None, ";
    const std::string threads = "threads: int | None = None";
    const std::string out = "out: heed._typing.OutArray | None = None, ";
    const auto forward_of = [&](const std::string& returns, const std::string& result) {
      return "def " + base + "(" + arguments + "*, " + decay + scale + initial +
             "return_state: " + returns + ", " + tokens + out + threads + ") -> " + result;
    };
    forward_signature =
        forward_of("typing.Literal[False] = False", "heed._typing.Result");
    state_signature = forward_of("typing.Literal[True]",
                                 "tuple[heed._typing.Result, heed._typing.StateResult]");
    backward_signature = "def " + base + "_backward(do" + array + ", " + arguments + "*, " +
                         decay + scale + initial + tokens + threads +
                         ", dstate: heed._typing.State | None = None) -> "
                         "tuple[heed._typing.StateResult | None, ...]";
    step_signature = "def " + base + "_step(" + arguments + "state: heed._typing.OutArray, *, " +
                     decay + scale + out + threads + ") -> heed._typing.Result";

    std::string fields;
    for (const std::string& input : inputs) {
      // k = 1 - exp(log_decay) has no gradient of its own.
      fields += "d" + input + " ";
    }
    fields += "dinitial_state";
    std::string type;  // "simple_gla" -> "SimpleGlaGradients"
    for (size_t i = 0; i < base.size(); ++i) {
      if (base[i] == '_') continue;
      const bool capital = i == 0 || base[i - 1] == '_';
      type += capital ? static_cast<char>(base[i] - 'a' + 'A') : base[i];
    }
    gradients = NamedTuple(type + "Gradients", fields);
    state = NamedTuple(type + "State", "S z");

    op_backward = base + "_backward";
    op_step = base + "_step";
    forward_text = std::string(forward_doc) +
                   R"(

In Python. q, k, v and log_decay as above, [B, T, H, D]; options are keywords. An array
whose last axis is not contiguous is copied. initial_state is the state before the first
token, float32 (float64 for float64); with return_state=True the result is (o, state), the
state after the last token. lengths and starts are ints [B]: tokens starts[b] <= t <
lengths[b] count, outputs elsewhere are 0. With cu_seqlens, ints [N + 1], B is 1 and there
are N sequences one after another, with one state each. reverse=True runs from the last
token to the first. A state that has a normaliser is a named tuple (S, z).)";
    backward_text = std::string(backward_doc) + R"(

In Python. Returns the named tuple )" + type + "Gradients: " + fields + R"(,
NumPy arrays in the shape and dtype of what they are the gradients of; None where that was
not given. do is the gradient of o, dstate that of the final state.)";
    step_text = std::string(step_doc) + R"(

In Python. Inputs are those of one token, [B, H, D]; state is the array that a call with
return_state=True returned, updated in place. Returns o, [B, HV, V].)";
  }
};

std::vector<int64_t> Sizes(const ConstTensorView& t) {
  return {t.sizes().begin(), t.sizes().end()};
}

// [N, HV, K, V] of a call whose ranks have been looked at.
std::vector<int64_t> StateSizes(const Call& call, const Functions& functions) {
  const int64_t K = call.in.q.size(3);
  const int64_t sequences = call.options.cu_seqlens.present()
                                ? std::max<int64_t>(call.options.cu_seqlens.num_elements(), 1) - 1
                                : call.in.q.size(0);
  return {sequences, call.in.v.size(2), functions.features ? functions.features(K) : K,
          call.in.v.size(3)};
}

DType StateDType(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

void CheckForResults(const Bound& b, const char* op, const Call& call, int rank) {
  const auto check = [&](const char* name, const ConstTensorView& x) {
    if (!x.present()) FailMissing(op, name);
    if (x.rank() != rank) {
      Fail(op, name, "has shape " + x.ShapeString(),
           rank == 4 ? "[B, T, H, D]" : "one token of each sequence: [B, H, D]");
    }
  };
  check("q", call.in.q);
  check(b.value_name, call.in.v);
  if (!IsFloat(call.in.q.dtype())) {
    Fail(op, "q", std::string("has dtype ") + Name(call.in.q.dtype()),
         "f64, f32, bf16 or f16");
  }
  for (const std::string& input : b.inputs) {
    if (input == "k" && !call.in.k.present()) FailMissing(op, "k");
    if (input == "log_decay" && !b.decay_optional && !call.in.log_decay.present()) {
      FailMissing(op, "log_decay");
    }
  }
}

nb::object OutputArray(const char* op, Call& call, const std::vector<int64_t>& sizes,
                       TensorView& view) {
  if (call.out.is_valid()) {
    view = call.out_view;
    return nb::borrow(call.out);
  }
  NewArray array(op, call.in.q.dtype(), sizes);
  view = array.view;
  return std::move(array.array);
}

// The call's settings over the defaults, bound.
Functions BoundFunctions(const Bound& b, Call& call) {
  for (const SettingSpec& spec : b.settings) call.settings.try_emplace(spec.name, spec.value);
  return b.bind(call.settings);
}

// New arrays for a state: an array, or a named tuple.
nb::object NewState(const Bound& b, const char* op, const Call& call,
                    const Functions& functions, State& state) {
  const DType dtype = StateDType(call.in.q.dtype());
  std::vector<int64_t> sizes = StateSizes(call, functions);
  NewArray S(op, dtype, sizes);
  state.S = S.view;
  if (!functions.normalizer) return std::move(S.array);
  sizes.pop_back();
  NewArray z(op, dtype, sizes);
  state.z = z.view;
  return b.state(S.array, z.array);
}

nb::object RunForward(const Bound& b, PyObject* args, PyObject* kwargs) {
  Call call;
  call.specs = &b.settings;
  Read<Call>(b.name, b.forward_keywords, b.num_positional, args, kwargs, call);
  CheckForResults(b, b.name, call, 4);
  Outputs outputs;
  const nb::object o = OutputArray(b.name, call, Sizes(call.in.v), outputs.o);
  const Functions functions = BoundFunctions(b, call);
  nb::object state;
  if (call.return_state) {
    state = NewState(b, b.name, call, functions, outputs.final);
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(b.name, kRenamed,
          [&] { functions.forward(ctx, call.in, call.options, outputs); });
  if (!call.return_state) return o;
  return nb::make_tuple(o, state);
}

nb::object RunBackward(const Bound& b, PyObject* args, PyObject* kwargs) {
  const char* op = b.op_backward.c_str();
  Call call;
  call.specs = &b.settings;
  Read<Call>(op, b.backward_keywords, b.num_positional + 1, args, kwargs, call);
  if (!call.in.d_o.present()) FailMissing(op, "do");
  CheckForResults(b, op, call, 4);
  Gradients out;
  nb::list results;
  const auto gradient_of = [&](const ConstTensorView& x, TensorView& view) {
    if (!x.present()) return results.append(nb::none());
    NewArray array(op, x.dtype(), x.sizes());
    view = array.view;
    results.append(array.array);
  };
  for (const std::string& input : b.inputs) {
    if (input == "q") gradient_of(call.in.q, out.dq);
    if (input == "k") gradient_of(call.in.k, out.dk);
    if (input == b.value_name) gradient_of(call.in.v, out.dv);
    if (input == "log_decay") gradient_of(call.in.log_decay, out.dlog_decay);
  }
  const Functions functions = BoundFunctions(b, call);
  if (call.in.initial.S.present()) {
    results.append(NewState(b, op, call, functions, out.dinitial));
  } else {
    results.append(nb::none());
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(op, kRenamed, [&] { functions.backward(ctx, call.in, call.options, out); });
  return b.gradients(*nb::tuple(results));
}

nb::object RunStep(const Bound& b, PyObject* args, PyObject* kwargs) {
  const char* op = b.op_step.c_str();
  Call call;
  call.specs = &b.settings;
  Read<Call>(op, b.step_keywords, b.num_positional + 1, args, kwargs, call);
  CheckForResults(b, op, call, 3);
  if (!call.state.S.present()) FailMissing(op, "state");
  TensorView o;
  const nb::object result = OutputArray(op, call, Sizes(call.in.v), o);
  const Functions functions = BoundFunctions(b, call);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(op, kRenamed, [&] {
    functions.step(ctx, {call.in.q, call.in.k, call.in.v, call.in.log_decay},
                   call.options, call.state, o);
  });
  return result;
}

constexpr Renamed kTorchRenamed[] = {{"o", "out"},
                                     {"d_o", "the gradient of o"},
                                     {"d_state", "the gradient of the state"}};

void RunTorch(const Bound& b, PyObject* args) {
  Call call;
  call.specs = &b.settings;
  call.arrays.AllowTorch();
  Read<Call>(b.name, b.torch_keywords, b.torch_keywords.size(), args, nullptr, call);
  const Functions functions = BoundFunctions(b, call);
  Context& ctx = TorchContext(call.num_threads);
  Compute(b.name, kTorchRenamed, [&] {
    functions.forward(ctx, call.in, call.options, {call.out_view, call.state});
  });
}

void RunTorchBackward(const Bound& b, PyObject* args) {
  Call call;
  call.specs = &b.settings;
  call.arrays.AllowTorch();
  Read<Call>(b.name, b.torch_backward_keywords, b.torch_backward_keywords.size(), args,
             nullptr, call);
  const Functions functions = BoundFunctions(b, call);
  Context& ctx = TorchContext(call.num_threads);
  Compute(b.name, kTorchRenamed,
          [&] { functions.backward(ctx, call.in, call.options, call.gradients); });
}

nb::dict RunExplain(const Bound& b, DType dtype, int num_threads, PyObject* kwargs) {
  Call call;
  call.specs = &b.settings;
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  Read<Call>(b.name, b.forward_keywords, b.num_positional, nullptr, kwargs, call);
  CheckForResults(b, b.name, call, 4);
  const Context& ctx = ThreadContext(num_threads);
  Explanation e;
  const Functions functions = BoundFunctions(b, call);
  Compute(b.name, kRenamed, [&] { e = functions.explain(ctx, call.in, call.options); });
  return Described(e.kernel, e.target, e.why, e.flops, e.bytes, e.workspace_bytes, 0,
                   false, call.arrays.copied());
}

}  // namespace

void Bind(nb::module_& m, const Binding& binding) {
  // Lives as long as the module, which is never unloaded.
  const Bound* b = new Bound(binding);
  m.def(b->name,
        [b](const nb::args& args, const nb::kwargs& kwargs) {
          return RunForward(*b, args.ptr(), kwargs.ptr());
        },
        nb::sig(b->forward_signature.c_str()), b->forward_text.c_str());
  m.def(b->name,
        [b](const nb::args& args, const nb::kwargs& kwargs) {
          return RunForward(*b, args.ptr(), kwargs.ptr());
        },
        nb::sig(b->state_signature.c_str()));
  m.def(b->op_backward.c_str(),
        [b](const nb::args& args, const nb::kwargs& kwargs) {
          return RunBackward(*b, args.ptr(), kwargs.ptr());
        },
        nb::sig(b->backward_signature.c_str()), b->backward_text.c_str());
  m.def(b->op_step.c_str(),
        [b](const nb::args& args, const nb::kwargs& kwargs) {
          return RunStep(*b, args.ptr(), kwargs.ptr());
        },
        nb::sig(b->step_signature.c_str()), b->step_text.c_str());
  // What other layers read instead of a list of their own.
  if (!nb::hasattr(m, "_recurrent")) m.attr("_recurrent") = nb::dict();
  nb::list inputs;
  for (const std::string& input : b->inputs) inputs.append(input);
  nb::dict settings;
  for (const SettingSpec& spec : b->settings) {
    std::visit([&](const auto& value) { settings[spec.name] = value; }, spec.value);
  }
  nb::dict description;
  description["inputs"] = inputs;
  description["settings"] = settings;
  description["decay_optional"] = b->decay_optional;
  description["features"] = nb::cpp_function([b](int64_t key_size) {
    Call defaults;
    const Functions functions = BoundFunctions(*b, defaults);
    return functions.features ? functions.features(key_size) : key_size;
  });
  nb::cast<nb::dict>(m.attr("_recurrent"))[b->name] = description;
  m.def(("_torch_" + std::string(b->name)).c_str(),
        [b](const nb::args& args) { RunTorch(*b, args.ptr()); });
  m.def(("_torch_" + b->op_backward).c_str(),
        [b](const nb::args& args) { RunTorchBackward(*b, args.ptr()); });
  RegisterExplain(b->name, [b](DType dtype, int num_threads, PyObject* kwargs) {
    return RunExplain(*b, dtype, num_threads, kwargs);
  });
}

}  // namespace heed::recurrent

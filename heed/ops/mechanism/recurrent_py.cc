// Python functions of recurrent mechanisms.
#include "heed/ops/mechanism/recurrent_py.h"

#include <nanobind/stl/pair.h>  // IWYU pragma: keep

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "heed/ops/mechanism/recurrent_bound_py.h"
#include "python/arguments.h"
#include "python/layout.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::recurrent {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr Renamed kRenamed[] = {{"o", "out"}, {"d_o", "do"}, {"d_state", "dstate"}};

// Like values but for an axis of steps, with one of tokens or without.
std::vector<int64_t> OutputSizes(const Bound& b, const Call& call, bool tokens) {
  std::vector<int64_t> sizes(call.in.v.sizes().begin(), call.in.v.sizes().end());
  const size_t rank = (b.channels ? 2 : 3) + (tokens ? 1 : 0);
  if (sizes.size() > rank) sizes.erase(sizes.begin() + static_cast<int64_t>(rank) - 2);
  return sizes;
}

// [N, HV, K, V] of a call whose ranks have been looked at.
std::vector<int64_t> StateSizes(const Call& call, const Functions& functions) {
  const int64_t K = KeySize(call.in);
  const int64_t sequences = call.options.cu_seqlens.present()
                                ? std::max<int64_t>(call.options.cu_seqlens.num_elements(), 1) - 1
                                : call.in.q.size(0);
  const int64_t F = call.in.projection.present() ? call.in.projection.size(0)
                    : functions.features         ? functions.features(K)
                                                 : K;
  std::vector<int64_t> sizes = {sequences, ValueHeads(call.in), F, ValueSize(call.in)};
  if (functions.value_first) std::swap(sizes[2], sizes[3]);
  return sizes;
}

DType StateDType(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

ConstTensorView InputOf(const Call& call, const Input& input) {
  if (input.tensor != nullptr) return call.in.*input.tensor->input;
  const auto found = call.in.others.find(input.name);
  return found == call.in.others.end() ? ConstTensorView() : found->second;
}

void CheckForResults(const Bound& b, const char* op, const Call& call, bool tokens) {
  const auto check = [&](const char* name, const ConstTensorView& x, bool steps = false) {
    if (!x.present()) FailMissing(op, name);
    const int of_token = b.channels ? 1 : steps ? 3 : 2;
    if (x.rank() != of_token + (tokens ? 2 : 1)) {
      const std::string axes = b.channels ? "C]" : steps ? "n, H, D]" : "H, D]";
      Fail(op, name, "has shape " + x.ShapeString(),
           (tokens ? "[B, T, " : "one token of each sequence: [B, ") + axes);
    }
  };
  for (const Input& input : b.inputs) {
    if (input.role == Input::kQuery) {
      check(input.name.c_str(), call.in.q);
      if (!IsFloat(call.in.q.dtype())) {
        Fail(op, input.name.c_str(), std::string("has dtype ") + Name(call.in.q.dtype()),
             "f64, f32, bf16 or f16");
      }
    }
    if (input.role == Input::kValue) check(input.name.c_str(), call.in.v, b.several_writes);
    if (input.role == Input::kProjection && call.in.projection.present() &&
        call.in.projection.rank() != 2) {
      Fail(op, input.name.c_str(), "has shape " + call.in.projection.ShapeString(), "[M, K]");
    }
    if (!input.optional && !input.nullable && !InputOf(call, input).present()) {
      FailMissing(op, input.name.c_str());
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

// A factor given for its logarithm is positive, which counts as 0: results that look right, of a
// mechanism that forgets nothing. Looked for in a few numbers of each call, until it is found;
// set_checks looks at all.
void WarnOfPositiveDecays(const Bound& b, const char* op, const Call& call) {
  static std::atomic<bool> warned = false;
  constexpr int64_t kMost = 64;
  for (const Input& input : b.inputs) {
    if (input.tensor == nullptr || input.tensor->values != Tensor::kDecays) continue;
    const ConstTensorView& x = InputOf(call, input);
    if (warned || !x.present() || x.data() == nullptr || !IsFloat(x.dtype())) continue;
    const int64_t looked_at = std::min(kMost, x.num_elements());
    int64_t positive = 0;
    for (int64_t i = 0; i < looked_at; ++i) {
      int64_t rest = x.num_elements() / looked_at * i, at = 0;
      for (int axis = x.rank(); axis-- > 0; rest /= x.size(axis)) {
        at += rest % x.size(axis) * x.stride(axis);
      }
      positive += LoadAsDouble(x.dtype(), x.data(), at) > 0 ? 1 : 0;
    }
    if (positive == 0 || warned.exchange(true)) continue;
    const std::string text = std::string(op) + ": " + input.name + ": of " +
                             std::to_string(looked_at) + " numbers that were looked at " +
                             std::to_string(positive) +
                             " are positive and count as 0, expected natural logarithms of decay "
                             "factors; heed.set_checks(True) refuses them";
    if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) != 0) throw nb::python_error();
  }
}

// What the call looks like although nothing is wrong with it for sure.
void Warn(const Bound& b, const Call& call) {
  WarnOfPositiveDecays(b, b.name, call);
  // With a state, heads in another place are refused; so short a part of a text is usual.
  if (call.in.initial.S.present()) return;
  WarnOfHeadsBeforeTokens(b.name, call.in.q, call.in.k, call.in.v);
}

// The call's settings over the defaults, bound.
Functions BoundFunctions(const Bound& b, Call& call) {
  for (const SettingSpec& spec : b.settings) call.settings.try_emplace(spec.name, spec.value);
  return b.bind(call.settings);
}

// New arrays for a state: an array, or a named tuple.
nb::object NewState(const Bound& b, const char* op, const Call& call,
                    const Functions& functions, bool with_maximum, State& state) {
  const DType dtype = StateDType(call.in.q.dtype());
  std::vector<int64_t> sizes = StateSizes(call, functions);
  if (b.channels) sizes.resize(2);
  NewArray S(op, dtype, sizes);
  state.S = S.view;
  if (!functions.normalizer) return std::move(S.array);
  if (!b.channels) sizes.pop_back();
  NewArray z(op, dtype, sizes);
  state.z = z.view;
  if (!b.has_maximum) return NewNamedTuple(b.state, nb::make_tuple(S.array, z.array));
  if (!with_maximum) {
    return NewNamedTuple(b.state, nb::make_tuple(S.array, z.array, nb::none()));
  }
  if (!b.channels) sizes.pop_back();
  NewArray m(op, dtype, sizes);
  state.m = m.view;
  return NewNamedTuple(b.state, nb::make_tuple(S.array, z.array, m.array));
}

nb::object RunForward(const Bound& b, PyObject* args, PyObject* kwargs) {
  Call call;
  call.specs = &b.settings;
  Read<Call>(b.name, b.forward_keywords, b.num_positional, args, kwargs, call);
  CheckForResults(b, b.name, call, true);
  Warn(b, call);
  Outputs outputs;
  const nb::object o = OutputArray(b.name, call, OutputSizes(b, call, true), outputs.o);
  const Functions functions = BoundFunctions(b, call);
  nb::object state;
  if (call.return_state) {
    state = NewState(b, b.name, call, functions, true, outputs.final);
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(b.name, kRenamed,
          [&] { functions.forward(ctx, call.in, call.options, outputs); });
  if (!call.return_state) return o;
  return nb::make_tuple(o, state);
}

TensorView& GradientOf(Results& out, const Input& input) {
  return input.tensor != nullptr ? out.*input.tensor->gradient : out.others[input.name];
}

nb::object RunBackward(const Bound& b, PyObject* args, PyObject* kwargs) {
  const char* op = b.op_backward.c_str();
  Call call;
  call.specs = &b.settings;
  Read<Call>(op, b.backward_keywords, b.num_positional + 1, args, kwargs, call);
  if (!call.in.d_o.present()) FailMissing(op, "do");
  CheckForResults(b, op, call, true);
  Results out;
  nb::list results;
  const auto gradient_of = [&](const ConstTensorView& x, TensorView& view) {
    if (!x.present()) return results.append(nb::none());
    NewArray array(op, x.dtype(), x.sizes());
    view = array.view;
    results.append(array.array);
  };
  for (const Input& input : b.inputs) {
    if (input.role == Input::kMask) continue;
    gradient_of(InputOf(call, input), GradientOf(out, input));
  }
  const Functions functions = BoundFunctions(b, call);
  if (!b.has_state) {
    // the named tuple has no place for it
  } else if (call.in.initial.S.present()) {
    results.append(NewState(b, op, call, functions, false, out.dinitial));
  } else {
    results.append(nb::none());
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(op, kRenamed, [&] { functions.backward(ctx, call.in, call.options, out); });
  return NewNamedTuple(b.gradients, nb::tuple(results));
}

nb::object RunStep(const Bound& b, PyObject* args, PyObject* kwargs) {
  const char* op = b.op_step.c_str();
  Call call;
  call.specs = &b.settings;
  Read<Call>(op, b.step_keywords, b.num_positional + 1, args, kwargs, call);
  CheckForResults(b, op, call, false);
  if (!call.state.S.present()) FailMissing(op, "state");
  WarnOfPositiveDecays(b, op, call);
  TensorView o;
  const nb::object result = OutputArray(op, call, OutputSizes(b, call, false), o);
  const Functions functions = BoundFunctions(b, call);
  Context& ctx = ThreadContext(call.num_threads);
  StepArguments in = {{}, call.in.others};
  for (const Input& input : b.inputs) {
    if (input.tensor != nullptr) in.*input.tensor->step = call.in.*input.tensor->input;
  }
  Compute(op, kRenamed, [&] { functions.step(ctx, in, call.options, call.state, o); });
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
  Warn(b, call);
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
  CheckForResults(b, b.name, call, true);
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
  const Bound* b = new Bound(m, binding);
  m.def(b->name,
        [b](const nb::args& args, const nb::kwargs& kwargs) {
          return RunForward(*b, args.ptr(), kwargs.ptr());
        },
        nb::sig(b->forward_signature.c_str()), b->forward_text.c_str());
  m.def(b->op_backward.c_str(),
        [b](const nb::args& args, const nb::kwargs& kwargs) {
          return RunBackward(*b, args.ptr(), kwargs.ptr());
        },
        nb::sig(b->backward_signature.c_str()), b->backward_text.c_str());
  if (b->has_state) {
    m.def(b->name,
          [b](const nb::args& args, const nb::kwargs& kwargs) {
            return RunForward(*b, args.ptr(), kwargs.ptr());
          },
          nb::sig(b->state_signature.c_str()), b->forward_text.c_str());
    m.def(b->op_step.c_str(),
          [b](const nb::args& args, const nb::kwargs& kwargs) {
            return RunStep(*b, args.ptr(), kwargs.ptr());
          },
          nb::sig(b->step_signature.c_str()), b->step_text.c_str());
  }
  // What other layers read instead of a list of their own.
  if (!nb::hasattr(m, "_recurrent")) m.attr("_recurrent") = nb::dict();
  nb::dict description;
  nb::list inputs;
  nb::list optional, nullable, rows;  // rows: of one dtype
  for (const Input& input : b->inputs) {
    inputs.append(input.name);
    if (input.optional) optional.append(input.name);
    if (input.nullable) nullable.append(input.name);
    if (input.role == Input::kOther ||
        (input.tensor != nullptr && input.tensor->type == Tensor::kSame)) {
      rows.append(input.name);
    }
    if (input.role == Input::kQuery) description["query"] = input.name;
    if (input.role == Input::kKey) description["key"] = input.name;
    if (input.role == Input::kValue) description["value"] = input.name;
  }
  nb::dict settings;
  for (const SettingSpec& spec : b->settings) {
    std::visit([&](const auto& value) { settings[spec.name] = nb::cast(value); }, spec.value);
  }
  description["inputs"] = inputs;
  description["optional"] = optional;
  description["nullable"] = nullable;
  description["several_writes"] = b->several_writes;
  description["channels"] = b->channels;
  description["rows"] = rows;
  description["has_state"] = b->has_state;
  description["settings"] = settings;
  description["features"] = nb::cpp_function([b](int64_t key_size) {
    Call defaults;
    const Functions functions = BoundFunctions(*b, defaults);
    return functions.features ? functions.features(key_size) : key_size;
  });
  Call defaults;
  description["value_first"] = BoundFunctions(*b, defaults).value_first;
  description["state"] = nb::str(b->has_maximum ? b->state_names : "S z").attr("split")();
  description["state_type"] = b->state.is_valid() ? b->state : nb::none();
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

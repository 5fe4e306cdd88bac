// The Python functions of mechanisms.
#include <nanobind/stl/pair.h>  // IWYU pragma: keep

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "python/mechanism/bound.h"
#include "python/arguments.h"
#include "python/communicator.h"
#include "python/layout.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/torch_host.h"

namespace heed::binding {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

void CheckRequired(const char* op, const PythonCall& call) {
  for (size_t i = 0; i < call.bound.tensors.size(); ++i) {
    const Parameter& tensor = call.bound.tensors[i];
    if (!tensor.optional && !call.in[i].present()) FailMissing(op, tensor.name.c_str());
  }
}

// Checks the rank of a step's inputs. The mechanism checks the rest, on inputs with a token axis added.
void CheckOneToken(const char* op, const PythonCall& call) {
  for (size_t i = 0; i < call.bound.tensors.size(); ++i) {
    const ConstTensorView& t = call.in[i];
    if (!t.present() || (call.bound.ranks_of_step[i] >> t.rank() & 1) != 0) continue;
    Fail(op, call.bound.tensors[i].name.c_str(), "has shape " + t.ShapeString(),
         "one token of each sequence: " + Bracketed(WithoutTokens(call.bound.tensors[i].axes)));
  }
}

// A new array of a tensor's dtype with these sizes. With `as_it_lies`, the one of its last two axes that is contiguous
// in the tensor is contiguous in the array.
nb::object NewLike(const char* op, const ConstTensorView& x, std::span<const int64_t> sizes, bool as_it_lies,
                   TensorView& view) {
  const int last = x.rank() - 1;
  if (!as_it_lies || last < 2 || x.size(last) <= 1 || x.stride(last - 1) != 1 || x.stride(last) == 1) {
    NewArray array(op, x.dtype(), sizes);
    view = array.view;
    return std::move(array.array);
  }
  std::vector<int64_t> swapped(sizes.begin(), sizes.end());
  std::swap(swapped.end()[-1], swapped.end()[-2]);
  const NewArray array(op, x.dtype(), swapped);
  std::vector<int64_t> strides(array.view.strides().begin(), array.view.strides().end());
  std::swap(strides.end()[-1], strides.end()[-2]);
  view = TensorView(array.view.data(), x.dtype(), sizes, strides);
  return array.array.attr("swapaxes")(-1, -2);
}

// The array for o: `out`, or a new one. A step has no axis T.
nb::object OutputOf(const char* op, PythonCall& call, bool one_token = false) {
  if (call.out.is_valid()) return nb::borrow(call.out);
  const Bound& b = call.bound;
  const ConstTensorView& x = call.in[b.output_index];
  const bool as_it_lies = b.output_tensor().reading == Parameter::kInPlace;
  const int dropped = b.dropped_axis - (one_token ? 1 : 0);
  if (b.dropped_axis < 0 || dropped >= x.rank()) return NewLike(op, x, x.sizes(), as_it_lies, call.o);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.erase(sizes.begin() + dropped);
  return NewLike(op, x, sizes, as_it_lies, call.o);
}

// The mechanism has not checked the call yet, so sizes that cannot be determined are 0.
int64_t SizeOf(const PythonCall& call, const AxisPlace& at) {
  if (at.sequences && call.cu_seqlens.present()) {
    return std::max<int64_t>(call.cu_seqlens.num_elements(), 1) - 1;
  }
  const ConstTensorView& t = call.in[at.tensor];
  const int64_t size = at.place >= 0 && at.place < t.rank() ? t.size(at.place) : 0;
  return at.features ? call.bound.features(size) : std::max<int64_t>(size + at.others, 0);
}

// New arrays for the states of this call: an array, or a named tuple. With `gradients`, constants have none.
nb::object NewStates(const char* op, PythonCall& call, bool gradients) {
  const Bound& b = call.bound;
  const DType dtype = call.in[b.output_index].dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  call.states.resize(b.states.size());
  nb::list arrays;
  for (size_t i = 0; i < b.states.size(); ++i) {
    const StateParameter& state = b.states[i];
    if (*state.setting != '\0' && !call.settings.Get<bool>(state.setting)) continue;
    if (gradients && !state.has_gradient) {
      arrays.append(nb::none());
      continue;
    }
    std::vector<int64_t> sizes;
    for (const AxisPlace& at : b.axes_of_states[i]) sizes.push_back(SizeOf(call, at));
    NewArray array(op, dtype, sizes);
    call.states[i] = array.view;
    arrays.append(array.array);
  }
  return nb::len(arrays) > 1 ? NewNamedTuple(b.state, nb::tuple(arrays)) : nb::object(arrays[0]);
}

// A factor passed instead of its logarithm is positive and counts as a log decay of 0, so the results look plausible
// although nothing decays. Samples a few numbers of each call until one is found; set_checks checks all of them.
void WarnOfPositiveDecays(const char* op, const PythonCall& call) {
  static std::atomic<bool> warned = false;
  constexpr int64_t kMost = 64;
  for (size_t i = 0; i < call.bound.tensors.size(); ++i) {
    const Parameter& tensor = call.bound.tensors[i];
    if (tensor.values != Parameter::kDecays) continue;
    const ConstTensorView& x = call.in[i];
    if (warned || !x.present() || x.data() == nullptr || !IsFloat(x.dtype())) continue;
    if (x.device().type != DeviceType::kCpu) continue;  // reading would wait for the device
    const int64_t looked_at = std::min(kMost, x.num_elements());
    int64_t positive = 0;
    for (int64_t n = 0; n < looked_at; ++n) {
      int64_t rest = x.num_elements() / looked_at * n, at = 0;
      for (int axis = x.rank(); axis-- > 0; rest /= x.size(axis)) {
        at += rest % x.size(axis) * x.stride(axis);
      }
      positive += LoadAsDouble(x.dtype(), x.data(), at) > 0 ? 1 : 0;
    }
    if (positive == 0 || warned.exchange(true)) continue;
    const std::string text = std::string(op) + ": " + tensor.name + ": of " + std::to_string(looked_at) +
                             " numbers that were looked at " + std::to_string(positive) +
                             " are positive and count as 0, expected natural logarithms of decay "
                             "factors; heed.set_checks(True) refuses them";
    if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) != 0) throw nb::python_error();
  }
}

// Warns of likely mistakes that are not errors.
void Warn(const char* op, const PythonCall& call) {
  WarnOfPositiveDecays(op, call);
  // With a state, misplaced heads already throw; and a step usually has few tokens.
  if (!call.initial.empty()) return;
  const ConstTensorView* heads[3] = {};
  size_t count = 0;
  for (size_t i = 0; i < call.bound.tensors.size() && count < 3; ++i) {
    if (call.in[i].rank() == 4 && call.bound.tensors[i].axes.starts_with("B, T, ")) heads[count++] = &call.in[i];
  }
  if (count == 3) WarnOfHeadsBeforeTokens(op, *heads[0], *heads[1], *heads[2]);
}

// The processes of a call with comm=.
class Processes {
 public:
  Processes(const char* op, PythonCall& call) {
    if (!call.comm.is_valid()) return;
    communicator_.emplace(Argument{op, "comm", call.comm});
    call.group = &communicator_->group();
    if (call.segment) call.sequence.segment = *call.segment;
  }

 private:
  std::optional<Communicator> communicator_;
};

nb::object RunForward(const Bound& b, PyObject* args, PyObject* kwargs) {
  PythonCall call(b);
  nb::object o, state;
  ReadInGroup(
      [&] {
        Read<PythonCall>(b.name, b.forward_keywords, b.num_positional, args, kwargs, call);
        CheckRequired(b.name, call);
        Warn(b.name, call);
        o = OutputOf(b.name, call);
        if (call.return_state) state = NewStates(b.name, call, false);
      },
      b.name, kwargs);
  Context& ctx = ThreadContext(call.num_threads);
  const Processes processes(b.name, call);
  Compute(b.name, [&] { b.passes->Forward(ctx, call); });
  if (!call.return_state) return o;
  return nb::make_tuple(o, state);
}

nb::object RunBackward(const Bound& b, PyObject* args, PyObject* kwargs) {
  const char* op = b.op_backward.c_str();
  PythonCall call(b);
  ReadInGroup(
      [&] {
        Read<PythonCall>(op, b.backward_keywords, b.num_positional + (b.dstate_by_place ? 2 : 1), args, kwargs, call);
        if (!call.d_o.present()) FailMissing(op, "do");
        CheckRequired(op, call);
      },
      op, kwargs);
  call.gradients.resize(b.tensors.size());
  nb::list results;
  for (size_t i = 0; i < b.tensors.size(); ++i) {
    const ConstTensorView& x = call.in[i];
    if (b.tensors[i].reading == Parameter::kMask) continue;
    if (!x.present()) {
      results.append(nb::none());
      continue;
    }
    const bool as_it_lies = b.tensors[i].reading == Parameter::kInPlace;
    results.append(NewLike(op, x, x.sizes(), as_it_lies, call.gradients[i]));
  }
  if (!call.initial.empty()) {
    results.append(NewStates(op, call, true));
  } else if (b.has_state()) {
    results.append(nb::none());
  }
  Context& ctx = ThreadContext(call.num_threads);
  const Processes processes(op, call);
  Compute(op, [&] { b.passes->Backward(ctx, call); });
  return NewNamedTuple(b.gradients, nb::tuple(results));
}

void ReadStep(const Bound& b, PyObject* args, PyObject* kwargs, PythonCall& call) {
  const char* op = b.op_step.c_str();
  Read<PythonCall>(op, b.step_keywords, b.num_positional + 1, args, kwargs, call);
  CheckRequired(op, call);
  if (call.states.empty()) FailMissing(op, "state");
  CheckOneToken(op, call);
  WarnOfPositiveDecays(op, call);
}

nb::object RunStep(const Bound& b, PyObject* args, PyObject* kwargs) {
  const char* op = b.op_step.c_str();
  PythonCall call(b);
  ReadStep(b, args, kwargs, call);
  const nb::object o = OutputOf(op, call, true);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(op, [&] { b.passes->Step(ctx, call); });
  return o;
}

void RunTorch(const Bound& b, PyObject* args) {
  PythonCall call(b);
  call.arrays.AllowTorch();
  call.arrays.AllowDevices();
  Read<PythonCall>(b.name, b.torch_keywords, b.torch_keywords.size(), args, nullptr, call);
  Warn(b.name, call);
  Context& ctx = TorchContext(call.num_threads, call.in[0].device());
  ComputeForTorch(b.name, [&] { b.passes->Forward(ctx, call); });
}

void RunTorchBackward(const Bound& b, PyObject* args) {
  PythonCall call(b);
  call.arrays.AllowTorch();
  call.arrays.AllowDevices();
  Read<PythonCall>(b.name, b.torch_backward_keywords, b.torch_backward_keywords.size(), args, nullptr, call);
  Context& ctx = TorchContext(call.num_threads, call.in[0].device());
  ComputeForTorch(b.name, [&] { b.passes->Backward(ctx, call); });
}

// Reads the arguments of a call of a group: communicator, relay, segment, what ranks compare beside the call, and from
// `begin` on those of the operator.
struct CallInGroup {
  CallInGroup(const Bound& b, const Bound::Keywords& keywords, const nb::args& args, Py_ssize_t begin)
      : call(b), processes(b.name, First(args)) {
    const auto rest = nb::steal<nb::tuple>(PyTuple_GetSlice(args.ptr(), begin, static_cast<Py_ssize_t>(args.size())));
    call.arrays.AllowTorch();
    call.arrays.AllowDevices();  // the library refuses them, on every rank
    ReadInGroup(
        [&] {
          Read<PythonCall>(b.name, keywords, keywords.size(), rest.ptr(), nullptr, call);
          if (!call.d_o.present()) Warn(b.name, call);
        },
        *call.group);
  }
  PythonCall call;

 private:
  PythonCall& First(const nb::args& args) {
    call.comm = args[0];
    call.sequence.relay = nb::cast<bool>(args[1]);
    call.segment = nb::cast<int64_t>(args[2]);
    call.sequence.note = nb::cast<std::string>(args[3]);
    return call;
  }
  Processes processes;
};

using distributed::SequenceStates;

nb::capsule RunTorchInGroup(const Bound& b, const nb::args& args) {
  CallInGroup in_group(b, b.torch_keywords, args, 4);
  PythonCall& call = in_group.call;
  auto states = std::make_unique<SequenceStates>();
  call.sequence.states = states.get();
  Context& ctx = TorchContext(call.num_threads);
  ComputeForTorch(b.name, [&] { b.passes->Forward(ctx, call); });
  return nb::capsule(states.release(), [](void* x) noexcept { delete static_cast<SequenceStates*>(x); });
}

// After the group's arguments is the result of RunTorchInGroup.
void RunTorchBackwardInGroup(const Bound& b, const nb::args& args) {
  CallInGroup in_group(b, b.torch_backward_keywords, args, 5);
  PythonCall& call = in_group.call;
  call.sequence.states = static_cast<SequenceStates*>(nb::cast<nb::capsule>(args[4]).data());
  Context& ctx = TorchContext(call.num_threads);
  ComputeForTorch(b.name, [&] { b.passes->Backward(ctx, call); });
}

// Runs a step on tensors of a device, with an `out` that PyTorch has allocated.
void RunTorchStep(const Bound& b, PyObject* args, PyObject* kwargs) {
  const char* op = b.op_step.c_str();
  PythonCall call(b);
  call.arrays.AllowTorch();
  call.arrays.AllowDevices();
  ReadStep(b, args, kwargs, call);
  if (!call.o.present()) FailMissing(op, "out");
  Context& ctx = TorchContext(call.num_threads, call.in[0].device());
  Compute(op, [&] { b.passes->Step(ctx, call); });
}

nb::dict RunExplain(const Bound& b, DType dtype, int num_threads, PyObject* kwargs) {
  PythonCall call(b);
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  Read<PythonCall>(b.name, b.forward_keywords, b.num_positional, nullptr, kwargs, call);
  CheckRequired(b.name, call);
  const Context& ctx = ThreadContext(num_threads);
  Explanation e;
  Compute(b.name, [&] { e = b.passes->Explain(ctx, call); });
  return Described(e.kernel, e.target, e.why, e.flops, e.bytes, e.workspace_bytes, e.visited_pairs, false,
                   call.arrays.copied());
}

// Describes the mechanism for other layers, which need no list of their own.
nb::dict DescriptionOf(const Bound& b) {
  nb::dict description, axes, settings;
  nb::list inputs, optional, masks, cast, states;
  for (const Parameter& tensor : b.tensors) {
    inputs.append(tensor.name);
    axes[tensor.name.c_str()] = tensor.axes;
    if (tensor.optional) optional.append(tensor.name);
    if (tensor.reading == Parameter::kMask) masks.append(tensor.name);
    if (tensor.cast) cast.append(tensor.name);
  }
  for (const SettingSpec& spec : b.settings) {
    settings[spec.name] =
        MayBeNone(spec) ? nb::none() : std::visit([](const auto& value) { return nb::cast(value); }, spec.value);
  }
  for (size_t i = 0; i < b.states.size(); ++i) {
    nb::list places;
    for (const AxisPlace& at : b.axes_of_states[i]) {
      places.append(nb::make_tuple(at.tensor, at.place, at.others, at.sequences, at.features));
    }
    const StateParameter& state = b.states[i];
    states.append(nb::make_tuple(state.name, state.axes, state.has_gradient, state.setting, places));
  }
  description["inputs"] = inputs;
  description["axes"] = axes;
  description["optional"] = optional;
  description["masks"] = masks;
  description["cast"] = cast;
  description["positional"] = b.num_positional;
  description["required"] = b.num_required;  // up to the last required one
  description["state_place"] = b.state_place;
  description["settings"] = settings;
  description["scale"] = b.has_scale;
  description["direction"] = b.has_direction;
  description["output"] = b.output_tensor().name;
  description["output_axes"] = b.output_axes;
  description["as_it_lies"] = b.output_tensor().reading == Parameter::kInPlace;
  description["states"] = states;
  description["states_together"] = b.states_together;
  description["state_type"] = b.state.is_valid() ? b.state : nb::none();
  description["features"] = b.features ? nb::cpp_function(b.features) : nb::none();
  return description;
}

}  // namespace

PythonCall::PythonCall(const Bound& mechanism) : Call(mechanism.tensors.size(), mechanism.settings), bound(mechanism) {}

bool MayBeNone(const SettingSpec& spec) {
  const std::string* word = std::get_if<std::string>(&spec.value);
  return word != nullptr && word->empty();
}

size_t Settings::At(std::string_view name) const {
  for (size_t i = 0; i < specs_->size(); ++i) {
    if (name == (*specs_)[i].name) return i;
  }
  throw InternalError("binding: no setting " + std::string(name));
}

const Setting& Settings::Find(size_t at) const {
  for (const auto& [place, value] : given_) {
    if (place == at) return value;
  }
  return (*specs_)[at].value;
}

size_t Settings::Choice(std::string_view name) const {
  const std::vector<std::string>& choices = (*specs_)[At(name)].choices;
  return static_cast<size_t>(std::ranges::find(choices, Get<std::string>(name)) - choices.begin());
}

void Bind(nb::module_& m, const Binding& binding) {
  // Never deleted: it is used as long as the module, which is never unloaded.
  const Bound* b = new Bound(m, binding);
  const auto forward = [b](const nb::args& args, const nb::kwargs& kwargs) {
    return RunForward(*b, args.ptr(), kwargs.ptr());
  };
  m.def(b->name, forward, nb::sig(b->forward_signature.c_str()), b->forward_text.c_str());
  m.def(
      b->op_backward.c_str(),
      [b](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(*b, args.ptr(), kwargs.ptr()); },
      nb::sig(b->backward_signature.c_str()), b->backward_text.c_str());
  if (b->has_state()) {
    m.def(b->name, forward, nb::sig(b->state_signature.c_str()), b->forward_text.c_str());
    m.def(
        b->op_step.c_str(),
        [b](const nb::args& args, const nb::kwargs& kwargs) { return RunStep(*b, args.ptr(), kwargs.ptr()); },
        nb::sig(b->step_signature.c_str()), b->step_text.c_str());
    m.def(("_torch_" + b->op_step).c_str(),
          [b](const nb::args& args, const nb::kwargs& kwargs) { RunTorchStep(*b, args.ptr(), kwargs.ptr()); });
    m.def(("_torch_" + std::string(b->name) + "_in_group").c_str(),
          [b](const nb::args& args) { return RunTorchInGroup(*b, args); });
    m.def(("_torch_" + b->op_backward + "_in_group").c_str(),
          [b](const nb::args& args) { RunTorchBackwardInGroup(*b, args); });
  }
  m.def(("_torch_" + std::string(b->name)).c_str(), [b](const nb::args& args) { RunTorch(*b, args.ptr()); });
  m.def(("_torch_" + b->op_backward).c_str(), [b](const nb::args& args) { RunTorchBackward(*b, args.ptr()); });
  if (!nb::hasattr(m, "_mechanisms")) m.attr("_mechanisms") = nb::dict();
  nb::cast<nb::dict>(m.attr("_mechanisms"))[b->name] = DescriptionOf(*b);
  RegisterExplain(b->name, [b](DType dtype, int num_threads, PyObject* kwargs) {
    return RunExplain(*b, dtype, num_threads, kwargs);
  });
}

}  // namespace heed::binding

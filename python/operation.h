// Bindings of operations that no table of mechanisms describes. Such an operation lists its differentiable tensors
// once: its arguments, its gradients and the results of its backward pass follow from the list.
#ifndef HEED_PYTHON_OPERATION_H_
#define HEED_PYTHON_OPERATION_H_

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "python/arguments.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::python {

// The arguments of a call. An operation derives its own from this if it has more of them.
template <class BackwardInputsOfOp, class OptionsOfOp, class OutputsOfOp, class GradientsOfOp>
struct OperationCall {
  using BackwardInputs = BackwardInputsOfOp;
  using Options = OptionsOfOp;
  using Outputs = OutputsOfOp;
  using Gradients = GradientsOfOp;

  Arrays arrays;
  BackwardInputs in;
  OptionsOfOp options;
  TensorView state;     // of a step
  OutputsOfOp out;      // for PyTorch
  Gradients gradients;  // new arrays, or PyTorch's
  int num_threads = 0;
};

// Readers of keywords. Rows are copied unless their last axis is contiguous, a tensor is read in place.
template <class Call, auto kField>
void ReadRows(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}
template <class Call, auto kField>
void ReadTensor(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.ReadInPlace(a, Kind::kFloat);
}
template <class Call, auto kField>
void ReadNumbers(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.ReadList(a, Kind::kFloat);
}
template <class Call, auto kField>
void ReadInts(Call& call, const Argument& a) {
  call.options.*kField = call.arrays.ReadList(a, Kind::kInt);
}
template <class Call, auto kField>
void ReadOption(Call& call, const Argument& a) {
  call.options.*kField = ToFinite(a);
}
template <class Call, auto kField>
void ReadFlag(Call& call, const Argument& a) {
  call.*kField = ToBool(a);
}
template <class Call, auto kField>
void WriteResult(Call& call, const Argument& a) {
  call.out.*kField = call.arrays.Write(a, Kind::kFloat);
}
template <class Call, auto kField>
void WriteGradient(Call& call, const Argument& a) {
  call.gradients.*kField = call.arrays.Write(a, Kind::kFloat);
}
template <class Call>
void WriteState(Call& call, const Argument& a) {
  call.state = call.arrays.Write(a, Kind::kFloat);
}
template <class Call>
void ReadThreads(Call& call, const Argument& a) {
  call.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads));
}

// Keywords that most operations have.
template <class Call>
inline constexpr Keyword<Call> kGradientOfO[] = {{"do", false, &ReadRows<Call, &Call::BackwardInputs::d_o>}};
template <class Call>
inline constexpr Keyword<Call> kSequences[] = {{"lengths", true, &ReadInts<Call, &Call::Options::lengths>},
                                               {"starts", true, &ReadInts<Call, &Call::Options::starts>},
                                               {"cu_seqlens", true, &ReadInts<Call, &Call::Options::cu_seqlens>}};
template <class Call>
inline constexpr Keyword<Call> kThreads[] = {{"threads", true, &ReadThreads<Call>}};

// Keywords of softmax attention.
template <class Call>
inline constexpr Keyword<Call> kScale[] = {{"scale", true, &ReadOption<Call, &Call::Options::scale>}};
template <class Call>
inline constexpr Keyword<Call> kGradientOfLse[] = {{"dlse", true, &ReadTensor<Call, &Call::BackwardInputs::d_lse>}};
template <class Call>
inline constexpr Keyword<Call> kTorchGradientsOfRows[] = {
    {"the gradient of o", false, &ReadRows<Call, &Call::BackwardInputs::d_o>},
    {"the gradient of lse", true, &ReadTensor<Call, &Call::BackwardInputs::d_lse>}};

// Keywords of operations with a state.
template <class Call>
inline constexpr Keyword<Call> kState[] = {{"state", false, &WriteState<Call>}};
template <class Call>
inline constexpr Keyword<Call> kGradientOfState[] = {
    {"dstate", true, &ReadTensor<Call, &Call::BackwardInputs::d_final_state>}};
template <class Call>
inline constexpr Keyword<Call> kTorchRowsAndState[] = {
    {"o", false, &WriteResult<Call, &Call::Outputs::o>},
    {"state", true, &WriteResult<Call, &Call::Outputs::final_state>}};
template <class Call>
inline constexpr Keyword<Call> kTorchGradientsOfRowsAndState[] = {
    {"the gradient of o", false, &ReadRows<Call, &Call::BackwardInputs::d_o>},
    {"the gradient of the state", true, &ReadTensor<Call, &Call::BackwardInputs::d_final_state>}};

// A tensor that has a gradient.
template <class Call>
struct Differentiable {
  Keyword<Call> input, gradient;
  ConstTensorView Call::BackwardInputs::* from;
  TensorView Call::Gradients::* to;
};
template <class Call, auto kInput, auto kGradient>
constexpr Differentiable<Call> Rows(const char* name, const char* gradient, bool optional = false) {
  return {
      {name, optional, &ReadRows<Call, kInput>}, {gradient, true, &WriteGradient<Call, kGradient>}, kInput, kGradient};
}
template <class Call, auto kInput, auto kGradient>
constexpr Differentiable<Call> InPlace(const char* name, const char* gradient, bool optional = false) {
  return {{name, optional, &ReadTensor<Call, kInput>},
          {gradient, true, &WriteGradient<Call, kGradient>},
          kInput,
          kGradient};
}
template <class Call, auto kInput, auto kGradient>
constexpr Differentiable<Call> Numbers(const char* name, const char* gradient, bool optional = false) {
  return {{name, optional, &ReadNumbers<Call, kInput>},
          {gradient, true, &WriteGradient<Call, kGradient>},
          kInput,
          kGradient};
}

// The keywords of these tensors, and of their gradients.
template <class Call, size_t kCount>
constexpr std::array<Keyword<Call>, kCount> InputsOf(const Differentiable<Call> (&tensors)[kCount]) {
  std::array<Keyword<Call>, kCount> words{};
  for (size_t i = 0; i < kCount; ++i) words[i] = tensors[i].input;
  return words;
}
template <class Call, size_t kCount>
constexpr std::array<Keyword<Call>, kCount> GradientsOf(const Differentiable<Call> (&tensors)[kCount]) {
  std::array<Keyword<Call>, kCount> words{};
  for (size_t i = 0; i < kCount; ++i) words[i] = tensors[i].gradient;
  return words;
}

// A new type of named tuples whose fields are the gradients of these tensors.
template <class Call>
nb::object GradientsType(nb::module_& m, const std::string& name, const std::string& backward,
                         std::span<const Keyword<Call>> gradients) {
  std::string fields;
  for (const Keyword<Call>& gradient : gradients) fields += (fields.empty() ? "" : " ") + std::string(gradient.name);
  return NamedTupleType(m, name, fields, GradientsDoc(backward));
}

// Calls compute(ctx) with call.gradients on new arrays, of the shape and dtype of the tensors that are present. Returns
// a named tuple, in which the others are None.
template <class Call, class F>
nb::object NewGradients(const char* operation, const nb::object& type, std::span<const Differentiable<Call>> tensors,
                        Call& call, F&& compute) {
  nb::list arrays;
  for (const Differentiable<Call>& tensor : tensors) {
    const ConstTensorView& x = call.in.*tensor.from;
    if (!x.present()) {
      arrays.append(nb::none());
      continue;
    }
    const NewArray gradient(operation, x.dtype(), x.sizes());
    call.gradients.*tensor.to = gradient.view;
    arrays.append(gradient.array);
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(operation, [&] { compute(ctx); });
  return NewNamedTuple(type, nb::tuple(arrays));
}

// Returns what heed.explain says of a call whose arrays may be shapes, by the operation's Explain.
template <class Call, class F>
nb::dict Explained(const char* operation, int num_threads, const Call& call, F&& explain) {
  const Context& ctx = ThreadContext(num_threads);
  decltype(explain(ctx, call.in, call.options)) x;
  Compute(operation, [&] { x = explain(ctx, call.in, call.options); });
  return Described(x.kernel, x.target, x.why, x.flops, x.bytes, x.workspace_bytes, x.visited_pairs, false,
                   call.arrays.copied());
}

// Reads a call of PyTorch's operator, all of whose arguments are given by position, and calls compute(ctx, call).
template <class Call, class F>
void RunForTorch(Caller caller, const char* operation, std::span<const Keyword<Call>> words, const nb::args& args,
                 F&& compute) {
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(operation, words, words.size(), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(call.num_threads);
  ComputeFor(caller, operation, [&] { compute(ctx, call); });
}

enum class Pass { kForward, kBackward, kStep };

// An array that a call needs, with its axes if they determine the shapes of results. A step has no axis T.
struct Needed {
  const char* name;
  const ConstTensorView& view;
  const char* axes = nullptr;
};
void CheckNeeded(const char* operation, Pass pass, std::initializer_list<Needed> arrays);

// A function of an operation: its name, its pass, its keywords, of which the first ones may be given by position, and
// the check that a call has what it needs.
template <class Call>
struct Function {
  const char* name;
  Pass pass;
  std::vector<Keyword<Call>> words;
  size_t num_positional;
  void (*check)(const char* operation, Pass pass, const Call& call);

  void Read(PyObject* args, PyObject* kwargs, Call& call) const {
    python::Read<Call>(name, words, num_positional, args, kwargs, call);
    check(name, pass, call);
  }

  // Binds it as what run(call) returns.
  template <class F>
  void Bind(nb::module_& m, const std::string& signature, const std::string& text, F run) const {
    m.def(
        name,
        [function = *this, run](const nb::args& args, const nb::kwargs& kwargs) -> nb::object {
          Call call;
          function.Read(args.ptr(), kwargs.ptr(), call);
          return run(call);
        },
        nb::sig(signature.c_str()), text.c_str());
  }
};

// Binds the backward pass, which returns a named tuple of this type: the gradients of these tensors.
template <class Call>
void BindBackward(nb::module_& m, const Function<Call>& backward, const std::string& type,
                  std::span<const Differentiable<Call>> tensors, const std::string& signature,
                  const std::string& text) {
  std::vector<Keyword<Call>> gradients;
  for (const Differentiable<Call>& tensor : tensors) gradients.push_back(tensor.gradient);
  const nb::object tuple = GradientsType<Call>(m, type, backward.name, gradients);
  backward.Bind(m, signature, text, [=, op = backward.name](Call& call) {
    return NewGradients<Call>(op, tuple, tensors, call,
                              [&](Context& ctx) { Backward(ctx, call.in, call.options, call.gradients); });
  });
}

// Binds one token of an operation with a state: o has the shape of v.
template <class Call>
void BindStep(nb::module_& m, const Function<Call>& step, const std::string& signature, const std::string& text) {
  step.Bind(m, signature, text, [op = step.name](Call& call) {
    NewArray o(op, call.in.q.dtype(), call.in.v.sizes());
    Context& ctx = ThreadContext(call.num_threads);
    Compute(op, [&] { Step(ctx, call.in, call.options, call.state, o.view); });
    return o.array;
  });
}

// Binds PyTorch's operators: both passes with these names and keywords.
template <class Call>
void BindTorch(nb::module_& m, const char* forward, std::vector<Keyword<Call>> forward_words, const char* backward,
               std::vector<Keyword<Call>> backward_words) {
  const std::string prefix = "_torch_";
  m.def((prefix + forward).c_str(), [=](const nb::args& args) {
    RunForTorch<Call>(Caller::kTorch, forward, forward_words, args,
                      [](Context& ctx, Call& call) { Forward(ctx, call.in, call.options, call.out); });
  });
  m.def((prefix + backward).c_str(), [=](const nb::args& args) {
    RunForTorch<Call>(Caller::kTorch, backward, backward_words, args,
                      [](Context& ctx, Call& call) { Backward(ctx, call.in, call.options, call.gradients); });
  });
}

// Registers the explanation of the forward pass.
template <class Call>
void BindExplain(const Function<Call>& forward) {
  RegisterExplain(forward.name, [=](DType dtype, int num_threads, PyObject* kwargs) {
    Call call;
    call.arrays.AllowShapes(dtype);
    forward.Read(nullptr, kwargs, call);
    return Explained(forward.name, num_threads, call,
                     [](const Context& ctx, const auto& in, const auto& options) { return Explain(ctx, in, options); });
  });
}

// The dtype of lse and of states.
inline DType WideDType(const ConstTensorView& q) { return q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }

// The number of sequences of a call, each of which has a state; 0 if its bounds are invalid.
template <class Call>
int64_t NumSequences(const Call& call) {
  const ConstTensorView& bounds = call.options.cu_seqlens;
  return bounds.present() && bounds.rank() == 1 ? std::max<int64_t>(bounds.size(0) - 1, 0) : call.in.q.size(0);
}

// Runs Forward. Returns o of these sizes, or (o, second), the second result if it is requested.
template <class Call>
nb::object ComputeOneOrTwo(const char* operation, const Call& call, std::span<const int64_t> sizes, bool two,
                           std::span<const int64_t> sizes_of_second) {
  NewArray o(operation, call.in.q.dtype(), sizes);
  Context& ctx = ThreadContext(call.num_threads);
  if (!two) {
    Compute(operation, [&] { Forward(ctx, call.in, call.options, {o.view, {}}); });
    return o.array;
  }
  NewArray second(operation, WideDType(call.in.q), sizes_of_second);
  Compute(operation, [&] { Forward(ctx, call.in, call.options, {o.view, second.view}); });
  return nb::make_tuple(o.array, second.array);
}

}  // namespace heed::python

#endif  // HEED_PYTHON_OPERATION_H_

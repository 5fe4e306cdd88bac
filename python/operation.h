// Bindings of operations that no table of mechanisms describes. Such an operation lists its differentiable tensors
// once: its arguments, its gradients and the results of its backward pass follow from the list.
#ifndef HEED_PYTHON_OPERATION_H_
#define HEED_PYTHON_OPERATION_H_

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
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

}  // namespace heed::python

#endif  // HEED_PYTHON_OPERATION_H_

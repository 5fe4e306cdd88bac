// heed.attention, heed.merge_attention and their part of heed.explain.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "docstrings/attention.h"
#include "heed/distributed/attention.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/attention_call_py.h"
#include "heed/ops/exact/attention/attention_options_py.h"
#include "heed/ops/exact/attention/attention_signature_py.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/layout.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"

namespace heed::attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "attention";
constexpr char kMergeOp[] = "merge_attention";

DType LseDType(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

nb::object Attention(const nb::args& args, const nb::kwargs& kwargs) {
  Call call;
  const Results results = ReadInGroup(
      [&] {
        ReadCall(kOp, args.ptr(), kwargs.ptr(), call);
        CheckForResults(kOp, call);
        WarnOfHeadsBeforeTokens(kOp, call.in.q, call.in.k, call.in.v);
        return NewResults(kOp, call, call.in.q, call.in.v.size(call.in.v.rank() - 1));
      },
      kOp, kwargs.ptr());
  if (call.options.dropout > 0 && !call.seed_given) {
    call.options.seed = FreshSeed();
    call.divided.seed_of_first = true;  // all ranks drop the same pairs
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kOp, [&] {
    if (!call.communicator) return Forward(ctx, call.in, call.options, results.views);
    distributed::Forward(ctx, call.communicator->group(), call.in, call.options, results.views, call.divided);
  });
  return results.Returned();
}

nb::dict ExplainAttention(DType dtype, int num_threads, PyObject* kwargs) {
  Call call;
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  ReadCall(kOp, nullptr, kwargs, call);
  // Self-attention is described by q alone.
  if (!call.in.k.present()) call.in.k = call.in.q;
  if (!call.in.v.present()) call.in.v = call.in.k;
  CheckForResults(kOp, call);
  const Context& ctx = ThreadContext(num_threads);
  Explanation e;
  Compute(kOp, [&] { e = heed::attention::Explain(ctx, call.in, call.options); });

  return Described(e.kernel, e.target, e.why, e.flops, e.bytes, e.workspace_bytes, e.visited_pairs, e.invariant,
                   call.arrays.copied());
}

// Gives a packed lse [H, T] beside o [1, T, H, D] a leading 1, as Merge requires.
template <class View>
View WithLeadingAxis(const View& lse) {
  return View(lse.data(), lse.dtype(), {1, lse.size(0), lse.size(1)}, {0, lse.stride(0), lse.stride(1)}, lse.device());
}

nb::object MergeAttention(nb::handle parts_argument, nb::handle sinks_argument) {
  constexpr char kExpected[] = "a sequence of pairs (o, lse)";
  Arrays arrays;
  std::deque<std::string> names;  // names of arguments, which messages point to
  std::vector<Part> parts;
  const nb::object iterator = nb::steal(PyObject_GetIter(parts_argument.ptr()));
  if (!iterator.is_valid()) {
    PyErr_Clear();
    Fail({kMergeOp, "parts", parts_argument}, kExpected);
  }
  const nb::object sequence = nb::steal(PySequence_List(iterator.ptr()));
  if (!sequence.is_valid()) throw nb::python_error();
  for (nb::handle item : sequence) {
    const std::string name = "parts[" + std::to_string(parts.size()) + "]";
    const bool is_pair = (PyTuple_Check(item.ptr()) || PyList_Check(item.ptr())) && nb::len(item) == 2;
    if (!is_pair) Fail({kMergeOp, names.emplace_back(name).c_str(), item}, "a pair (o, lse)");
    const char* o = names.emplace_back(name + ".o").c_str();
    const char* lse = names.emplace_back(name + ".lse").c_str();
    parts.push_back(
        {arrays.Read({kMergeOp, o, item[0]}, Kind::kFloat), arrays.Read({kMergeOp, lse, item[1]}, Kind::kFloat)});
    const Part& part = parts.back();
    if (part.o.rank() != 4 && part.o.rank() != 3) {
      Fail(kMergeOp, o, "has shape " + part.o.ShapeString(), "[B, Tq, Hq, Dv] or [Tq_total, Hq, Dv]");
    }
    if (!IsFloat(part.o.dtype())) {
      Fail(kMergeOp, o, std::string("has dtype ") + Name(part.o.dtype()), "f64, f32, bf16 or f16");
    }
    if (part.lse.rank() != 3 && part.lse.rank() != 2) {
      Fail(kMergeOp, lse, "has shape " + part.lse.ShapeString(), "[B, Hq, Tq] or [Hq, Tq_total]");
    }
  }
  if (parts.empty()) Fail(kMergeOp, "parts", "is empty", "at least one pair (o, lse)");
  ConstTensorView sinks;
  if (!sinks_argument.is_none()) {
    sinks = arrays.ReadList({kMergeOp, "sinks", sinks_argument}, Kind::kFloat);
  }

  // An f64 part gives an f64 result; 16-bit parts of two dtypes give f32.
  DType dtype = parts[0].o.dtype();
  for (const Part& part : parts) {
    if (part.o.dtype() == dtype) continue;
    const bool wide = dtype == DType::kF64 || part.o.dtype() == DType::kF64;
    dtype = wide ? DType::kF64 : DType::kF32;
  }
  NewArray o(kMergeOp, dtype, parts[0].o.sizes());
  NewArray lse(kMergeOp, LseDType(dtype), parts[0].lse.sizes());
  TensorView lse_view = lse.view;
  if (parts[0].o.rank() == 4 && parts[0].lse.rank() == 2) {
    lse_view = WithLeadingAxis(lse_view);
    for (Part& part : parts) {
      if (part.lse.rank() == 2) part.lse = WithLeadingAxis(part.lse);
    }
  }
  Context& ctx = ThreadContext(0);
  Compute(kMergeOp, [&] { Merge(ctx, parts, sinks, {o.view, lse_view}); });
  return nb::make_tuple(o.array, lse.array);
}

}  // namespace

void Bind(nb::module_& m) {
  using namespace nanobind::literals;
  const char* const signature = Spelled(
      kSignature, &TakesAll, std::string("return_lse: typing.Literal[False] = False, ") + kDivided + kOutAndThreads);
  const std::string text = Docstring(doc::kForward, signature, {kArguments, doc::kAttentionFields}, kInPython);
  m.def("attention", &Attention, nb::sig(signature), text.c_str());
  m.def("attention", &Attention, nb::sig(Spelled(kLseSignature, &TakesAll, std::string(kDivided) + kOutAndThreads)),
        text.c_str());
  m.def("merge_attention", &MergeAttention, "parts"_a.none(), nb::kw_only(), "sinks"_a = nb::none(),
        nb::sig(kMergeSignature),
        Docstring(doc::kMerge, kMergeSignature, {kArguments, doc::kAttentionFields}, kMergeInPython).c_str());
  BindWeights(m);
  BindBackward(m);
  BindTorch(m);
  BindAttend(m);
  RegisterExplain(kOp, &ExplainAttention);
}

}  // namespace heed::attention

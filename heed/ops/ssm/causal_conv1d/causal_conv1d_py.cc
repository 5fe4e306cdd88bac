// heed.causal_conv1d, heed.causal_conv1d_backward, heed.causal_conv1d_step, and what
// PyTorch's operators call.
#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "docstrings/causal_conv1d.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::causal_conv1d {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kName[] = "causal_conv1d";
constexpr char kBackwardName[] = "causal_conv1d_backward";
constexpr char kStepName[] = "causal_conv1d_step";

// A call on its way in.
struct Call {
  Arrays arrays;
  BackwardInputs in;
  Options options;
  nb::handle out;
  TensorView out_view;
  TensorView state;     // of a step, or the final one of PyTorch's
  Gradients gradients;  // PyTorch's
  bool return_state = false, describe = false;
  int num_threads = 0;
};

constexpr Renamed kRenamed[] = {{"o", "out"}, {"d_o", "do"}, {"d_state", "dstate"}};

template <auto kField>
void ReadInput(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.ReadInPlace(a, Kind::kFloat);
}

template <auto kField>
void ReadInts(Call& call, const Argument& a) {
  call.options.*kField = call.arrays.ReadList(a, Kind::kInt);
}

void ReadActivation(Call& call, const Argument& a) {
  constexpr char kExpected[] = "None, 'silu' or 'swish'";
  const std::string name = ToString(a, kExpected);
  if (name != "silu" && name != "swish") Fail(a, kExpected);
  call.options.activation = Activation::kSilu;
}

void ReadOut(Call& call, const Argument& a) {
  if (call.describe) return;
  call.out = a.value;
  call.out_view = call.arrays.Write(a, Kind::kFloat);
}

void ReadState(Call& call, const Argument& a) {
  call.state = call.arrays.Write(a, Kind::kFloat);
}

template <auto kField>
void WriteGradient(Call& call, const Argument& a) {
  call.gradients.*kField = call.arrays.Write(a, Kind::kFloat);
}

// Pieces that the tables of several functions have in common.
constexpr Keyword<Call> kX = {"x", false, &ReadInput<&BackwardInputs::x>};
constexpr Keyword<Call> kWeight = {"weight", false, &ReadInput<&BackwardInputs::weight>};
constexpr Keyword<Call> kBias = {"bias", true, &ReadInput<&BackwardInputs::bias>};
constexpr Keyword<Call> kActivation = {"activation", true, &ReadActivation};
constexpr Keyword<Call> kInitial = {"initial_state", true, &ReadInput<&BackwardInputs::initial>};
constexpr Keyword<Call> kLengths = {"lengths", true, &ReadInts<&Options::lengths>};
constexpr Keyword<Call> kStarts = {"starts", true, &ReadInts<&Options::starts>};
constexpr Keyword<Call> kCuSeqlens = {"cu_seqlens", true, &ReadInts<&Options::cu_seqlens>};
constexpr Keyword<Call> kReverse = {
    "reverse", false, [](Call& c, const Argument& a) { c.options.reverse = ToBool(a); }};
constexpr Keyword<Call> kOut = {"out", true, &ReadOut};
constexpr Keyword<Call> kThreads = {
    "threads", true, [](Call& c, const Argument& a) {
      c.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads));
    }};

constexpr Keyword<Call> kForwardKeywords[] = {
    kX, kWeight, kBias, kActivation, kInitial,
    {"return_state", false, [](Call& c, const Argument& a) { c.return_state = ToBool(a); }},
    kLengths, kStarts, kCuSeqlens, kReverse, kOut, kThreads};
constexpr Keyword<Call> kBackwardKeywords[] = {
    {"do", false, &ReadInput<&BackwardInputs::d_o>}, kX, kWeight, kBias,
    {"dstate", true, &ReadInput<&BackwardInputs::d_final>},
    kActivation, kInitial, kLengths, kStarts, kCuSeqlens, kReverse, kThreads};
constexpr Keyword<Call> kStepKeywords[] = {
    kX, kWeight, kBias, {"state", false, &ReadState}, kActivation, kOut, kThreads};
// PyTorch's operators take all by position, results among them.
constexpr Keyword<Call> kTorchKeywords[] = {
    kX, kWeight, kBias, kActivation, kInitial, kLengths, kStarts, kCuSeqlens, kReverse,
    kThreads, kOut, {"final_state", true, &ReadState}};
constexpr Keyword<Call> kTorchBackwardKeywords[] = {
    {"the gradient of o", false, &ReadInput<&BackwardInputs::d_o>},
    {"the gradient of the state", true, &ReadInput<&BackwardInputs::d_final>},
    kX, kWeight, kBias, kActivation, kInitial, kLengths, kStarts, kCuSeqlens, kReverse,
    kThreads,
    {"dx", true, &WriteGradient<&Gradients::dx>},
    {"dweight", true, &WriteGradient<&Gradients::dweight>},
    {"dbias", true, &WriteGradient<&Gradients::dbias>},
    {"dinitial_state", true, &WriteGradient<&Gradients::dinitial>}};

// What results need to be made; the mechanism checks the rest.
void CheckForResults(const char* op, const Call& call, int rank) {
  if (!call.in.x.present()) FailMissing(op, "x");
  if (!call.in.weight.present()) FailMissing(op, "weight");
  if (call.in.x.rank() != rank) {
    Fail(op, "x", "has shape " + call.in.x.ShapeString(),
         rank == 3 ? "rank 3: [B, D, T]" : "one token of each sequence: [B, D]");
  }
  if (!IsFloat(call.in.x.dtype())) {
    Fail(op, "x", std::string("has dtype ") + Name(call.in.x.dtype()), "f64, f32, bf16 or f16");
  }
  const ConstTensorView& weight = call.in.weight;
  if (weight.rank() != 2 || weight.size(1) < 1) {
    Fail(op, "weight", "has shape " + weight.ShapeString(), "[D, W] with W >= 1");
  }
}

// A new array of x's shape and dtype whose contiguous axis is that of x.
nb::object NewLike(const char* op, const ConstTensorView& x, TensorView& view) {
  const bool channels = x.rank() == 3 && x.size(2) > 1 && x.stride(1) == 1 && x.stride(2) != 1;
  if (!channels) {
    NewArray array(op, x.dtype(), x.sizes());
    view = array.view;
    return std::move(array.array);
  }
  const int64_t sizes[] = {x.size(0), x.size(2), x.size(1)};
  NewArray array(op, x.dtype(), sizes);
  const int64_t strides[] = {sizes[1] * sizes[2], 1, sizes[2]};
  view = TensorView(array.view.data(), x.dtype(), x.sizes(), strides);
  return array.array.attr("transpose")(0, 2, 1);
}

nb::object NewState(const char* op, const Call& call, TensorView& view) {
  const ConstTensorView& packed = call.options.cu_seqlens;
  const int64_t sizes[] = {packed.present()
                               ? std::max<int64_t>(packed.num_elements(), 1) - 1
                               : call.in.x.size(0),
                           call.in.x.size(1), call.in.weight.size(1) - 1};
  NewArray array(op, call.in.x.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, sizes);
  view = array.view;
  return std::move(array.array);
}

nb::object OutputOf(const char* op, Call& call, TensorView& view) {
  if (!call.out.is_valid()) return NewLike(op, call.in.x, view);
  view = call.out_view;
  return nb::borrow(call.out);
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  Call call;
  Read<Call>(kName, kForwardKeywords, 3, args.ptr(), kwargs.ptr(), call);
  CheckForResults(kName, call, 3);
  Outputs outputs;
  const nb::object o = OutputOf(kName, call, outputs.o);
  nb::object state;
  if (call.return_state) state = NewState(kName, call, outputs.final);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kName, kRenamed, [&] { Forward(ctx, call.in, call.options, outputs); });
  if (!call.return_state) return o;
  return nb::make_tuple(o, state);
}

nb::object RunBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  Call call;
  Read<Call>(kBackwardName, kBackwardKeywords, 5, args.ptr(), kwargs.ptr(), call);
  if (!call.in.d_o.present()) FailMissing(kBackwardName, "do");
  CheckForResults(kBackwardName, call, 3);
  Gradients& out = call.gradients;
  nb::list results;
  results.append(NewLike(kBackwardName, call.in.x, out.dx));
  const auto parameter = [&](const ConstTensorView& x, TensorView& view) {
    if (!x.present()) return results.append(nb::none());
    NewArray array(kBackwardName, x.dtype(), x.sizes());
    view = array.view;
    results.append(array.array);
  };
  parameter(call.in.weight, out.dweight);
  parameter(call.in.bias, out.dbias);
  if (call.in.initial.present()) {
    results.append(NewState(kBackwardName, call, out.dinitial));
  } else {
    results.append(nb::none());
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kBackwardName, kRenamed, [&] { Backward(ctx, call.in, call.options, out); });
  return NewNamedTuple(type, nb::tuple(results));
}

nb::object RunStep(const nb::args& args, const nb::kwargs& kwargs) {
  Call call;
  Read<Call>(kStepName, kStepKeywords, 4, args.ptr(), kwargs.ptr(), call);
  CheckForResults(kStepName, call, 2);
  if (!call.state.present()) FailMissing(kStepName, "state");
  TensorView o;
  const nb::object result = OutputOf(kStepName, call, o);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kStepName, kRenamed, [&] {
    Step(ctx, {call.in.x, call.in.weight, call.in.bias}, call.options, call.state, o);
  });
  return result;
}

constexpr Renamed kTorchRenamed[] = {{"o", "out"},
                                     {"d_o", "the gradient of o"},
                                     {"d_state", "the gradient of the state"}};

void RunTorch(const nb::args& args) {
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kName, kTorchKeywords, std::size(kTorchKeywords), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(call.num_threads);
  Compute(kName, kTorchRenamed,
          [&] { Forward(ctx, call.in, call.options, {call.out_view, call.state}); });
}

void RunTorchBackward(const nb::args& args) {
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kName, kTorchBackwardKeywords, std::size(kTorchBackwardKeywords), args.ptr(),
             nullptr, call);
  Context& ctx = TorchContext(call.num_threads);
  Compute(kName, kTorchRenamed,
          [&] { Backward(ctx, call.in, call.options, call.gradients); });
}

nb::dict RunExplain(DType dtype, int num_threads, PyObject* kwargs) {
  Call call;
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  Read<Call>(kName, kForwardKeywords, 3, nullptr, kwargs, call);
  CheckForResults(kName, call, 3);
  const Context& ctx = ThreadContext(num_threads);
  Explanation e;
  Compute(kName, kRenamed, [&] { e = Explain(ctx, call.in, call.options); });
  return Described(e.kernel, e.target, e.why, e.flops, e.bytes, e.workspace_bytes, 0, false,
                   call.arrays.copied());
}

// Signatures for the type stub.
#define ARRAY "Array"
#define INPUTS "x: " ARRAY ", weight: " ARRAY ", bias: " ARRAY " | None"
#define ACTIVATION "activation: typing.Literal['silu', 'swish'] | None = None, "
#define INTS(name) name ": Ints | None = None, "
#define TOKENS \
  INTS("lengths") INTS("starts") INTS("cu_seqlens") "reverse: bool = False, "
#define FORWARD(returns, result)                                                       \
  "def causal_conv1d(" INPUTS " = None, *, " ACTIVATION "initial_state: " ARRAY        \
  " | None = None, return_state: " returns ", " TOKENS                                 \
  "out: OutArray | None = None, threads: int | None = None) -> " result

constexpr char kForwardSignature[] =
    FORWARD("typing.Literal[False] = False", "Result");
constexpr char kStateSignature[] =
    FORWARD("typing.Literal[True]", "tuple[Result, Result]");
constexpr char kBackwardSignature[] =
    "def causal_conv1d_backward(do: " ARRAY ", " INPUTS " = None, dstate: " ARRAY
    " | None = None, *, " ACTIVATION "initial_state: " ARRAY " | None = None, " TOKENS
    "threads: int | None = None) -> CausalConv1dGradients";
constexpr char kStepSignature[] =
    "def causal_conv1d_step(" INPUTS ", state: OutArray, *, " ACTIVATION
    "out: OutArray | None = None, threads: int | None = None) -> "
    "Result";

constexpr Said kInPython[] = {
    {"activation", "'silu', which is 'swish' too, or None"},
    {"initial_state", "[B, D, W - 1]: the inputs before the first token, oldest first; f32, or f64 "
                      "beside f64; absent: zeros"}};
constexpr Said kOfOneToken[] = {
    {"x", "[B, D]: one token of each sequence"},
    {"state", "what a call with return_state=True returned, updated in place: [B, D, W - 1]"}};

constexpr char kForwardText[] = R"(
Any strides are read in place; x of shape [B, T, D] transposed is as good as [B, D, T], and o
then lies in memory as x does. Returns o, [B, D, T], or (o, state) with return_state=True, as
NumPy arrays.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> x = rng.standard_normal((1, 8, 6), np.float32)
  >>> weight = rng.standard_normal((8, 4), np.float32)
  >>> o, state = heed.causal_conv1d(x, weight, activation="silu", return_state=True)
  >>> o.shape, state.shape
  ((1, 8, 6), (1, 8, 3)))";
constexpr char kBackwardText[] = R"(
Returns the named tuple heed.CausalConv1dGradients: dx dweight dbias dinitial_state, NumPy
arrays in the shape and dtype of what they are the gradients of; None where that was not given.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, x = rng.standard_normal((2, 1, 8, 6), np.float32)
  >>> weight = rng.standard_normal((8, 4), np.float32)
  >>> heed.causal_conv1d_backward(do, x, weight).dweight.shape
  (8, 4))";
constexpr char kStepText[] = R"(
Returns o, [B, D].

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> x = rng.standard_normal((1, 8, 6), np.float32)
  >>> weight = rng.standard_normal((8, 4), np.float32)
  >>> o, state = heed.causal_conv1d(x[:, :, :5], weight, return_state=True)
  >>> heed.causal_conv1d_step(x[:, :, 5], weight, None, state).shape
  (1, 8))";

}  // namespace

void Bind(nb::module_& m) {
  const nb::object gradients =
      NamedTupleType(m, "CausalConv1dGradients", "dx dweight dbias dinitial_state",
                     GradientsDoc(kBackwardName));
  const std::string forward = Docstring(doc::kForward, kForwardSignature,
                                        {kInPython, doc::kCausalConv1dFields}, kForwardText),
                    backward = Docstring(doc::kBackward, kBackwardSignature,
                                         {kInPython, doc::kCausalConv1dFields}, kBackwardText),
                    step = Docstring(doc::kStep, kStepSignature,
                                     {kOfOneToken, kInPython, doc::kCausalConv1dFields}, kStepText);
  m.def(kName, &RunForward, nb::sig(kForwardSignature), forward.c_str());
  m.def(kName, &RunForward, nb::sig(kStateSignature), forward.c_str());
  m.def(kBackwardName,
        [gradients](const nb::args& args, const nb::kwargs& kwargs) {
          return RunBackward(gradients, args, kwargs);
        },
        nb::sig(kBackwardSignature), backward.c_str());
  m.def(kStepName, &RunStep, nb::sig(kStepSignature), step.c_str());
  m.def("_torch_causal_conv1d", &RunTorch);
  m.def("_torch_causal_conv1d_backward", &RunTorchBackward);
  RegisterExplain(kName, &RunExplain);
}

}  // namespace heed::causal_conv1d

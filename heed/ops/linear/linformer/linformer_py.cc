// heed.linformer and heed.linformer_backward, and the functions behind PyTorch's operators.
#include "heed/ops/linear/linformer/linformer.h"

#include <cstddef>
#include <iterator>
#include <string>
#include <utility>

#include "docstrings/linformer.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::linformer {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "linformer", kBackwardOp[] = "linformer_backward";
constexpr Renamed kRenamed[] = {{"o", "out"}, {"d_o", "do"}};
constexpr Renamed kTorchRenamed[] = {{"d_o", "the gradient of o"}};

struct Call {
  Arrays arrays;
  BackwardInputs in;
  Options options;
  Gradients gradients;  // PyTorch's
  nb::handle out;
  TensorView out_view;
  bool describe = false;
  int num_threads = 0;
};

template <ConstTensorView Inputs::*kField>
void ReadTensor(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}
template <ConstTensorView Inputs::*kField>
void ReadMatrix(Call& call, const Argument& a) {  // any strides
  call.in.*kField = call.arrays.ReadInPlace(a, Kind::kFloat);
}
void ReadGradient(Call& call, const Argument& a) {
  call.in.d_o = call.arrays.Read(a, Kind::kFloat);
}
template <ConstTensorView Options::*kField>
void ReadInts(Call& call, const Argument& a) {
  call.options.*kField = call.arrays.ReadList(a, Kind::kInt);
}
template <TensorView Gradients::*kField>
void WriteGradient(Call& call, const Argument& a) {
  call.gradients.*kField = call.arrays.Write(a, Kind::kFloat);
}
void ReadOut(Call& call, const Argument& a) {
  if (call.describe) return;
  call.out = a.value;
  call.out_view = call.arrays.Write(a, Kind::kFloat);
}

constexpr Keyword<Call> kQ = {"q", false, &ReadTensor<&Inputs::q>};
constexpr Keyword<Call> kK = {"k", false, &ReadTensor<&Inputs::k>};
constexpr Keyword<Call> kV = {"v", false, &ReadTensor<&Inputs::v>};
constexpr Keyword<Call> kE = {"e", false, &ReadMatrix<&Inputs::e>};
constexpr Keyword<Call> kF = {"f", false, &ReadMatrix<&Inputs::f>};
constexpr Keyword<Call> kScale = {
    "scale", true, [](Call& c, const Argument& a) { c.options.scale = ToFinite(a); }};
constexpr Keyword<Call> kLengths = {"lengths", true, &ReadInts<&Options::lengths>};
constexpr Keyword<Call> kStarts = {"starts", true, &ReadInts<&Options::starts>};
constexpr Keyword<Call> kPacked = {"cu_seqlens", true, &ReadInts<&Options::cu_seqlens>};
constexpr Keyword<Call> kThreads = {
    "threads", true, [](Call& c, const Argument& a) {
      c.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads));
    }};
constexpr Keyword<Call> kOut = {"out", true, &ReadOut};

constexpr Keyword<Call> kForward[] = {kQ,     kK,       kV,      kE,      kF,      kScale,
                                      kLengths, kStarts, kPacked, kThreads, kOut};
constexpr Keyword<Call> kBackward[] = {{"do", false, &ReadGradient},
                                       kQ, kK, kV, kE, kF, kScale, kLengths, kStarts,
                                       kPacked, kThreads};
// PyTorch's operators take all by position, results among them.
constexpr Keyword<Call> kTorchBackward[] = {
    {"the gradient of o", false, &ReadGradient}, kQ, kK, kV, kE, kF, kScale, kLengths, kStarts,
    kPacked, kThreads,
    {"dq", true, &WriteGradient<&Gradients::dq>},
    {"dk", true, &WriteGradient<&Gradients::dk>},
    {"dv", true, &WriteGradient<&Gradients::dv>},
    {"de", true, &WriteGradient<&Gradients::de>},
    {"df", true, &WriteGradient<&Gradients::df>}};
constexpr size_t kInputs = 5;

void RequireInputs(const char* op, const Call& call) {
  const Inputs& in = call.in;
  const struct {
    const char* name;
    const ConstTensorView& view;
  } all[] = {{"q", in.q}, {"k", in.k}, {"v", in.v}, {"e", in.e}, {"f", in.f}};
  for (const auto& [name, view] : all) {
    if (!view.present()) FailMissing(op, name);
  }
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  Call call;
  Read<Call>(kOp, kForward, kInputs, args.ptr(), kwargs.ptr(), call);
  RequireInputs(kOp, call);
  nb::object o;
  TensorView view = call.out_view;
  if (call.out.is_valid()) {
    o = nb::borrow(call.out);
  } else {
    NewArray array(kOp, call.in.q.dtype(), call.in.v.sizes());
    view = array.view;
    o = std::move(array.array);
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kOp, kRenamed, [&] { Forward(ctx, call.in, call.options, {view}); });
  return o;
}

nb::object RunBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  Call call;
  Read<Call>(kBackwardOp, kBackward, kInputs + 1, args.ptr(), kwargs.ptr(), call);
  if (!call.in.d_o.present()) FailMissing(kBackwardOp, "do");
  RequireInputs(kBackwardOp, call);
  const auto like = [&](const ConstTensorView& x) {
    return NewArray(kBackwardOp, x.dtype(), x.sizes());
  };
  const NewArray dq = like(call.in.q), dk = like(call.in.k), dv = like(call.in.v),
                 de = like(call.in.e), df = like(call.in.f);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kBackwardOp, kRenamed, [&] {
    Backward(ctx, call.in, call.options, {dq.view, dk.view, dv.view, de.view, df.view});
  });
  return NewNamedTuple(
      type, nb::make_tuple(dq.array, dk.array, dv.array, de.array, df.array));
}

void RunTorch(const nb::args& args) {
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kOp, kForward, std::size(kForward), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(call.num_threads);
  Compute(kOp, kTorchRenamed,
          [&] { Forward(ctx, call.in, call.options, {call.out_view}); });
}

void RunTorchBackward(const nb::args& args) {
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kOp, kTorchBackward, std::size(kTorchBackward), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(call.num_threads);
  Compute(kOp, kTorchRenamed,
          [&] { Backward(ctx, call.in, call.options, call.gradients); });
}

nb::dict RunExplain(DType dtype, int num_threads, PyObject* kwargs) {
  Call call;
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  Read<Call>(kOp, kForward, kInputs, nullptr, kwargs, call);
  RequireInputs(kOp, call);
  const Context& ctx = ThreadContext(num_threads);
  Explanation x;
  Compute(kOp, kRenamed, [&] { x = Explain(ctx, call.in, call.options); });
  return Described(x.kernel, x.target, x.why, x.flops, x.bytes, x.workspace_bytes,
                   x.visited_pairs, false, call.arrays.copied());
}

constexpr char kOptionsSignature[] =
    "scale: float | None = None, lengths: Ints | None = None, "
    "starts: Ints | None = None, cu_seqlens: Ints | None = None, ";

constexpr char kInPython[] = R"(
Of q, k and v an array whose last axis is not contiguous is copied; e and f are read as they
lie. Returns o, in the shape of v, as a NumPy array.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 64, 2, 8), np.float32)
  >>> e, f = rng.standard_normal((2, 16, 64), np.float32) / 8
  >>> heed.linformer(q, k, v, e, f).shape
  (1, 64, 2, 8))";

constexpr char kBackwardInPython[] = R"(
Returns the named tuple heed.LinformerGradients: dq dk dv de df, NumPy arrays in the shape and
dtype of what they are the gradients of.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, k, v = rng.standard_normal((4, 1, 64, 2, 8), np.float32)
  >>> e, f = rng.standard_normal((2, 16, 64), np.float32) / 8
  >>> heed.linformer_backward(do, q, k, v, e, f).de.shape
  (16, 64))";

}  // namespace

void Bind(nb::module_& m) {
  const std::string inputs =
      "q: Array, k: Array, v: Array, "
      "e: Array, f: Array, *, ";
  // Signatures live as long as the module.
  static const std::string forward = "def linformer(" + inputs + kOptionsSignature +
                                     "out: OutArray | None = None, "
                                     "threads: int | None = None) -> Result";
  static const std::string backward =
      "def linformer_backward(do: Array, " + inputs + kOptionsSignature +
      "threads: int | None = None) -> LinformerGradients";
  m.def(kOp, &RunForward, nb::sig(forward.c_str()),
        Docstring(doc::kForward, forward, {doc::kLinformerFields}, kInPython).c_str());
  const nb::object gradients =
      NamedTupleType(m, "LinformerGradients", "dq dk dv de df", GradientsDoc(kBackwardOp));
  m.def(kBackwardOp,
        [gradients](const nb::args& args, const nb::kwargs& kwargs) {
          return RunBackward(gradients, args, kwargs);
        },
        nb::sig(backward.c_str()),
        Docstring(doc::kBackward, backward, {doc::kLinformerFields}, kBackwardInPython).c_str());
  m.def("_torch_linformer", &RunTorch);
  m.def("_torch_linformer_backward", &RunTorchBackward);
  // What other layers read instead of a list of their own.
  if (!nb::hasattr(m, "_stateless")) m.attr("_stateless") = nb::dict();
  nb::list tensors;
  for (size_t i = 0; i < kInputs; ++i) tensors.append(kForward[i].name);
  nb::cast<nb::dict>(m.attr("_stateless"))[kOp] = tensors;
  RegisterExplain(kOp, &RunExplain);
}

}  // namespace heed::linformer

// heed.nsa and heed.nsa_backward, and the functions behind PyTorch's operators.
#include "heed/ops/sparse/nsa/nsa.h"

#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "docstrings/nsa.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/layout.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::nsa {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "nsa", kBackwardOp[] = "nsa_backward";

// The arguments of one call.
struct Call {
  Arrays arrays;
  BackwardInputs in;
  Options options;
  Outputs results;      // out, and PyTorch's outputs
  Gradients gradients;  // for PyTorch
  nb::handle out;
  bool describe = false;  // for explain, which ignores `out`
  int num_threads = 0;
};

using Word = Keyword<Call>;
using Words = std::vector<Word>;

template <auto kField>
void ReadTensor(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}
template <TensorView Gradients::* kField>
void WriteGradient(Call& call, const Argument& a) {
  call.gradients.*kField = call.arrays.Write(a, Kind::kFloat);
}
template <TensorView Outputs::* kField>
void WriteResult(Call& call, const Argument& a) {
  call.results.*kField = call.arrays.Write(a, kField == &Outputs::blocks ? Kind::kInt : Kind::kFloat);
}
template <int64_t Options::* kField, int64_t kLeast>
void ReadCount(Call& call, const Argument& a) {
  call.options.*kField = ToInt(a, kLeast, INT64_MAX);
}
void ReadScale(Call& call, const Argument& a) { call.options.scale = ToFinite(a); }
void ReadOut(Call& call, const Argument& a) {
  if (call.describe) return;
  call.out = a.value;
  call.results.o = call.arrays.Write(a, Kind::kFloat);
}
void ReadThreads(Call& call, const Argument& a) { call.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads)); }

void ReadCompressed(Call& call, const Argument& a) {
  constexpr char kExpected[] = "a pair (k_cmp, v_cmp), or None";
  if (!PySequence_Check(a.value.ptr()) || PySequence_Size(a.value.ptr()) != 2) Fail(a, kExpected);
  const nb::object first = nb::steal(PySequence_GetItem(a.value.ptr(), 0)),
                   second = nb::steal(PySequence_GetItem(a.value.ptr(), 1));
  if (!first.is_valid() || !second.is_valid()) throw nb::python_error();
  call.in.k_cmp = call.arrays.Read({a.operation, "compressed[0]", first}, Kind::kFloat);
  call.in.v_cmp = call.arrays.Read({a.operation, "compressed[1]", second}, Kind::kFloat);
}

constexpr Word kInputs[] = {{"q", false, &ReadTensor<&BackwardInputs::q>},
                            {"k", false, &ReadTensor<&BackwardInputs::k>},
                            {"v", false, &ReadTensor<&BackwardInputs::v>},
                            {"gates", false, &ReadTensor<&BackwardInputs::gates>}};
constexpr Word kCompressed[] = {{"compressed", true, &ReadCompressed}};
constexpr Word kOptions[] = {
    {"block", false, &ReadCount<&Options::block, 1>},  {"stride", true, &ReadCount<&Options::stride, 1>},
    {"count", false, &ReadCount<&Options::count, 1>},  {"window", false, &ReadCount<&Options::window, 1>},
    {"length", true, &ReadCount<&Options::length, 1>}, {"scale", true, &ReadScale}};
constexpr Word kOut[] = {{"out", true, &ReadOut}};
constexpr Word kThreads[] = {{"threads", true, &ReadThreads}};
constexpr Word kGradientOfO[] = {{"do", false, &ReadTensor<&BackwardInputs::d_o>}};

constexpr Word kTorchCompressed[] = {{"compressed[0]", true, &ReadTensor<&BackwardInputs::k_cmp>},
                                     {"compressed[1]", true, &ReadTensor<&BackwardInputs::v_cmp>}};
constexpr Word kTorchResults[] = {{"o", false, &WriteResult<&Outputs::o>},
                                  {"branches", false, &WriteResult<&Outputs::branches>},
                                  {"lse", false, &WriteResult<&Outputs::lse>},
                                  {"blocks", false, &WriteResult<&Outputs::blocks>}};
constexpr Word kTorchIncoming[] = {{"the gradient of o", false, &ReadTensor<&BackwardInputs::d_o>}};
constexpr Word kTorchSaved[] = {
    {"branches", false, &ReadTensor<&BackwardInputs::branches>},
    {"lse", false, &ReadTensor<&BackwardInputs::lse>},
    {"blocks", false, [](Call& call, const Argument& a) { call.in.blocks = call.arrays.Read(a, Kind::kInt); }}};
constexpr Word kTorchGradients[] = {
    {"dq", true, &WriteGradient<&Gradients::dq>},         {"dk", true, &WriteGradient<&Gradients::dk>},
    {"dv", true, &WriteGradient<&Gradients::dv>},         {"dgates", true, &WriteGradient<&Gradients::dgates>},
    {"dk_cmp", true, &WriteGradient<&Gradients::dk_cmp>}, {"dv_cmp", true, &WriteGradient<&Gradients::dv_cmp>}};

// Reads a call of Python; required arguments are present afterwards, with the rank and dtype that determine the
// results.
void ReadCall(const char* op, const Words& words, size_t num_positional, PyObject* args, PyObject* kwargs, Call& call) {
  Read<Call>(op, words, num_positional, args, kwargs, call);
  const BackwardInputs& in = call.in;
  for (const auto& [name, x, shape] : {std::tuple{"q", in.q, "[B, Tq, Hq, D]"},
                                       {"k", in.k, "[B, Tk, Hkv, D]"},
                                       {"v", in.v, "[B, Tk, Hkv, Dv]"},
                                       {"gates", in.gates, "[B, Tq, Hq, 3]"}}) {
    if (!x.present()) FailMissing(op, name);
    if (x.rank() != 4) Fail(op, name, "has shape " + x.ShapeString(), shape);
  }
  if (!IsFloat(in.q.dtype())) Fail(op, "q", std::string("has dtype ") + Name(in.q.dtype()), "f64, f32, bf16 or f16");
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<Call>({kInputs, kOptions, kCompressed, kOut, kThreads});
  Call call;
  ReadCall(kOp, words, std::size(kInputs), args.ptr(), kwargs.ptr(), call);
  const BackwardInputs& in = call.in;
  WarnOfHeadsBeforeTokens(kOp, in.q, in.k, in.v);
  nb::object o = nb::borrow(call.out);
  if (!o.is_valid()) {
    NewArray array(kOp, in.q.dtype(), std::vector<int64_t>{in.q.size(0), in.q.size(1), in.q.size(2), in.v.size(3)});
    call.results.o = array.view;
    o = std::move(array.array);
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kOp, [&] { Forward(ctx, in, call.options, call.results); });
  return o;
}

nb::object RunBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<Call>({kGradientOfO, kInputs, kOptions, kCompressed, kThreads});
  Call call;
  ReadCall(kBackwardOp, words, std::size(kInputs) + 1, args.ptr(), kwargs.ptr(), call);
  BackwardInputs& in = call.in;
  if (!in.d_o.present()) FailMissing(kBackwardOp, "do");
  Context& ctx = ThreadContext(call.num_threads);
  const auto like = [&](const ConstTensorView& x, TensorView& view) {
    if (!x.present()) return nb::object(nb::none());
    NewArray array(kBackwardOp, x.dtype(), x.sizes());
    view = array.view;
    return std::move(array.array);
  };
  Gradients g;
  const nb::object dq = like(in.q, g.dq), dk = like(in.k, g.dk), dv = like(in.v, g.dv),
                   dgates = like(in.gates, g.dgates);
  nb::object compressed = nb::none();
  if (in.k_cmp.present()) {
    const nb::object dk_cmp = like(in.k_cmp, g.dk_cmp), dv_cmp = like(in.v_cmp, g.dv_cmp);
    compressed = nb::make_tuple(dk_cmp, dv_cmp);
  }
  const int64_t B = in.q.size(0), Tq = in.q.size(1), Hq = in.q.size(2);
  const int64_t columns = Columns(call.options, in.k.size(1));
  const auto room = [](DType dtype, const std::vector<int64_t>& sizes) { return NewArray(kBackwardOp, dtype, sizes); };
  const NewArray o = room(in.q.dtype(), {B, Tq, Hq, in.v.size(3)}),
                 branches = room(in.q.dtype(), {3, B, Tq, Hq, in.v.size(3)});
  const NewArray lse = room(in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, {3, B, Hq, Tq});
  const NewArray blocks = room(DType::kI32, {B, Tq, in.k.size(2), columns});
  Compute(kBackwardOp, [&] {
    Forward(ctx, in, call.options, {o.view, branches.view, lse.view, blocks.view});
    in.branches = branches.view;
    in.lse = lse.view;
    in.blocks = blocks.view;
    Backward(ctx, in, call.options, g);
  });
  return NewNamedTuple(type, nb::make_tuple(dq, dk, dv, dgates, compressed));
}

void RunTorch(const nb::args& args) {
  static const Words words = Joined<Call>({kInputs, kTorchCompressed, kTorchResults, kOptions, kThreads});
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kOp, words, words.size(), args.ptr(), nullptr, call);
  WarnOfHeadsBeforeTokens(kOp, call.in.q, call.in.k, call.in.v);
  Context& ctx = TorchContext(call.num_threads);
  ComputeForTorch(kOp, [&] { Forward(ctx, call.in, call.options, call.results); });
}

void RunTorchBackward(const nb::args& args) {
  static const Words words =
      Joined<Call>({kTorchIncoming, kInputs, kTorchCompressed, kTorchSaved, kTorchGradients, kOptions, kThreads});
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kOp, words, words.size(), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(call.num_threads);
  ComputeForTorch(kOp, [&] { Backward(ctx, call.in, call.options, call.gradients); });
}

nb::dict RunExplain(DType dtype, int num_threads, PyObject* kwargs) {
  static const Words words = Joined<Call>({kInputs, kOptions, kCompressed, kOut, kThreads});
  Call call;
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  ReadCall(kOp, words, std::size(kInputs), nullptr, kwargs, call);
  const Context& ctx = ThreadContext(num_threads);
  Explanation x;
  Compute(kOp, [&] { x = Explain(ctx, call.in, call.options); });
  return Described(x.kernel, x.target, x.why, x.flops, x.bytes, x.workspace_bytes, x.visited_pairs, x.invariant,
                   call.arrays.copied());
}

constexpr Said kSaid[] = {
    {"stride", "tokens between the starts of consecutive windows; None: block"},
    {"length", "tokens per compressed window; None: block"},
    {"compressed",
     "(k_cmp, v_cmp), [B, N, Hkv, D] and [B, N, Hkv, Dv]: compressed keys and values of each window; None: "
     "their means"},
};

constexpr char kInPython[] = R"(
An array whose last axis is not contiguous is copied, others are read in place. Returns o, a NumPy array.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 256, 2, 8), np.float32)
  >>> gates = np.zeros((1, 256, 2, 3), np.float32)
  >>> gates[..., 1] = 1
  >>> o = heed.nsa(q, k, v, gates, block=16, count=16)  # all blocks
  >>> bool(np.allclose(o, heed.attention(q, k, v, causal=True), atol=1e-6))
  True)";

constexpr char kBackwardInPython[] = R"(
The forward pass is recomputed. Returns the named tuple heed.NSAGradients: dq dk dv dgates dcompressed, NumPy arrays
in the shape and dtype of what they are the gradients of; dcompressed is a pair, None where compressed was not given.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, k, v = rng.standard_normal((4, 1, 64, 2, 8), np.float32)
  >>> g = heed.nsa_backward(do, q, k, v, np.ones((1, 64, 2, 3), np.float32), block=8, count=4, window=16)
  >>> g.dgates.shape, g.dcompressed is None
  ((1, 64, 2, 3), True))";

constexpr char kSignatureOfOptions[] =
    "block: int = 64, stride: int | None = None, count: int = 16, window: int = 512, "
    "compressed: tuple[Array, Array] | None = None, length: int | None = None, scale: float | None = None, ";

}  // namespace

void Bind(nb::module_& m) {
  constexpr char kInputs[] = "q: Array, k: Array, v: Array, gates: Array, *, ";
  static const std::string forward = JoinedText(
      {"def nsa(", kInputs, kSignatureOfOptions, "out: OutArray | None = None, threads: int | None = None) -> Result"});
  static const std::string backward = JoinedText(
      {"def nsa_backward(do: Array, ", kInputs, kSignatureOfOptions, "threads: int | None = None) -> NSAGradients"});
  m.def(kOp, &RunForward, nb::sig(forward.c_str()),
        Docstring(doc::kForward, forward, {kSaid, doc::kNsaFields}, kInPython).c_str());
  const nb::object gradients =
      NamedTupleType(m, "NSAGradients", "dq dk dv dgates dcompressed", GradientsDoc(kBackwardOp));
  m.def(
      kBackwardOp,
      [gradients](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(gradients, args, kwargs); },
      nb::sig(backward.c_str()),
      Docstring(doc::kBackward, backward, {kSaid, doc::kNsaFields}, kBackwardInPython).c_str());
  m.def("_torch_nsa", &RunTorch);
  m.def("_torch_nsa_backward", &RunTorchBackward);
  RegisterExplain(kOp, &RunExplain);
}

}  // namespace heed::nsa

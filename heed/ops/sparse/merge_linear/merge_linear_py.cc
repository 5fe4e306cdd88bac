// heed.merge_linear and heed.merge_linear_backward, and the functions behind PyTorch's operators.
#include "heed/ops/sparse/merge_linear/merge_linear.h"

#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "docstrings/merge_linear.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::merge_linear {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "merge_linear", kBackwardOp[] = "merge_linear_backward";

struct Call {
  Arrays arrays;
  BackwardInputs in;
  TensorView out;       // for PyTorch
  Gradients gradients;  // for PyTorch
};
using Words = std::vector<Keyword<Call>>;

template <auto kField>
void ReadTensor(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.ReadInPlace(a, Kind::kFloat);
}
template <auto kField>
void ReadRows(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}
template <TensorView Gradients::* kField>
void WriteGradient(Call& call, const Argument& a) {
  call.gradients.*kField = call.arrays.Write(a, Kind::kFloat);
}
constexpr Keyword<Call> kGradientOfO[] = {{"do", false, &ReadRows<&BackwardInputs::d_o>}};
constexpr Keyword<Call> kTorchIncoming[] = {{"the gradient of the result", false, &ReadRows<&BackwardInputs::d_o>}};
constexpr Keyword<Call> kInputs[] = {
    {"o", false, &ReadRows<&BackwardInputs::o>},
    {"lse", false, &ReadTensor<&BackwardInputs::lse>},
    {"num", false, &ReadRows<&BackwardInputs::num>},
    {"den", false, &ReadTensor<&BackwardInputs::den>},
    {"gate", true, [](Call& call, const Argument& a) { call.in.gate = call.arrays.ReadList(a, Kind::kFloat); }}};
constexpr Keyword<Call> kTorchResult[] = {
    {"out", false, [](Call& call, const Argument& a) { call.out = call.arrays.Write(a, Kind::kFloat); }}};
constexpr Keyword<Call> kTorchGradients[] = {{"dexact", true, &WriteGradient<&Gradients::dexact>},
                                             {"dlse", true, &WriteGradient<&Gradients::dlse>},
                                             {"dnum", true, &WriteGradient<&Gradients::dnum>},
                                             {"dden", true, &WriteGradient<&Gradients::dden>},
                                             {"dgate", true, &WriteGradient<&Gradients::dgate>}};

void ReadCall(const char* op, const Words& words, size_t num_positional, const nb::args& args, const nb::kwargs& kwargs,
              Call& call) {
  Read<Call>(op, words, num_positional, args.ptr(), kwargs.ptr(), call);
  for (const auto& [name, x] :
       {std::pair{"o", call.in.o}, {"lse", call.in.lse}, {"num", call.in.num}, {"den", call.in.den}}) {
    if (!x.present()) FailMissing(op, name);
  }
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<Call>({kInputs});
  Call call;
  ReadCall(kOp, words, 4, args, kwargs, call);
  NewArray out(kOp, call.in.o.dtype(), call.in.o.sizes());
  Context& ctx = ThreadContext(0);
  Compute(kOp, [&] { Forward(ctx, call.in, out.view); });
  return out.array;
}

nb::object RunBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<Call>({kGradientOfO, kInputs});
  Call call;
  ReadCall(kBackwardOp, words, 5, args, kwargs, call);
  if (!call.in.d_o.present()) FailMissing(kBackwardOp, "do");
  const auto like = [](const ConstTensorView& x, TensorView& view) {
    if (!x.present()) return nb::object(nb::none());
    NewArray array(kBackwardOp, x.dtype(), x.sizes());
    view = array.view;
    return std::move(array.array);
  };
  Gradients g;
  const nb::object dexact = like(call.in.o, g.dexact), dlse = like(call.in.lse, g.dlse),
                   dnum = like(call.in.num, g.dnum);
  const nb::object dden = like(call.in.den, g.dden), dgate = like(call.in.gate, g.dgate);
  Context& ctx = ThreadContext(0);
  Compute(kBackwardOp, [&] { Backward(ctx, call.in, g); });
  return NewNamedTuple(type, nb::make_tuple(dexact, dlse, dnum, dden, dgate));
}

void RunTorch(const nb::args& args) {
  static const Words words = Joined<Call>({kInputs, kTorchResult});
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kOp, words, words.size(), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(0);
  Compute(kOp, [&] { Forward(ctx, call.in, call.out); });
}

void RunTorchBackward(const nb::args& args) {
  static const Words words = Joined<Call>({kTorchIncoming, kInputs, kTorchGradients});
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kOp, words, words.size(), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(0);
  ComputeForTorch(kOp, [&] { Backward(ctx, call.in, call.gradients); });
}

constexpr char kInPython[] = R"(
gate may be a list. Returns o, a NumPy array in the dtype of the exact part.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 100, 2, 8), np.float32)
  >>> o, lse = heed.attention(q, k, v, causal=True, window=(15, 0), return_lse=True)
  >>> back = lambda x: np.pad(x[:, :-16], ((0, 0), (16, 0), (0, 0), (0, 0)))  # what is older than the window
  >>> v1 = np.concatenate([v, np.ones_like(v[..., :1])], -1)
  >>> both = heed.linear_attention(np.exp(q), back(np.exp(k)), back(v1), feature_map="identity", normalize=False)
  >>> heed.merge_linear(o, lse, both[..., :-1], both[..., -1], gate=[0.5, 1]).shape
  (1, 100, 2, 8))";

constexpr char kBackwardInPython[] = R"(
Returns the named tuple heed.MergeLinearGradients: dexact dlse dnum dden dgate, NumPy arrays in the shape and dtype of
what they are the gradients of; dexact is that of o, dgate None where no gate was given.

Example:

  >>> import heed, numpy as np
  >>> do, o, num = np.ones((3, 1, 4, 2, 8), np.float32)
  >>> lse, den = np.zeros((1, 2, 4), np.float32), np.ones((1, 4, 2), np.float32)
  >>> float(heed.merge_linear_backward(do, o, lse, num, den).dexact[0, 0, 0, 0])
  0.5)";

constexpr Said kSaid[] = {{"do", "the gradient of the result, in its shape and dtype"}};

}  // namespace

void Bind(nb::module_& m) {
  static const char forward[] =
      "def merge_linear(o: Array, lse: Array, num: Array, den: Array, *, gate: Floats | None = None) -> Result";
  static const char backward[] =
      "def merge_linear_backward(do: Array, o: Array, lse: Array, num: Array, den: Array, *, "
      "gate: Floats | None = None) -> MergeLinearGradients";
  m.def(kOp, &RunForward, nb::sig(forward),
        Docstring(doc::kForward, forward, {kSaid, doc::kMergeLinearFields}, kInPython).c_str());
  const nb::object gradients =
      NamedTupleType(m, "MergeLinearGradients", "dexact dlse dnum dden dgate", GradientsDoc(kBackwardOp));
  m.def(
      kBackwardOp,
      [gradients](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(gradients, args, kwargs); },
      nb::sig(backward),
      Docstring(doc::kBackward, backward, {kSaid, doc::kMergeLinearFields}, kBackwardInPython).c_str());
  m.def("_torch_merge_linear", &RunTorch);
  m.def("_torch_merge_linear_backward", &RunTorchBackward);
}

}  // namespace heed::merge_linear

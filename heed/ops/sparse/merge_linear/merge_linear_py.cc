// heed.merge_linear and heed.merge_linear_backward, and the functions behind PyTorch's operators.
#include "heed/ops/sparse/merge_linear/merge_linear.h"

#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "docstrings/merge_linear.h"
#include "python/docstring.h"
#include "python/operation.h"

namespace heed::merge_linear {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "merge_linear", kBackwardOp[] = "merge_linear_backward";

struct NoOptions {};
struct Output {
  TensorView out;
};
using Call = OperationCall<BackwardInputs, NoOptions, Output, Gradients>;
using Words = std::vector<Keyword<Call>>;

constexpr Differentiable<Call> kTensors[] = {
    Rows<Call, &BackwardInputs::o, &Gradients::dexact>("o", "dexact"),
    InPlace<Call, &BackwardInputs::lse, &Gradients::dlse>("lse", "dlse"),
    Rows<Call, &BackwardInputs::num, &Gradients::dnum>("num", "dnum"),
    InPlace<Call, &BackwardInputs::den, &Gradients::dden>("den", "dden"),
    Numbers<Call, &BackwardInputs::gate, &Gradients::dgate>("gate", "dgate", true)};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
constexpr Keyword<Call> kGradientOfO[] = {{"do", false, &ReadRows<Call, &BackwardInputs::d_o>}};
constexpr Keyword<Call> kTorchIncoming[] = {
    {"the gradient of the result", false, &ReadRows<Call, &BackwardInputs::d_o>}};
constexpr Keyword<Call> kTorchResult[] = {{"out", false, &WriteResult<Call, &Output::out>}};

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
  return NewGradients<Call>(kBackwardOp, type, kTensors, call,
                            [&](Context& ctx) { Backward(ctx, call.in, call.gradients); });
}

void RunTorch(const nb::args& args) {
  static const Words words = Joined<Call>({kInputs, kTorchResult});
  RunForTorch<Call>(Caller::kPython, kOp, words, args,
                    [](Context& ctx, Call& call) { Forward(ctx, call.in, call.out.out); });
}

void RunTorchBackward(const nb::args& args) {
  static const Words words = Joined<Call>({kTorchIncoming, kInputs, kGradients});
  RunForTorch<Call>(Caller::kTorch, kBackwardOp, words, args,
                    [](Context& ctx, Call& call) { Backward(ctx, call.in, call.gradients); });
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
  const nb::object gradients = GradientsType<Call>(m, "MergeLinearGradients", kBackwardOp, kGradients);
  m.def(
      kBackwardOp,
      [gradients](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(gradients, args, kwargs); },
      nb::sig(backward),
      Docstring(doc::kBackward, backward, {kSaid, doc::kMergeLinearFields}, kBackwardInPython).c_str());
  m.def("_torch_merge_linear", &RunTorch);
  m.def("_torch_merge_linear_backward", &RunTorchBackward);
}

}  // namespace heed::merge_linear

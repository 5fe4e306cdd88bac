// heed.titans, its gradients and its step, and the functions behind PyTorch's operators.
#include "heed/ops/delta/titans/titans.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "docstrings/titans.h"
#include "python/docstring.h"
#include "python/operation.h"

namespace heed::titans {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "titans", kBackwardOp[] = "titans_backward", kStepOp[] = "titans_step";

struct Call : OperationCall<BackwardInputs, Options, Outputs, Gradients> {
  bool return_state = false;
};
using Word = Keyword<Call>;
using Words = std::vector<Word>;

constexpr Differentiable<Call> kTensors[] = {
    Rows<Call, &BackwardInputs::q, &Gradients::dq>("q", "dq"),
    Rows<Call, &BackwardInputs::k, &Gradients::dk>("k", "dk"),
    Rows<Call, &BackwardInputs::v, &Gradients::dv>("v", "dv"),
    InPlace<Call, &BackwardInputs::weight, &Gradients::dweight>("weight", "dweight"),
    InPlace<Call, &BackwardInputs::bias, &Gradients::dbias>("bias", "dbias"),
    InPlace<Call, &BackwardInputs::theta, &Gradients::dtheta>("theta", "dtheta"),
    InPlace<Call, &BackwardInputs::alpha, &Gradients::dalpha>("alpha", "dalpha"),
    InPlace<Call, &BackwardInputs::eta, &Gradients::deta>("eta", "deta"),
    InPlace<Call, &BackwardInputs::initial_state, &Gradients::dinitial_state>("initial_state", "dinitial_state", true)};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
constexpr Word kGradientOfO[] = {{"do", false, &ReadRows<Call, &BackwardInputs::d_o>}};
constexpr Word kState[] = {{"state", false, &WriteState<Call>}};
// The last input is a keyword, at another place of a call.
constexpr std::span<const Word> kAll = kInputs, kRequired = kAll.first(8), kInitialState = kAll.last(1);
constexpr Word kOptions[] = {
    {"mini_batch", false,
     [](Call& call, const Argument& a) { call.options.mini_batch = ToInt(a, 1, std::numeric_limits<int64_t>::max()); }},
    {"eps", false, &ReadOption<Call, &Options::eps>},
    {"scale", false, &ReadOption<Call, &Options::scale>},
    {"positions", true, &ReadInts<Call, &Options::positions>}};
constexpr Word kTokens[] = {{"lengths", true, &ReadInts<Call, &Options::lengths>},
                            {"starts", true, &ReadInts<Call, &Options::starts>},
                            {"cu_seqlens", true, &ReadInts<Call, &Options::cu_seqlens>}};
constexpr Word kReturns[] = {{"return_state", false, &ReadFlag<Call, &Call::return_state>}};
constexpr Word kGradientOfState[] = {{"dstate", true, &ReadTensor<Call, &BackwardInputs::d_final_state>}};
constexpr Word kThreads[] = {{"threads", true, &ReadThreads<Call>}};
constexpr Word kTorchResults[] = {{"o", false, &WriteResult<Call, &Outputs::o>},
                                  {"state", true, &WriteResult<Call, &Outputs::final_state>}};
constexpr Word kTorchIncoming[] = {
    {"the gradient of o", false, &ReadRows<Call, &BackwardInputs::d_o>},
    {"the gradient of the state", true, &ReadTensor<Call, &BackwardInputs::d_final_state>}};

// Reads a call; what determines the shapes of results is present afterwards, with its rank.
void ReadCall(const char* op, const Words& words, size_t num_positional, int rank, PyObject* args, PyObject* kwargs,
              Call& call) {
  Read<Call>(op, words, num_positional, args, kwargs, call);
  const std::string tokens = rank == 4 ? "T, " : "";
  for (const auto& [name, x, axes] :
       {std::tuple{"q", call.in.q, "H, K]"}, {"k", call.in.k, "H, K]"}, {"v", call.in.v, "H, V]"}}) {
    if (!x.present()) FailMissing(op, name);
    if (x.rank() != rank) Fail(op, name, "has shape " + x.ShapeString(), "[B, " + tokens + axes);
  }
  for (const auto& [name, x] : {std::pair{"weight", call.in.weight},
                                {"bias", call.in.bias},
                                {"theta", call.in.theta},
                                {"alpha", call.in.alpha},
                                {"eta", call.in.eta}}) {
    if (!x.present()) FailMissing(op, name);
  }
}

const Words& ForwardWords() {
  static const Words words = Joined<Call>({kRequired, kOptions, kInitialState, kTokens, kReturns, kThreads});
  return words;
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  Call call;
  ReadCall(kOp, ForwardWords(), 8, 4, args.ptr(), kwargs.ptr(), call);
  const BackwardInputs& in = call.in;
  const DType wide = in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  NewArray o(kOp, in.q.dtype(), in.q.sizes());
  Context& ctx = ThreadContext(call.num_threads);
  if (!call.return_state) {
    Compute(kOp, [&] { Forward(ctx, in, call.options, {o.view, {}}); });
    return o.array;
  }
  const ConstTensorView& bounds = call.options.cu_seqlens;
  const int64_t sequences = bounds.present() && bounds.rank() == 1 ? bounds.size(0) - 1 : in.q.size(0);
  const std::vector<int64_t> of_state = {std::max<int64_t>(sequences, 0), in.q.size(2), 3, in.q.size(3), in.q.size(3)};
  NewArray state(kOp, wide, of_state);
  Compute(kOp, [&] { Forward(ctx, in, call.options, {o.view, state.view}); });
  return nb::make_tuple(o.array, state.array);
}

nb::object RunBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words =
      Joined<Call>({kGradientOfO, kRequired, kOptions, kInitialState, kTokens, kGradientOfState, kThreads});
  Call call;
  ReadCall(kBackwardOp, words, 9, 4, args.ptr(), kwargs.ptr(), call);
  if (!call.in.d_o.present()) FailMissing(kBackwardOp, "do");
  return NewGradients<Call>(kBackwardOp, type, kTensors, call,
                            [&](Context& ctx) { Backward(ctx, call.in, call.options, call.gradients); });
}

nb::object RunStep(const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<Call>({kRequired, kState, kOptions, kThreads});
  Call call;
  ReadCall(kStepOp, words, 9, 3, args.ptr(), kwargs.ptr(), call);
  if (!call.state.present()) FailMissing(kStepOp, "state");
  NewArray o(kStepOp, call.in.q.dtype(), call.in.q.sizes());
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kStepOp, [&] { Step(ctx, call.in, call.options, call.state, o.view); });
  return o.array;
}

void RunTorch(const nb::args& args) {
  static const Words words = Joined<Call>({kRequired, kTorchResults, kOptions, kInitialState, kTokens, kThreads});
  RunForTorch<Call>(Caller::kTorch, kOp, words, args,
                    [](Context& ctx, Call& call) { Forward(ctx, call.in, call.options, call.out); });
}

void RunTorchBackward(const nb::args& args) {
  static const Words words =
      Joined<Call>({kTorchIncoming, kRequired, kGradients, kOptions, kInitialState, kTokens, kThreads});
  RunForTorch<Call>(Caller::kTorch, kBackwardOp, words, args,
                    [](Context& ctx, Call& call) { Backward(ctx, call.in, call.options, call.gradients); });
}

nb::dict RunExplain(DType dtype, int num_threads, PyObject* kwargs) {
  Call call;
  call.arrays.AllowShapes(dtype);
  ReadCall(kOp, ForwardWords(), 8, 4, nullptr, kwargs, call);
  return Explained(kOp, num_threads, call, &Explain);
}

constexpr char kInPython[] = R"(
Returns o, a NumPy array, or (o, state) with return_state=True.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 100, 2, 8))
  >>> weight, bias = np.ones((2, 8)), np.zeros((2, 8))
  >>> theta, alpha, eta = (np.full((1, 100, 2), x) for x in (0.005, 0.01, 0.5))
  >>> initial = np.zeros((1, 2, 3, 8, 8))
  >>> initial[:, :, 0] = rng.standard_normal((8, 8))
  >>> gates = theta, alpha, eta
  >>> o, state = heed.titans(q, k, v, weight, bias, *gates, initial_state=initial, return_state=True)
  >>> state.shape  # M, S, and the memory before the last 4 tokens, which began a mini-batch
  (1, 2, 3, 8, 8)
  >>> y = np.einsum("hk,hkv->hv", q[0, -1], state[0, :, 0])
  >>> normalised = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
  >>> bool(np.allclose(o[0, -1], y + normalised))
  True)";

constexpr char kBackwardInPython[] = R"(
dstate is the gradient of the returned state. Returns the named tuple heed.TitansGradients: dq dk dv dweight dbias
dtheta dalpha deta dinitial_state, NumPy arrays in the shape and dtype of what they are the gradients of, None for
inputs that were not given.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, k, v = rng.standard_normal((4, 1, 20, 2, 8))
  >>> weight, bias = np.ones((2, 8)), np.zeros((2, 8))
  >>> theta, alpha, eta = (np.full((1, 20, 2), x) for x in (0.005, 0.01, 0.5))
  >>> g = heed.titans_backward(do, q, k, v, weight, bias, theta, alpha, eta)
  >>> alpha[0, 18, 1] += 1e-6
  >>> after = heed.titans(q, k, v, weight, bias, theta, alpha, eta)
  >>> alpha[0, 18, 1] -= 2e-6
  >>> difference = (do * (after - heed.titans(q, k, v, weight, bias, theta, alpha, eta))).sum() / 2e-6
  >>> bool(np.isclose(g.dalpha[0, 18, 1], difference, rtol=1e-3)), g.dinitial_state is None
  (True, True))";

constexpr char kStepInPython[] = R"(
state is what a call with return_state=True returned, or zeros, updated in place. positions are the tokens so far.
Returns o, [B, H, V].

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 20, 2, 8))
  >>> weight, bias = np.ones((2, 8)), np.zeros((2, 8))
  >>> gates = [np.full((1, 20, 2), x) for x in (0.005, 0.01, 0.5)]
  >>> o = heed.titans(q, k, v, weight, bias, *gates)
  >>> state = np.zeros((1, 2, 3, 8, 8))
  >>> for t in range(20):
  ...   token = q[:, t], k[:, t], v[:, t], weight, bias, *(x[:, t] for x in gates)
  ...   o_t = heed.titans_step(*token, state, positions=[t])
  >>> bool(np.allclose(o_t, o[:, 19]))
  True)";

constexpr Said kSaid[] = {{"mini_batch", "tokens whose gradients are those of one memory"},
                          {"eps", "added to variances"},
                          {"scale", "factor of q"},
                          {"positions", "[B]: tokens before the first one, with a state; None: 0"},
                          {"initial_state", "[B, H, 3, K, V]: before the first token"},
                          {"dstate", "the gradient of the final state"},
                          {"state", "[B, H, 3, K, V], float32, or float64 for float64"},
                          {"return_state", "also return the state after the last token"}};

}  // namespace

void Bind(nb::module_& m) {
  constexpr char kInputs[] =
      "q: Array, k: Array, v: Array, weight: Array, bias: Array, theta: Array, "
      "alpha: Array, eta: Array, ";
  constexpr char kOptions[] =
      "*, mini_batch: int = 16, eps: float = 1e-06, scale: float = 1.0, positions: Ints | None = None, ";
  constexpr char kTokens[] =
      "initial_state: Array | None = None, lengths: Ints | None = None, starts: Ints | None = None, "
      "cu_seqlens: Ints | None = None, ";
  static const std::string forward =
      JoinedText({"def titans(", kInputs, kOptions, kTokens,
                  "return_state: bool = False, threads: int | None = None) -> Result | tuple[Result, Result]"});
  static const std::string backward =
      JoinedText({"def titans_backward(do: Array, ", kInputs, kOptions, kTokens,
                  "dstate: Array | None = None, threads: int | None = None) -> TitansGradients"});
  static const std::string step =
      JoinedText({"def titans_step(", kInputs, "state: OutArray, ", kOptions, "threads: int | None = None) -> Result"});
  m.def(kOp, &RunForward, nb::sig(forward.c_str()),
        Docstring(doc::kForward, forward, {kSaid, doc::kTitansFields}, kInPython).c_str());
  const nb::object gradients = GradientsType<Call>(m, "TitansGradients", kBackwardOp, kGradients);
  m.def(
      kBackwardOp,
      [gradients](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(gradients, args, kwargs); },
      nb::sig(backward.c_str()),
      Docstring(doc::kBackward, backward, {kSaid, doc::kTitansFields}, kBackwardInPython).c_str());
  m.def(kStepOp, &RunStep, nb::sig(step.c_str()),
        Docstring(doc::kStep, step, {kSaid, doc::kTitansFields}, kStepInPython).c_str());
  m.def("_torch_titans", &RunTorch);
  m.def("_torch_titans_backward", &RunTorchBackward);
  RegisterExplain(kOp, &RunExplain);
}

}  // namespace heed::titans

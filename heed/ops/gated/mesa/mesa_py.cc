// heed.mesa, its gradients and its step, and the functions behind PyTorch's operators.
#include "heed/ops/gated/mesa/mesa.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "docstrings/mesa.h"
#include "python/docstring.h"
#include "python/operation.h"

namespace heed::mesa {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "mesa", kBackwardOp[] = "mesa_backward", kStepOp[] = "mesa_step";

struct Call : OperationCall<BackwardInputs, Options, Outputs, Gradients> {
  bool return_state = false, return_solution = false;
};
using Word = Keyword<Call>;
using Words = std::vector<Word>;

constexpr Differentiable<Call> kTensors[] = {
    Rows<Call, &BackwardInputs::q, &Gradients::dq>("q", "dq"),
    Rows<Call, &BackwardInputs::k, &Gradients::dk>("k", "dk"),
    Rows<Call, &BackwardInputs::v, &Gradients::dv>("v", "dv"),
    InPlace<Call, &BackwardInputs::beta, &Gradients::dbeta>("beta", "dbeta"),
    InPlace<Call, &BackwardInputs::lamb, &Gradients::dlamb>("lamb", "dlamb"),
    InPlace<Call, &BackwardInputs::log_decay, &Gradients::dlog_decay>("log_decay", "dlog_decay", true),
    InPlace<Call, &BackwardInputs::initial_state, &Gradients::dinitial_state>("initial_state", "dinitial_state", true)};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
constexpr Word kGradientOfO[] = {{"do", false, &ReadRows<Call, &BackwardInputs::d_o>}};
constexpr Word kState[] = {{"state", false, &WriteState<Call>}};
// The last two inputs are keywords, at other places of a call.
constexpr std::span<const Word> kAll = kInputs, kRequired = kAll.first(5), kLogDecay = kAll.subspan(5, 1),
                                kInitialState = kAll.subspan(6, 1);
constexpr Word kOptions[] = {
    {"iterations", false,
     [](Call& call, const Argument& a) { call.options.iterations = ToInt(a, 1, std::numeric_limits<int64_t>::max()); }},
    {"eps", false, &ReadOption<Call, &Options::eps>}};
constexpr Word kTokens[] = {{"lengths", true, &ReadInts<Call, &Options::lengths>},
                            {"starts", true, &ReadInts<Call, &Options::starts>},
                            {"cu_seqlens", true, &ReadInts<Call, &Options::cu_seqlens>}};
constexpr Word kReturns[] = {{"return_state", false, &ReadFlag<Call, &Call::return_state>},
                             {"return_solution", false, &ReadFlag<Call, &Call::return_solution>}};
constexpr Word kGradientOfState[] = {{"dstate", true, &ReadTensor<Call, &BackwardInputs::d_final_state>},
                                     {"solution", true, &ReadRows<Call, &BackwardInputs::solution>}};
constexpr Word kThreads[] = {{"threads", true, &ReadThreads<Call>}};
constexpr Word kTorchResults[] = {{"o", false, &WriteResult<Call, &Outputs::o>},
                                  {"state", true, &WriteResult<Call, &Outputs::final_state>},
                                  {"solution", true, &WriteResult<Call, &Outputs::solution>}};
constexpr Word kTorchIncoming[] = {
    {"the gradient of o", false, &ReadRows<Call, &BackwardInputs::d_o>},
    {"the gradient of the state", true, &ReadTensor<Call, &BackwardInputs::d_final_state>},
    {"solution", true, &ReadRows<Call, &BackwardInputs::solution>}};

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
  if (!call.in.beta.present()) FailMissing(op, "beta");
  if (!call.in.lamb.present()) FailMissing(op, "lamb");
}

const Words& ForwardWords() {
  static const Words words = Joined<Call>({kRequired, kLogDecay, kOptions, kInitialState, kTokens, kReturns, kThreads});
  return words;
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  Call call;
  ReadCall(kOp, ForwardWords(), 5, 4, args.ptr(), kwargs.ptr(), call);
  const BackwardInputs& in = call.in;
  const DType wide = in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  NewArray o(kOp, in.q.dtype(), in.v.sizes());
  Context& ctx = ThreadContext(call.num_threads);
  const auto compute = [&](const TensorView& state, const TensorView& solution) {
    Compute(kOp, [&] { Forward(ctx, in, call.options, {o.view, state, solution}); });
  };
  if (!call.return_state && !call.return_solution) {
    compute({}, {});
    return o.array;
  }
  const ConstTensorView& bounds = call.options.cu_seqlens;
  const int64_t sequences = bounds.present() && bounds.rank() == 1 ? bounds.size(0) - 1 : in.q.size(0);
  const std::vector<int64_t> of_state = {std::max<int64_t>(sequences, 0), in.q.size(2), in.q.size(3),
                                         in.q.size(3) + in.v.size(3)};
  if (!call.return_solution) {
    NewArray state(kOp, wide, of_state);
    compute(state.view, {});
    return nb::make_tuple(o.array, state.array);
  }
  NewArray solution(kOp, wide, in.q.sizes());
  if (!call.return_state) {
    compute({}, solution.view);
    return nb::make_tuple(o.array, solution.array);
  }
  NewArray state(kOp, wide, of_state);
  compute(state.view, solution.view);
  return nb::make_tuple(o.array, state.array, solution.array);
}

nb::object RunBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words =
      Joined<Call>({kGradientOfO, kRequired, kLogDecay, kOptions, kInitialState, kTokens, kGradientOfState, kThreads});
  Call call;
  ReadCall(kBackwardOp, words, 6, 4, args.ptr(), kwargs.ptr(), call);
  const BackwardInputs& in = call.in;
  if (!in.d_o.present()) FailMissing(kBackwardOp, "do");
  return NewGradients<Call>(kBackwardOp, type, kTensors, call,
                            [&](Context& ctx) { Backward(ctx, call.in, call.options, call.gradients); });
}

nb::object RunStep(const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<Call>({kRequired, kState, kLogDecay, kOptions, kThreads});
  Call call;
  ReadCall(kStepOp, words, 6, 3, args.ptr(), kwargs.ptr(), call);
  if (!call.state.present()) FailMissing(kStepOp, "state");
  NewArray o(kStepOp, call.in.q.dtype(), call.in.v.sizes());
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kStepOp, [&] { Step(ctx, call.in, call.options, call.state, o.view); });
  return o.array;
}

void RunTorch(const nb::args& args) {
  static const Words words =
      Joined<Call>({kRequired, kTorchResults, kLogDecay, kOptions, kInitialState, kTokens, kThreads});
  RunForTorch<Call>(Caller::kTorch, kOp, words, args,
                    [](Context& ctx, Call& call) { Forward(ctx, call.in, call.options, call.out); });
}

void RunTorchBackward(const nb::args& args) {
  static const Words words =
      Joined<Call>({kTorchIncoming, kRequired, kGradients, kLogDecay, kOptions, kInitialState, kTokens, kThreads});
  RunForTorch<Call>(Caller::kTorch, kBackwardOp, words, args,
                    [](Context& ctx, Call& call) { Backward(ctx, call.in, call.options, call.gradients); });
}

nb::dict RunExplain(DType dtype, int num_threads, PyObject* kwargs) {
  Call call;
  call.arrays.AllowShapes(dtype);
  ReadCall(kOp, ForwardWords(), 5, 4, nullptr, kwargs, call);
  return Explained(kOp, num_threads, call, &Explain);
}

constexpr char kInPython[] = R"(
Returns o, a NumPy array; with return_state=True or return_solution=True a tuple of o, the state and the solution.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 100, 2, 8))
  >>> beta, lamb = rng.random((1, 100, 2)), np.ones((2, 8))
  >>> o = heed.mesa(q, k, v, beta, lamb)
  >>> K, V = k[0, :, 1], v[0, :, 1]
  >>> H = K.T @ (beta[0, :, 1, None] * np.hstack([K, V]))  # the last token of a head
  >>> bool(np.allclose(o[0, -1, 1], H[:, 8:].T @ np.linalg.solve(H[:, :8] + np.eye(8), q[0, -1, 1])))
  True)";

constexpr char kBackwardInPython[] = R"(
dstate is the gradient of the returned state, solution what return_solution=True returned. Returns the named tuple
heed.MesaGradients: dq dk dv dbeta dlamb dlog_decay dinitial_state, NumPy arrays in the shape and dtype of what they are
the gradients of, None for inputs that were not given.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, k, v = rng.standard_normal((4, 1, 100, 2, 8))
  >>> beta, lamb = rng.random((1, 100, 2)), np.ones((2, 8))
  >>> o, x = heed.mesa(q, k, v, beta, lamb, return_solution=True)
  >>> g = heed.mesa_backward(do, q, k, v, beta, lamb, solution=x)
  >>> bool(np.isclose((g.dq * q).sum(), (do * o).sum())), g.dlog_decay is None
  (True, True))";

constexpr char kStepInPython[] = R"(
state is what a call with return_state=True returned, or zeros, updated in place. Returns o, [B, H, V].

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 5, 2, 8))
  >>> beta, lamb = rng.random((1, 5, 2)), np.ones((2, 8))
  >>> o = heed.mesa(q, k, v, beta, lamb)
  >>> state = np.zeros((1, 2, 8, 16))
  >>> for t in range(5):
  ...   o_t = heed.mesa_step(q[:, t], k[:, t], v[:, t], beta[:, t], lamb, state)
  >>> bool(np.allclose(o_t, o[:, 4]))
  True)";

constexpr Said kSaid[] = {{"log_decay", "natural logarithms of decay factors, <= 0; None: 0"},
                          {"iterations", "steps of conjugate gradients"},
                          {"eps", "added to the denominators of the solver"},
                          {"initial_state", "[B, H, K, K + V]: before the first token"},
                          {"dstate", "the gradient of the final state"},
                          {"solution", "the solutions of the forward pass; None: solved again"},
                          {"state", "[B, H, K, K + V], float32, or float64 for float64"},
                          {"return_state", "also return the state after the last token"},
                          {"return_solution", "also return the solutions x"}};

}  // namespace

void Bind(nb::module_& m) {
  constexpr char kInputs[] = "q: Array, k: Array, v: Array, beta: Array, lamb: Array, ";
  constexpr char kOptions[] = "*, log_decay: Array | None = None, iterations: int = 30, eps: float = 0.0, ";
  constexpr char kTokens[] =
      "initial_state: Array | None = None, lengths: Ints | None = None, starts: Ints | None = None, "
      "cu_seqlens: Ints | None = None, ";
  static const std::string forward =
      JoinedText({"def mesa(", kInputs, kOptions, kTokens,
                  "return_state: bool = False, return_solution: bool = False, threads: int | None = None) -> "
                  "Result | tuple[Result, Result] | tuple[Result, Result, Result]"});
  static const std::string backward =
      JoinedText({"def mesa_backward(do: Array, ", kInputs, kOptions, kTokens,
                  "dstate: Array | None = None, solution: Array | None = None, threads: int | None = None) -> "
                  "MesaGradients"});
  static const std::string step =
      JoinedText({"def mesa_step(", kInputs, "state: OutArray, ", kOptions, "threads: int | None = None) -> Result"});
  m.def(kOp, &RunForward, nb::sig(forward.c_str()),
        Docstring(doc::kForward, forward, {kSaid, doc::kMesaFields}, kInPython).c_str());
  const nb::object gradients = GradientsType<Call>(m, "MesaGradients", kBackwardOp, kGradients);
  m.def(
      kBackwardOp,
      [gradients](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(gradients, args, kwargs); },
      nb::sig(backward.c_str()),
      Docstring(doc::kBackward, backward, {kSaid, doc::kMesaFields}, kBackwardInPython).c_str());
  m.def(kStepOp, &RunStep, nb::sig(step.c_str()),
        Docstring(doc::kStep, step, {kSaid, doc::kMesaFields}, kStepInPython).c_str());
  m.def("_torch_mesa", &RunTorch);
  m.def("_torch_mesa_backward", &RunTorchBackward);
  RegisterExplain(kOp, &RunExplain);
}

}  // namespace heed::mesa

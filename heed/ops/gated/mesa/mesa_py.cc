// heed.mesa, its gradients and its step, and the functions behind PyTorch's operators.
#include "heed/ops/gated/mesa/mesa.h"

#include <cstdint>
#include <limits>
#include <string>
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

constexpr Differentiable<Call> kTensors[] = {
    Rows<Call, &BackwardInputs::q, &Gradients::dq>("q", "dq"),
    Rows<Call, &BackwardInputs::k, &Gradients::dk>("k", "dk"),
    Rows<Call, &BackwardInputs::v, &Gradients::dv>("v", "dv"),
    InPlace<Call, &BackwardInputs::beta, &Gradients::dbeta>("beta", "dbeta"),
    InPlace<Call, &BackwardInputs::lamb, &Gradients::dlamb>("lamb", "dlamb"),
    InPlace<Call, &BackwardInputs::log_decay, &Gradients::dlog_decay>("log_decay", "dlog_decay", true),
    InPlace<Call, &BackwardInputs::initial_state, &Gradients::dinitial_state>("initial_state", "dinitial_state", true)};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
// The last two inputs are keywords, at other places of a call.
constexpr std::span<const Word> kAll = kInputs, kRequired = kAll.first(5), kLogDecay = kAll.subspan(5, 1),
                                kInitialState = kAll.subspan(6, 1);
constexpr Word kOptions[] = {
    {"iterations", false,
     [](Call& call, const Argument& a) { call.options.iterations = ToInt(a, 1, std::numeric_limits<int64_t>::max()); }},
    {"eps", false, &ReadOption<Call, &Options::eps>}};
constexpr Word kReturns[] = {{"return_state", false, &ReadFlag<Call, &Call::return_state>},
                             {"return_solution", false, &ReadFlag<Call, &Call::return_solution>}};
constexpr Word kSolution[] = {{"solution", true, &ReadRows<Call, &BackwardInputs::solution>}};
constexpr Word kTorchSolution[] = {{"solution", true, &WriteResult<Call, &Outputs::solution>}};

void Check(const char* op, Pass pass, const Call& call) {
  CheckNeeded(op, pass,
              {{"q", call.in.q, "[B, T, H, K]"},
               {"k", call.in.k, "[B, T, H, K]"},
               {"v", call.in.v, "[B, T, H, V]"},
               {"beta", call.in.beta},
               {"lamb", call.in.lamb}});
  if (pass == Pass::kBackward) CheckNeeded(op, pass, {{"do", call.in.d_o}});
  if (pass == Pass::kStep) CheckNeeded(op, pass, {{"state", call.state}});
}

nb::object RunForward(Call& call) {
  const BackwardInputs& in = call.in;
  const DType wide = WideDType(in.q);
  NewArray o(kOp, in.q.dtype(), in.v.sizes());
  Context& ctx = ThreadContext(call.num_threads);
  const auto compute = [&](const TensorView& state, const TensorView& solution) {
    Compute(kOp, [&] { Forward(ctx, in, call.options, {o.view, state, solution}); });
  };
  if (!call.return_state && !call.return_solution) {
    compute({}, {});
    return o.array;
  }
  const std::vector<int64_t> of_state = {NumSequences(call), in.q.size(2), in.q.size(3), in.q.size(3) + in.v.size(3)};
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
  constexpr char kArrays[] = "q: Array, k: Array, v: Array, beta: Array, lamb: Array, ";
  constexpr char kKeywords[] = "*, log_decay: Array | None = None, iterations: int = 30, eps: float = 0.0, ";
  constexpr char kTokens[] =
      "initial_state: Array | None = None, lengths: Ints | None = None, starts: Ints | None = None, "
      "cu_seqlens: Ints | None = None, ";
  static const std::string forward =
      JoinedText({"def mesa(", kArrays, kKeywords, kTokens,
                  "return_state: bool = False, return_solution: bool = False, threads: int | None = None) -> "
                  "Result | tuple[Result, Result] | tuple[Result, Result, Result]"});
  static const std::string backward =
      JoinedText({"def mesa_backward(do: Array, ", kArrays, kKeywords, kTokens,
                  "dstate: Array | None = None, solution: Array | None = None, threads: int | None = None) -> "
                  "MesaGradients"});
  static const std::string step =
      JoinedText({"def mesa_step(", kArrays, "state: OutArray, ", kKeywords, "threads: int | None = None) -> Result"});
  const Function<Call> compute = {
      kOp, Pass::kForward,
      Joined<Call>({kRequired, kLogDecay, kOptions, kInitialState, kSequences<Call>, kReturns, kThreads<Call>}),
      kRequired.size(), &Check};
  compute.Bind(m, forward, Docstring(doc::kForward, forward, {kSaid, doc::kMesaFields}, kInPython), &RunForward);
  BindExplain(compute);
  BindBackward<Call>(m,
                     {kBackwardOp, Pass::kBackward,
                      Joined<Call>({kGradientOfO<Call>, kRequired, kLogDecay, kOptions, kInitialState, kSequences<Call>,
                                    kGradientOfState<Call>, kSolution, kThreads<Call>}),
                      kRequired.size() + 1, &Check},
                     "MesaGradients", kTensors, backward,
                     Docstring(doc::kBackward, backward, {kSaid, doc::kMesaFields}, kBackwardInPython));
  BindStep<Call>(m,
                 {kStepOp, Pass::kStep, Joined<Call>({kRequired, kState<Call>, kLogDecay, kOptions, kThreads<Call>}),
                  kRequired.size() + 1, &Check},
                 step, Docstring(doc::kStep, step, {kSaid, doc::kMesaFields}, kStepInPython));
  BindTorch<Call>(m, kOp,
                  Joined<Call>({kRequired, kTorchRowsAndState<Call>, kTorchSolution, kLogDecay, kOptions, kInitialState,
                                kSequences<Call>, kThreads<Call>}),
                  kBackwardOp,
                  Joined<Call>({kTorchGradientsOfRowsAndState<Call>, kSolution, kRequired, kGradients, kLogDecay,
                                kOptions, kInitialState, kSequences<Call>, kThreads<Call>}));
}

}  // namespace heed::mesa

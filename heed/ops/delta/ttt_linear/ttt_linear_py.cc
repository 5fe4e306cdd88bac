// heed.ttt_linear, its gradients and its step, and the functions behind PyTorch's operators.
#include "heed/ops/delta/ttt_linear/ttt_linear.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "docstrings/ttt_linear.h"
#include "python/docstring.h"
#include "python/operation.h"

namespace heed::ttt_linear {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "ttt_linear", kBackwardOp[] = "ttt_linear_backward", kStepOp[] = "ttt_linear_step";

struct Call : OperationCall<BackwardInputs, Options, Outputs, Gradients> {
  bool return_state = false;
};
using Word = Keyword<Call>;

constexpr Differentiable<Call> kTensors[] = {
    Rows<Call, &BackwardInputs::q, &Gradients::dq>("q", "dq"),
    Rows<Call, &BackwardInputs::k, &Gradients::dk>("k", "dk"),
    Rows<Call, &BackwardInputs::v, &Gradients::dv>("v", "dv"),
    InPlace<Call, &BackwardInputs::weight, &Gradients::dweight>("weight", "dweight"),
    InPlace<Call, &BackwardInputs::bias, &Gradients::dbias>("bias", "dbias"),
    InPlace<Call, &BackwardInputs::eta, &Gradients::deta>("eta", "deta"),
    InPlace<Call, &BackwardInputs::lr, &Gradients::dlr>("lr", "dlr", true),
    InPlace<Call, &BackwardInputs::initial_state, &Gradients::dinitial_state>("initial_state", "dinitial_state", true)};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
// The last two inputs are keywords, at other places of a call.
constexpr std::span<const Word> kAll = kInputs, kRequired = kAll.first(6), kLr = kAll.subspan(6, 1),
                                kInitialState = kAll.subspan(7, 1);
constexpr Word kOptions[] = {
    {"mini_batch", false,
     [](Call& call, const Argument& a) { call.options.mini_batch = ToInt(a, 1, std::numeric_limits<int64_t>::max()); }},
    {"eps", false, &ReadOption<Call, &Options::eps>},
    {"scale", false, &ReadOption<Call, &Options::scale>},
    {"residual", false,
     [](Call& call, const Argument& a) {
       call.options.residual = ToChoice(a, {"query", "output"}) == "query" ? Residual::kQuery : Residual::kOutput;
     }},
    {"positions", true, &ReadInts<Call, &Options::positions>}};
constexpr Word kReturns[] = {{"return_state", false, &ReadFlag<Call, &Call::return_state>}};

void Check(const char* op, Pass pass, const Call& call) {
  CheckNeeded(op, pass,
              {{"q", call.in.q, "[B, T, H, K]"},
               {"k", call.in.k, "[B, T, H, K]"},
               {"v", call.in.v, "[B, T, H, V]"},
               {"weight", call.in.weight},
               {"bias", call.in.bias},
               {"eta", call.in.eta}});
  if (pass == Pass::kBackward) CheckNeeded(op, pass, {{"do", call.in.d_o}});
  if (pass == Pass::kStep) CheckNeeded(op, pass, {{"state", call.state}});
}

nb::object RunForward(Call& call) {
  const ConstTensorView &q = call.in.q, &v = call.in.v;
  const std::vector<int64_t> of_state = {NumSequences(call), q.size(2), 2, q.size(3) + 1, q.size(3)};
  return ComputeOneOrTwo(kOp, call, v.sizes(), call.return_state, of_state);
}

constexpr char kInPython[] = R"(
Returns o, a NumPy array, or (o, state) with return_state=True.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 100, 2, 8))
  >>> weight, bias, eta = np.ones((2, 8)), np.zeros((2, 8)), np.full((1, 100, 2), 0.01)
  >>> W, b = 0.1 * rng.standard_normal((1, 2, 8, 8)), np.zeros((1, 2, 1, 8))
  >>> initial = np.stack([np.concatenate([W, b], 2), np.zeros((1, 2, 9, 8))], 2)
  >>> o, state = heed.ttt_linear(q, k, v, weight, bias, eta, initial_state=initial, return_state=True)
  >>> state.shape  # W and b before the last 4 tokens, which began a mini-batch, and the sum of their gradients
  (1, 2, 2, 9, 8)
  >>> last = state[:, :, 0] - 0.01 * state[:, :, 1]
  >>> y = np.einsum("hk,hkv->hv", q[0, -1], last[0, :, :8]) + last[0, :, 8]
  >>> y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
  >>> bool(np.allclose(o[0, -1], q[0, -1] + y))
  True)";

constexpr char kBackwardInPython[] = R"(
dstate is the gradient of the returned state. Returns the named tuple heed.TttLinearGradients: dq dk dv dweight dbias
deta dlr dinitial_state, NumPy arrays in the shape and dtype of what they are the gradients of, None for inputs that
were not given.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, k, v = rng.standard_normal((4, 1, 20, 2, 8))
  >>> weight, bias, eta = np.ones((2, 8)), np.zeros((2, 8)), np.full((1, 20, 2), 0.01)
  >>> g = heed.ttt_linear_backward(do, q, k, v, weight, bias, eta)
  >>> eta[0, 18, 1] += 1e-6
  >>> after = heed.ttt_linear(q, k, v, weight, bias, eta)
  >>> eta[0, 18, 1] -= 2e-6
  >>> difference = (do * (after - heed.ttt_linear(q, k, v, weight, bias, eta))).sum() / 2e-6
  >>> bool(np.isclose(g.deta[0, 18, 1], difference, rtol=1e-3)), g.dlr is None
  (True, True))";

constexpr char kStepInPython[] = R"(
state is what a call with return_state=True returned, or zeros, updated in place. positions are the tokens so far.
Returns o, [B, H, V].

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 20, 2, 8))
  >>> weight, bias, eta = np.ones((2, 8)), np.zeros((2, 8)), np.full((1, 20, 2), 0.01)
  >>> o = heed.ttt_linear(q, k, v, weight, bias, eta)
  >>> state = np.zeros((1, 2, 2, 9, 8))
  >>> for t in range(20):
  ...   o_t = heed.ttt_linear_step(q[:, t], k[:, t], v[:, t], weight, bias, eta[:, t], state, positions=[t])
  >>> bool(np.allclose(o_t, o[:, 19]))
  True)";

constexpr Said kSaid[] = {{"lr", "factors of the gradients of tokens; None: 1"},
                          {"mini_batch", "tokens whose gradients have the same W and b"},
                          {"eps", "added to variances"},
                          {"scale", "factor of q"},
                          {"residual", "'query': o = q + LN, 'output': o = y + LN for the read y"},
                          {"positions", "[B]: tokens before the first one, with a state; None: 0"},
                          {"initial_state", "[B, H, 2, K + 1, V]: before the first token"},
                          {"dstate", "the gradient of the final state"},
                          {"state", "[B, H, 2, K + 1, V], float32, or float64 for float64"},
                          {"return_state", "also return the state after the last token"}};

}  // namespace

void Bind(nb::module_& m) {
  constexpr char kArrays[] = "q: Array, k: Array, v: Array, weight: Array, bias: Array, eta: Array, ";
  constexpr char kKeywords[] =
      "*, lr: Array | None = None, mini_batch: int = 16, eps: float = 1e-06, scale: float = 1.0, "
      "residual: str = 'query', positions: Ints | None = None, ";
  constexpr char kTokens[] =
      "initial_state: Array | None = None, lengths: Ints | None = None, starts: Ints | None = None, "
      "cu_seqlens: Ints | None = None, ";
  static const std::string forward =
      JoinedText({"def ttt_linear(", kArrays, kKeywords, kTokens,
                  "return_state: bool = False, threads: int | None = None) -> Result | tuple[Result, Result]"});
  static const std::string backward =
      JoinedText({"def ttt_linear_backward(do: Array, ", kArrays, kKeywords, kTokens,
                  "dstate: Array | None = None, threads: int | None = None) -> TttLinearGradients"});
  static const std::string step = JoinedText(
      {"def ttt_linear_step(", kArrays, "state: OutArray, ", kKeywords, "threads: int | None = None) -> Result"});
  const Function<Call> compute = {
      kOp, Pass::kForward,
      Joined<Call>({kRequired, kLr, kOptions, kInitialState, kSequences<Call>, kReturns, kThreads<Call>}),
      kRequired.size(), &Check};
  compute.Bind(m, forward, Docstring(doc::kForward, forward, {kSaid, doc::kTttLinearFields}, kInPython), &RunForward);
  BindExplain(compute);
  BindBackward<Call>(m,
                     {kBackwardOp, Pass::kBackward,
                      Joined<Call>({kGradientOfO<Call>, kRequired, kLr, kOptions, kInitialState, kSequences<Call>,
                                    kGradientOfState<Call>, kThreads<Call>}),
                      kRequired.size() + 1, &Check},
                     "TttLinearGradients", kTensors, backward,
                     Docstring(doc::kBackward, backward, {kSaid, doc::kTttLinearFields}, kBackwardInPython));
  BindStep<Call>(m,
                 {kStepOp, Pass::kStep, Joined<Call>({kRequired, kState<Call>, kLr, kOptions, kThreads<Call>}),
                  kRequired.size() + 1, &Check},
                 step, Docstring(doc::kStep, step, {kSaid, doc::kTttLinearFields}, kStepInPython));
  BindTorch<Call>(m, kOp,
                  Joined<Call>({kRequired, kTorchRowsAndState<Call>, kLr, kOptions, kInitialState, kSequences<Call>,
                                kThreads<Call>}),
                  kBackwardOp,
                  Joined<Call>({kTorchGradientsOfRowsAndState<Call>, kRequired, kGradients, kLr, kOptions,
                                kInitialState, kSequences<Call>, kThreads<Call>}));
}

}  // namespace heed::ttt_linear

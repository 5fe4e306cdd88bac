// heed.titans, its gradients and its step, and the functions behind PyTorch's operators.
#include "heed/ops/delta/titans/titans.h"

#include <cstdint>
#include <limits>
#include <string>
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
// The last input is a keyword, at another place of a call.
constexpr std::span<const Word> kAll = kInputs, kRequired = kAll.first(8), kInitialState = kAll.last(1);
constexpr Word kOptions[] = {
    {"mini_batch", false,
     [](Call& call, const Argument& a) { call.options.mini_batch = ToInt(a, 1, std::numeric_limits<int64_t>::max()); }},
    {"eps", false, &ReadOption<Call, &Options::eps>},
    {"scale", false, &ReadOption<Call, &Options::scale>},
    {"positions", true, &ReadInts<Call, &Options::positions>}};
constexpr Word kReturns[] = {{"return_state", false, &ReadFlag<Call, &Call::return_state>}};

void Check(const char* op, Pass pass, const Call& call) {
  CheckNeeded(op, pass,
              {{"q", call.in.q, "[B, T, H, K]"},
               {"k", call.in.k, "[B, T, H, K]"},
               {"v", call.in.v, "[B, T, H, V]"},
               {"weight", call.in.weight},
               {"bias", call.in.bias},
               {"theta", call.in.theta},
               {"alpha", call.in.alpha},
               {"eta", call.in.eta}});
  if (pass == Pass::kBackward) CheckNeeded(op, pass, {{"do", call.in.d_o}});
  if (pass == Pass::kStep) CheckNeeded(op, pass, {{"state", call.state}});
}

nb::object RunForward(Call& call) {
  const ConstTensorView &q = call.in.q, &v = call.in.v;
  const std::vector<int64_t> of_state = {NumSequences(call), q.size(2), 3, q.size(3), q.size(3)};
  return ComputeOneOrTwo(kOp, call, v.sizes(), call.return_state, of_state);
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
  constexpr char kArrays[] =
      "q: Array, k: Array, v: Array, weight: Array, bias: Array, theta: Array, "
      "alpha: Array, eta: Array, ";
  constexpr char kKeywords[] =
      "*, mini_batch: int = 16, eps: float = 1e-06, scale: float = 1.0, positions: Ints | None = None, ";
  constexpr char kTokens[] =
      "initial_state: Array | None = None, lengths: Ints | None = None, starts: Ints | None = None, "
      "cu_seqlens: Ints | None = None, ";
  static const std::string forward =
      JoinedText({"def titans(", kArrays, kKeywords, kTokens,
                  "return_state: bool = False, threads: int | None = None) -> Result | tuple[Result, Result]"});
  static const std::string backward =
      JoinedText({"def titans_backward(do: Array, ", kArrays, kKeywords, kTokens,
                  "dstate: Array | None = None, threads: int | None = None) -> TitansGradients"});
  static const std::string step = JoinedText(
      {"def titans_step(", kArrays, "state: OutArray, ", kKeywords, "threads: int | None = None) -> Result"});
  const Function<Call> compute = {
      kOp, Pass::kForward,
      Joined<Call>({kRequired, kOptions, kInitialState, kSequences<Call>, kReturns, kThreads<Call>}), kRequired.size(),
      &Check};
  compute.Bind(m, forward, Docstring(doc::kForward, forward, {kSaid, doc::kTitansFields}, kInPython), &RunForward);
  BindExplain(compute);
  BindBackward<Call>(m,
                     {kBackwardOp, Pass::kBackward,
                      Joined<Call>({kGradientOfO<Call>, kRequired, kOptions, kInitialState, kSequences<Call>,
                                    kGradientOfState<Call>, kThreads<Call>}),
                      kRequired.size() + 1, &Check},
                     "TitansGradients", kTensors, backward,
                     Docstring(doc::kBackward, backward, {kSaid, doc::kTitansFields}, kBackwardInPython));
  BindStep<Call>(m,
                 {kStepOp, Pass::kStep, Joined<Call>({kRequired, kState<Call>, kOptions, kThreads<Call>}),
                  kRequired.size() + 1, &Check},
                 step, Docstring(doc::kStep, step, {kSaid, doc::kTitansFields}, kStepInPython));
  BindTorch<Call>(
      m, kOp,
      Joined<Call>({kRequired, kTorchRowsAndState<Call>, kOptions, kInitialState, kSequences<Call>, kThreads<Call>}),
      kBackwardOp,
      Joined<Call>({kTorchGradientsOfRowsAndState<Call>, kRequired, kGradients, kOptions, kInitialState,
                    kSequences<Call>, kThreads<Call>}));
}

}  // namespace heed::titans

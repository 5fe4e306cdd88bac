// heed.log_linear_attention, its gradients and its step, and the functions behind PyTorch's operators.
#include "heed/ops/gated/log_linear_attention/log_linear_attention.h"

#include <span>
#include <string>
#include <vector>

#include "docstrings/log_linear_attention.h"
#include "python/docstring.h"
#include "python/operation.h"

namespace heed::log_linear_attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "log_linear_attention", kBackwardOp[] = "log_linear_attention_backward",
               kStepOp[] = "log_linear_attention_step";

struct Call : OperationCall<BackwardInputs, Options, Outputs, Gradients> {
  bool return_state = false;
};
using Word = Keyword<Call>;

constexpr Differentiable<Call> kTensors[] = {
    Rows<Call, &BackwardInputs::q, &Gradients::dq>("q", "dq"),
    Rows<Call, &BackwardInputs::k, &Gradients::dk>("k", "dk"),
    Rows<Call, &BackwardInputs::v, &Gradients::dv>("v", "dv"),
    InPlace<Call, &BackwardInputs::level_scales, &Gradients::dlevel_scales>("level_scales", "dlevel_scales"),
    InPlace<Call, &BackwardInputs::log_decay, &Gradients::dlog_decay>("log_decay", "dlog_decay", true),
    InPlace<Call, &BackwardInputs::initial_state, &Gradients::dinitial_state>("initial_state", "dinitial_state", true)};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
// The last two inputs are keywords, at other places of a call.
constexpr std::span<const Word> kAll = kInputs, kRequired = kAll.first(4), kLogDecay = kAll.subspan(4, 1),
                                kInitialState = kAll.subspan(5, 1);
constexpr Word kOptions[] = {{"scale", true, &ReadOption<Call, &Options::scale>},
                             {"positions", true, &ReadInts<Call, &Options::positions>}};
constexpr Word kReturns[] = {{"return_state", false, &ReadFlag<Call, &Call::return_state>}};

void Check(const char* op, Pass pass, const Call& call) {
  CheckNeeded(op, pass,
              {{"q", call.in.q, "[B, T, H, K]"},
               {"k", call.in.k, "[B, T, H, K]"},
               {"v", call.in.v, "[B, T, HV, V]"},
               {"level_scales", call.in.level_scales, "[B, T, HV, L]"}});
  if (pass == Pass::kBackward) CheckNeeded(op, pass, {{"do", call.in.d_o}});
  if (pass == Pass::kStep) CheckNeeded(op, pass, {{"state", call.state}});
}

nb::object RunForward(Call& call) {
  const ConstTensorView &q = call.in.q, &v = call.in.v;
  const std::vector<int64_t> of_state = {NumSequences(call), v.size(2), call.in.level_scales.size(3), q.size(3),
                                         v.size(3)};
  return ComputeOneOrTwo(kOp, call, v.sizes(), call.return_state, of_state);
}

constexpr char kInPython[] = R"(
Returns o, a NumPy array, or (o, state) with return_state=True.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 100, 2, 8), np.float32)
  >>> g = -rng.random((1, 100, 2), np.float32)
  >>> scales = np.ones((1, 100, 2, 8), np.float32)  # 100 tokens need 8 levels
  >>> o = heed.log_linear_attention(q, k, v, scales, log_decay=g)
  >>> bool(np.allclose(o, heed.simple_gla(q, k, v, g, scale=1), atol=1e-4))  # levels that all count alike
  True)";

constexpr char kBackwardInPython[] = R"(
dstate is the gradient of the returned states. Returns the named tuple heed.LogLinearAttentionGradients: dq dk dv
dlevel_scales dlog_decay dinitial_state, NumPy arrays in the shape and dtype of what they are the gradients of, None for
inputs that were not given.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, k, v = rng.standard_normal((4, 1, 100, 2, 8), np.float32)
  >>> g = heed.log_linear_attention_backward(do, q, k, v, np.ones((1, 100, 2, 8), np.float32))
  >>> g.dlevel_scales.shape, g.dlog_decay is None
  ((1, 100, 2, 8), True))";

constexpr char kStepInPython[] = R"(
state is what a call with return_state=True returned, or zeros, updated in place. positions are the tokens so far.
Returns o, [B, HV, V].

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 5, 2, 8))
  >>> scales = rng.random((1, 5, 2, 4))
  >>> o = heed.log_linear_attention(q, k, v, scales)
  >>> state = np.zeros((1, 2, 4, 8, 8))
  >>> for t in range(5):
  ...   o_t = heed.log_linear_attention_step(q[:, t], k[:, t], v[:, t], scales[:, t], state, positions=[t])
  >>> bool(np.allclose(o_t, o[:, 4]))
  True)";

constexpr Said kSaid[] = {{"log_decay", "natural logarithms of decay factors, <= 0; None: 0"},
                          {"scale", "factor of q; None: 1"},
                          {"positions", "[B]: tokens before the first one, with initial_state"},
                          {"initial_state", "[B, HV, L, K, V]: before the first token"},
                          {"dstate", "the gradient of the final states"},
                          {"state", "[B, HV, L, K, V], float32, or float64 for float64"},
                          {"return_state", "also return the states after the last token"}};

}  // namespace

void Bind(nb::module_& m) {
  constexpr char kArrays[] = "q: Array, k: Array, v: Array, level_scales: Array, ";
  constexpr char kKeywords[] =
      "*, log_decay: Array | None = None, scale: float | None = None, positions: Ints | None = None, ";
  constexpr char kTokens[] =
      "initial_state: Array | None = None, lengths: Ints | None = None, starts: Ints | None = None, "
      "cu_seqlens: Ints | None = None, ";
  static const std::string forward =
      JoinedText({"def log_linear_attention(", kArrays, kKeywords, kTokens,
                  "return_state: bool = False, threads: int | None = None) -> Result | tuple[Result, Result]"});
  static const std::string backward =
      JoinedText({"def log_linear_attention_backward(do: Array, ", kArrays, kKeywords, kTokens,
                  "dstate: Array | None = None, threads: int | None = None) -> LogLinearAttentionGradients"});
  static const std::string step = JoinedText({"def log_linear_attention_step(", kArrays, "state: OutArray, ", kKeywords,
                                              "threads: int | None = None) -> Result"});
  const Function<Call> compute = {
      kOp, Pass::kForward,
      Joined<Call>({kRequired, kLogDecay, kOptions, kInitialState, kSequences<Call>, kReturns, kThreads<Call>}),
      kRequired.size(), &Check};
  compute.Bind(m, forward, Docstring(doc::kForward, forward, {kSaid, doc::kLogLinearAttentionFields}, kInPython),
               &RunForward);
  BindExplain(compute);
  BindBackward<Call>(m,
                     {kBackwardOp, Pass::kBackward,
                      Joined<Call>({kGradientOfO<Call>, kRequired, kLogDecay, kOptions, kInitialState, kSequences<Call>,
                                    kGradientOfState<Call>, kThreads<Call>}),
                      kRequired.size() + 1, &Check},
                     "LogLinearAttentionGradients", kTensors, backward,
                     Docstring(doc::kBackward, backward, {kSaid, doc::kLogLinearAttentionFields}, kBackwardInPython));
  BindStep<Call>(m,
                 {kStepOp, Pass::kStep, Joined<Call>({kRequired, kState<Call>, kLogDecay, kOptions, kThreads<Call>}),
                  kRequired.size() + 1, &Check},
                 step, Docstring(doc::kStep, step, {kSaid, doc::kLogLinearAttentionFields}, kStepInPython));
  BindTorch<Call>(m, kOp,
                  Joined<Call>({kRequired, kTorchRowsAndState<Call>, kLogDecay, kOptions, kInitialState,
                                kSequences<Call>, kThreads<Call>}),
                  kBackwardOp,
                  Joined<Call>({kTorchGradientsOfRowsAndState<Call>, kRequired, kGradients, kLogDecay, kOptions,
                                kInitialState, kSequences<Call>, kThreads<Call>}));
}

}  // namespace heed::log_linear_attention

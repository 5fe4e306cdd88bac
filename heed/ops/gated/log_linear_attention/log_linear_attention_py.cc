// heed.log_linear_attention, its gradients and its step, and the functions behind PyTorch's operators.
#include "heed/ops/gated/log_linear_attention/log_linear_attention.h"

#include <cstddef>
#include <span>
#include <string>
#include <tuple>
#include <utility>
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
using Words = std::vector<Word>;

constexpr Differentiable<Call> kTensors[] = {
    Rows<Call, &BackwardInputs::q, &Gradients::dq>("q", "dq"),
    Rows<Call, &BackwardInputs::k, &Gradients::dk>("k", "dk"),
    Rows<Call, &BackwardInputs::v, &Gradients::dv>("v", "dv"),
    InPlace<Call, &BackwardInputs::level_scales, &Gradients::dlevel_scales>("level_scales", "dlevel_scales"),
    InPlace<Call, &BackwardInputs::log_decay, &Gradients::dlog_decay>("log_decay", "dlog_decay", true),
    InPlace<Call, &BackwardInputs::initial_state, &Gradients::dinitial_state>("initial_state", "dinitial_state", true)};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
constexpr Word kGradientOfO[] = {{"do", false, &ReadRows<Call, &BackwardInputs::d_o>}};
constexpr Word kState[] = {{"state", false, &WriteState<Call>}};
// The last two inputs are keywords, at other places of a call.
constexpr std::span<const Word> kAll = kInputs, kRequired = kAll.first(4), kLogDecay = kAll.subspan(4, 1),
                                kInitialState = kAll.subspan(5, 1);
constexpr Word kOptions[] = {{"scale", true, &ReadOption<Call, &Options::scale>},
                             {"positions", true, &ReadInts<Call, &Options::positions>}};
constexpr Word kTokens[] = {{"lengths", true, &ReadInts<Call, &Options::lengths>},
                            {"starts", true, &ReadInts<Call, &Options::starts>},
                            {"cu_seqlens", true, &ReadInts<Call, &Options::cu_seqlens>}};
constexpr Word kReturnState[] = {{"return_state", false, &ReadFlag<Call, &Call::return_state>}};
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
  for (const auto& [name, x, axes] : {std::tuple{"q", call.in.q, "H, K]"},
                                      {"k", call.in.k, "H, K]"},
                                      {"v", call.in.v, "HV, V]"},
                                      {"level_scales", call.in.level_scales, "HV, L]"}}) {
    if (!x.present()) FailMissing(op, name);
    if (x.rank() != rank) Fail(op, name, "has shape " + x.ShapeString(), "[B, " + tokens + axes);
  }
}

const Words& ForwardWords() {
  static const Words words =
      Joined<Call>({kRequired, kLogDecay, kOptions, kInitialState, kTokens, kReturnState, kThreads});
  return words;
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  Call call;
  ReadCall(kOp, ForwardWords(), 4, 4, args.ptr(), kwargs.ptr(), call);
  const BackwardInputs& in = call.in;
  NewArray o(kOp, in.q.dtype(), in.v.sizes());
  Context& ctx = ThreadContext(call.num_threads);
  if (!call.return_state) {
    Compute(kOp, [&] { Forward(ctx, in, call.options, {o.view, {}}); });
    return o.array;
  }
  const ConstTensorView& bounds = call.options.cu_seqlens;
  const int64_t sequences = bounds.present() && bounds.rank() == 1 ? bounds.size(0) - 1 : in.q.size(0);
  NewArray state(kOp, in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32,
                 std::vector<int64_t>{std::max<int64_t>(sequences, 0), in.v.size(2), in.level_scales.size(3),
                                      in.q.size(3), in.v.size(3)});
  Compute(kOp, [&] { Forward(ctx, in, call.options, {o.view, state.view}); });
  return nb::make_tuple(o.array, state.array);
}

nb::object RunBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words =
      Joined<Call>({kGradientOfO, kRequired, kLogDecay, kOptions, kInitialState, kTokens, kGradientOfState, kThreads});
  Call call;
  ReadCall(kBackwardOp, words, 5, 4, args.ptr(), kwargs.ptr(), call);
  const BackwardInputs& in = call.in;
  if (!in.d_o.present()) FailMissing(kBackwardOp, "do");
  return NewGradients<Call>(kBackwardOp, type, kTensors, call,
                            [&](Context& ctx) { Backward(ctx, call.in, call.options, call.gradients); });
}

nb::object RunStep(const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<Call>({kRequired, kState, kLogDecay, kOptions, kThreads});
  Call call;
  ReadCall(kStepOp, words, 5, 3, args.ptr(), kwargs.ptr(), call);
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
  ReadCall(kOp, ForwardWords(), 4, 4, nullptr, kwargs, call);
  return Explained(kOp, num_threads, call, &Explain);
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
  constexpr char kInputs[] = "q: Array, k: Array, v: Array, level_scales: Array, ";
  constexpr char kOptions[] =
      "*, log_decay: Array | None = None, scale: float | None = None, positions: Ints | None = None, ";
  constexpr char kTokens[] =
      "initial_state: Array | None = None, lengths: Ints | None = None, starts: Ints | None = None, "
      "cu_seqlens: Ints | None = None, ";
  static const std::string forward =
      JoinedText({"def log_linear_attention(", kInputs, kOptions, kTokens,
                  "return_state: bool = False, threads: int | None = None) -> Result | tuple[Result, Result]"});
  static const std::string backward =
      JoinedText({"def log_linear_attention_backward(do: Array, ", kInputs, kOptions, kTokens,
                  "dstate: Array | None = None, threads: int | None = None) -> LogLinearAttentionGradients"});
  static const std::string step = JoinedText({"def log_linear_attention_step(", kInputs, "state: OutArray, ", kOptions,
                                              "threads: int | None = None) -> Result"});
  m.def(kOp, &RunForward, nb::sig(forward.c_str()),
        Docstring(doc::kForward, forward, {kSaid, doc::kLogLinearAttentionFields}, kInPython).c_str());
  const nb::object gradients = GradientsType<Call>(m, "LogLinearAttentionGradients", kBackwardOp, kGradients);
  m.def(
      kBackwardOp,
      [gradients](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(gradients, args, kwargs); },
      nb::sig(backward.c_str()),
      Docstring(doc::kBackward, backward, {kSaid, doc::kLogLinearAttentionFields}, kBackwardInPython).c_str());
  m.def(kStepOp, &RunStep, nb::sig(step.c_str()),
        Docstring(doc::kStep, step, {kSaid, doc::kLogLinearAttentionFields}, kStepInPython).c_str());
  m.def("_torch_log_linear_attention", &RunTorch);
  m.def("_torch_log_linear_attention_backward", &RunTorchBackward);
  RegisterExplain(kOp, &RunExplain);
}

}  // namespace heed::log_linear_attention

// heed.log_linear_attention, its gradients and its step, and the functions behind PyTorch's operators.
#include "heed/ops/gated/log_linear_attention/log_linear_attention.h"

#include <cstddef>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "docstrings/log_linear_attention.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::log_linear_attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "log_linear_attention", kBackwardOp[] = "log_linear_attention_backward",
               kStepOp[] = "log_linear_attention_step";

struct PythonCall {
  Arrays arrays;
  BackwardInputs in;
  Options options;
  bool return_state = false;
  int num_threads = 0;
  TensorView state;     // of a step
  Outputs out;          // for PyTorch
  Gradients gradients;  // for PyTorch
};
using Word = Keyword<PythonCall>;
using Words = std::vector<Word>;

template <auto kField>
void ReadRows(PythonCall& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}
template <auto kField>
void ReadTensor(PythonCall& call, const Argument& a) {
  call.in.*kField = call.arrays.ReadInPlace(a, Kind::kFloat);
}
template <auto kField>
void ReadInts(PythonCall& call, const Argument& a) {
  call.options.*kField = call.arrays.ReadList(a, Kind::kInt);
}
template <TensorView Outputs::* kField>
void WriteResult(PythonCall& call, const Argument& a) {
  call.out.*kField = call.arrays.Write(a, Kind::kFloat);
}
template <TensorView Gradients::* kField>
void WriteGradient(PythonCall& call, const Argument& a) {
  call.gradients.*kField = call.arrays.Write(a, Kind::kFloat);
}

constexpr Word kGradientOfO[] = {{"do", false, &ReadRows<&BackwardInputs::d_o>}};
constexpr Word kInputs[] = {{"q", false, &ReadRows<&BackwardInputs::q>},
                            {"k", false, &ReadRows<&BackwardInputs::k>},
                            {"v", false, &ReadRows<&BackwardInputs::v>},
                            {"level_scales", false, &ReadTensor<&BackwardInputs::level_scales>}};
constexpr Word kState[] = {
    {"state", false, [](PythonCall& call, const Argument& a) { call.state = call.arrays.Write(a, Kind::kFloat); }}};
constexpr Word kOptions[] = {
    {"log_decay", true, &ReadTensor<&BackwardInputs::log_decay>},
    {"scale", true, [](PythonCall& call, const Argument& a) { call.options.scale = ToFinite(a); }},
    {"positions", true, &ReadInts<&Options::positions>}};
constexpr Word kTokens[] = {{"initial_state", true, &ReadTensor<&BackwardInputs::initial_state>},
                            {"lengths", true, &ReadInts<&Options::lengths>},
                            {"starts", true, &ReadInts<&Options::starts>},
                            {"cu_seqlens", true, &ReadInts<&Options::cu_seqlens>}};
constexpr Word kReturnState[] = {
    {"return_state", false, [](PythonCall& call, const Argument& a) { call.return_state = ToBool(a); }}};
constexpr Word kGradientOfState[] = {{"dstate", true, &ReadTensor<&BackwardInputs::d_final_state>}};
constexpr Word kThreads[] = {{"threads", true, [](PythonCall& call, const Argument& a) {
                                call.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads));
                              }}};
constexpr Word kTorchResults[] = {{"o", false, &WriteResult<&Outputs::o>},
                                  {"state", true, &WriteResult<&Outputs::final_state>}};
constexpr Word kTorchIncoming[] = {{"the gradient of o", false, &ReadRows<&BackwardInputs::d_o>},
                                   {"the gradient of the state", true, &ReadTensor<&BackwardInputs::d_final_state>}};
constexpr Word kTorchGradients[] = {{"dq", true, &WriteGradient<&Gradients::dq>},
                                    {"dk", true, &WriteGradient<&Gradients::dk>},
                                    {"dv", true, &WriteGradient<&Gradients::dv>},
                                    {"dlevel_scales", true, &WriteGradient<&Gradients::dlevel_scales>},
                                    {"dlog_decay", true, &WriteGradient<&Gradients::dlog_decay>},
                                    {"dinitial_state", true, &WriteGradient<&Gradients::dinitial_state>}};

// Reads a call; what determines the shapes of results is present afterwards, with its rank.
void ReadCall(const char* op, const Words& words, size_t num_positional, int rank, const nb::args& args,
              const nb::kwargs& kwargs, PythonCall& call) {
  Read<PythonCall>(op, words, num_positional, args.ptr(), kwargs.ptr(), call);
  const std::string tokens = rank == 4 ? "T, " : "";
  for (const auto& [name, x, axes] : {std::tuple{"q", call.in.q, "H, K]"},
                                      {"k", call.in.k, "H, K]"},
                                      {"v", call.in.v, "HV, V]"},
                                      {"level_scales", call.in.level_scales, "HV, L]"}}) {
    if (!x.present()) FailMissing(op, name);
    if (x.rank() != rank) Fail(op, name, "has shape " + x.ShapeString(), "[B, " + tokens + axes);
  }
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<PythonCall>({kInputs, kOptions, kTokens, kReturnState, kThreads});
  PythonCall call;
  ReadCall(kOp, words, 4, 4, args, kwargs, call);
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
  static const Words words = Joined<PythonCall>({kGradientOfO, kInputs, kOptions, kTokens, kGradientOfState, kThreads});
  PythonCall call;
  ReadCall(kBackwardOp, words, 5, 4, args, kwargs, call);
  const BackwardInputs& in = call.in;
  if (!in.d_o.present()) FailMissing(kBackwardOp, "do");
  const auto like = [](const ConstTensorView& x, TensorView& view) {
    if (!x.present()) return nb::object(nb::none());
    NewArray array(kBackwardOp, x.dtype(), x.sizes());
    view = array.view;
    return std::move(array.array);
  };
  Gradients g;
  const nb::object dq = like(in.q, g.dq), dk = like(in.k, g.dk), dv = like(in.v, g.dv),
                   dlevel_scales = like(in.level_scales, g.dlevel_scales),
                   dlog_decay = like(in.log_decay, g.dlog_decay),
                   dinitial_state = like(in.initial_state, g.dinitial_state);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kBackwardOp, [&] { Backward(ctx, in, call.options, g); });
  return NewNamedTuple(type, nb::make_tuple(dq, dk, dv, dlevel_scales, dlog_decay, dinitial_state));
}

nb::object RunStep(const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<PythonCall>({kInputs, kState, kOptions, kThreads});
  PythonCall call;
  ReadCall(kStepOp, words, 5, 3, args, kwargs, call);
  if (!call.state.present()) FailMissing(kStepOp, "state");
  NewArray o(kStepOp, call.in.q.dtype(), call.in.v.sizes());
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kStepOp, [&] { Step(ctx, call.in, call.options, call.state, o.view); });
  return o.array;
}

void RunTorch(const nb::args& args) {
  static const Words words = Joined<PythonCall>({kInputs, kTorchResults, kOptions, kTokens, kThreads});
  PythonCall call;
  call.arrays.AllowTorch();
  Read<PythonCall>(kOp, words, words.size(), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(call.num_threads);
  ComputeForTorch(kOp, [&] { Forward(ctx, call.in, call.options, call.out); });
}

void RunTorchBackward(const nb::args& args) {
  static const Words words =
      Joined<PythonCall>({kTorchIncoming, kInputs, kTorchGradients, kOptions, kTokens, kThreads});
  PythonCall call;
  call.arrays.AllowTorch();
  Read<PythonCall>(kOp, words, words.size(), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(call.num_threads);
  ComputeForTorch(kOp, [&] { Backward(ctx, call.in, call.options, call.gradients); });
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
  const nb::object gradients = NamedTupleType(
      m, "LogLinearAttentionGradients", "dq dk dv dlevel_scales dlog_decay dinitial_state", GradientsDoc(kBackwardOp));
  m.def(
      kBackwardOp,
      [gradients](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(gradients, args, kwargs); },
      nb::sig(backward.c_str()),
      Docstring(doc::kBackward, backward, {kSaid, doc::kLogLinearAttentionFields}, kBackwardInPython).c_str());
  m.def(kStepOp, &RunStep, nb::sig(step.c_str()),
        Docstring(doc::kStep, step, {kSaid, doc::kLogLinearAttentionFields}, kStepInPython).c_str());
  m.def("_torch_log_linear_attention", &RunTorch);
  m.def("_torch_log_linear_attention_backward", &RunTorchBackward);
}

}  // namespace heed::log_linear_attention

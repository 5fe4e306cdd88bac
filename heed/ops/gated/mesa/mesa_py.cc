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
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::mesa {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "mesa", kBackwardOp[] = "mesa_backward", kStepOp[] = "mesa_step";

struct PythonCall {
  Arrays arrays;
  BackwardInputs in;
  Options options;
  bool return_state = false, return_solution = false;
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
template <auto kField>
void ReadFlag(PythonCall& call, const Argument& a) {
  call.*kField = ToBool(a);
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
                            {"beta", false, &ReadTensor<&BackwardInputs::beta>},
                            {"lamb", false, &ReadTensor<&BackwardInputs::lamb>}};
constexpr Word kState[] = {
    {"state", false, [](PythonCall& call, const Argument& a) { call.state = call.arrays.Write(a, Kind::kFloat); }}};
constexpr Word kOptions[] = {
    {"log_decay", true, &ReadTensor<&BackwardInputs::log_decay>},
    {"iterations", false,
     [](PythonCall& call, const Argument& a) {
       call.options.iterations = ToInt(a, 1, std::numeric_limits<int64_t>::max());
     }},
    {"eps", false, [](PythonCall& call, const Argument& a) { call.options.eps = ToFinite(a); }}};
constexpr Word kTokens[] = {{"initial_state", true, &ReadTensor<&BackwardInputs::initial_state>},
                            {"lengths", true, &ReadInts<&Options::lengths>},
                            {"starts", true, &ReadInts<&Options::starts>},
                            {"cu_seqlens", true, &ReadInts<&Options::cu_seqlens>}};
constexpr Word kReturns[] = {{"return_state", false, &ReadFlag<&PythonCall::return_state>},
                             {"return_solution", false, &ReadFlag<&PythonCall::return_solution>}};
constexpr Word kGradientOfState[] = {{"dstate", true, &ReadTensor<&BackwardInputs::d_final_state>},
                                     {"solution", true, &ReadRows<&BackwardInputs::solution>}};
constexpr Word kThreads[] = {{"threads", true, [](PythonCall& call, const Argument& a) {
                                call.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads));
                              }}};
constexpr Word kTorchResults[] = {{"o", false, &WriteResult<&Outputs::o>},
                                  {"state", true, &WriteResult<&Outputs::final_state>},
                                  {"solution", true, &WriteResult<&Outputs::solution>}};
constexpr Word kTorchIncoming[] = {{"the gradient of o", false, &ReadRows<&BackwardInputs::d_o>},
                                   {"the gradient of the state", true, &ReadTensor<&BackwardInputs::d_final_state>},
                                   {"solution", true, &ReadRows<&BackwardInputs::solution>}};
constexpr Word kTorchGradients[] = {{"dq", true, &WriteGradient<&Gradients::dq>},
                                    {"dk", true, &WriteGradient<&Gradients::dk>},
                                    {"dv", true, &WriteGradient<&Gradients::dv>},
                                    {"dbeta", true, &WriteGradient<&Gradients::dbeta>},
                                    {"dlamb", true, &WriteGradient<&Gradients::dlamb>},
                                    {"dlog_decay", true, &WriteGradient<&Gradients::dlog_decay>},
                                    {"dinitial_state", true, &WriteGradient<&Gradients::dinitial_state>}};

// Reads a call; what determines the shapes of results is present afterwards, with its rank.
void ReadCall(const char* op, const Words& words, size_t num_positional, int rank, const nb::args& args,
              const nb::kwargs& kwargs, PythonCall& call) {
  Read<PythonCall>(op, words, num_positional, args.ptr(), kwargs.ptr(), call);
  const std::string tokens = rank == 4 ? "T, " : "";
  for (const auto& [name, x, axes] :
       {std::tuple{"q", call.in.q, "H, K]"}, {"k", call.in.k, "H, K]"}, {"v", call.in.v, "H, V]"}}) {
    if (!x.present()) FailMissing(op, name);
    if (x.rank() != rank) Fail(op, name, "has shape " + x.ShapeString(), "[B, " + tokens + axes);
  }
  if (!call.in.beta.present()) FailMissing(op, "beta");
  if (!call.in.lamb.present()) FailMissing(op, "lamb");
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<PythonCall>({kInputs, kOptions, kTokens, kReturns, kThreads});
  PythonCall call;
  ReadCall(kOp, words, 5, 4, args, kwargs, call);
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
  static const Words words = Joined<PythonCall>({kGradientOfO, kInputs, kOptions, kTokens, kGradientOfState, kThreads});
  PythonCall call;
  ReadCall(kBackwardOp, words, 6, 4, args, kwargs, call);
  const BackwardInputs& in = call.in;
  if (!in.d_o.present()) FailMissing(kBackwardOp, "do");
  const auto like = [](const ConstTensorView& x, TensorView& view) {
    if (!x.present()) return nb::object(nb::none());
    NewArray array(kBackwardOp, x.dtype(), x.sizes());
    view = array.view;
    return std::move(array.array);
  };
  Gradients g;
  const nb::object dq = like(in.q, g.dq), dk = like(in.k, g.dk), dv = like(in.v, g.dv), dbeta = like(in.beta, g.dbeta),
                   dlamb = like(in.lamb, g.dlamb), dlog_decay = like(in.log_decay, g.dlog_decay),
                   dinitial_state = like(in.initial_state, g.dinitial_state);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kBackwardOp, [&] { Backward(ctx, in, call.options, g); });
  return NewNamedTuple(type, nb::make_tuple(dq, dk, dv, dbeta, dlamb, dlog_decay, dinitial_state));
}

nb::object RunStep(const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<PythonCall>({kInputs, kState, kOptions, kThreads});
  PythonCall call;
  ReadCall(kStepOp, words, 6, 3, args, kwargs, call);
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
  const nb::object gradients =
      NamedTupleType(m, "MesaGradients", "dq dk dv dbeta dlamb dlog_decay dinitial_state", GradientsDoc(kBackwardOp));
  m.def(
      kBackwardOp,
      [gradients](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(gradients, args, kwargs); },
      nb::sig(backward.c_str()),
      Docstring(doc::kBackward, backward, {kSaid, doc::kMesaFields}, kBackwardInPython).c_str());
  m.def(kStepOp, &RunStep, nb::sig(step.c_str()),
        Docstring(doc::kStep, step, {kSaid, doc::kMesaFields}, kStepInPython).c_str());
  m.def("_torch_mesa", &RunTorch);
  m.def("_torch_mesa_backward", &RunTorchBackward);
}

}  // namespace heed::mesa

// heed.deltaformer, its gradient and heed.deltaformer_values, and the functions behind PyTorch's operators.
#include "heed/ops/exact/deltaformer/deltaformer.h"

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "docstrings/deltaformer.h"
#include "python/docstring.h"
#include "python/operation.h"

namespace heed::deltaformer {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "deltaformer", kBackwardOp[] = "deltaformer_backward", kValuesOp[] = "deltaformer_values";

struct Call : OperationCall<BackwardInputs, Options, Outputs, Gradients> {
  bool return_u = false, return_lse = false;
};
using Word = Keyword<Call>;

constexpr Differentiable<Call> kTensors[] = {
    Rows<Call, &BackwardInputs::q, &Gradients::dq>("q", "dq"),
    Rows<Call, &BackwardInputs::k, &Gradients::dk>("k", "dk"),
    Rows<Call, &BackwardInputs::v, &Gradients::dv>("v", "dv"),
    InPlace<Call, &BackwardInputs::beta, &Gradients::dbeta>("beta", "dbeta", true),
    Rows<Call, &BackwardInputs::w, &Gradients::dw>("w", "dw", true)};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
constexpr std::span<const Word> kAll = kInputs, kRequired = kAll.first(3), kOptional = kAll.subspan(3);
constexpr Word kResults[] = {{"o", false, &ReadRows<Call, &BackwardInputs::o>},
                             {"u", false, &ReadRows<Call, &BackwardInputs::u>},
                             {"lse", false, &ReadTensor<Call, &BackwardInputs::lse>}};
constexpr Word kGradientOfU[] = {{"du", true, &ReadRows<Call, &BackwardInputs::d_u>}};
constexpr Word kReturns[] = {{"return_u", false, &ReadFlag<Call, &Call::return_u>},
                             {"return_lse", false, &ReadFlag<Call, &Call::return_lse>}};
constexpr Word kTorchResults[] = {{"o", false, &WriteResult<Call, &Outputs::o>},
                                  {"u", false, &WriteResult<Call, &Outputs::u>},
                                  {"lse", true, &WriteResult<Call, &Outputs::lse>}};
constexpr Word kTorchIncoming[] = {{"the gradient of o", false, &ReadRows<Call, &BackwardInputs::d_o>},
                                   {"the gradient of u", true, &ReadRows<Call, &BackwardInputs::d_u>},
                                   {"the gradient of lse", true, &ReadTensor<Call, &BackwardInputs::d_lse>}};

void Check(const char* op, Pass pass, const Call& call) {
  CheckNeeded(
      op, pass,
      {{"q", call.in.q, "[B, T, H, D]"}, {"k", call.in.k, "[B, T, Hkv, D]"}, {"v", call.in.v, "[B, T, Hkv, Dv]"}});
  if (pass == Pass::kBackward) {
    CheckNeeded(op, pass, {{"do", call.in.d_o}, {"o", call.in.o}, {"u", call.in.u}, {"lse", call.in.lse}});
  }
}

nb::object RunForward(Call& call) {
  const ConstTensorView& q = call.in.q;
  const NewArray o(kOp, q.dtype(), std::vector<int64_t>{q.size(0), q.size(1), q.size(2), call.in.v.size(3)}),
      u(kOp, q.dtype(), call.in.v.sizes());
  std::optional<NewArray> lse;
  if (call.return_lse) {
    lse.emplace(kOp, WideDType(q), std::vector<int64_t>{q.size(0), q.size(2), q.size(1)});
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kOp, [&] { Forward(ctx, call.in, call.options, {o.view, u.view, lse ? lse->view : TensorView()}); });
  nb::list results;
  results.append(o.array);
  if (call.return_u) results.append(u.array);
  if (lse) results.append(lse->array);
  return nb::len(results) == 1 ? o.array : nb::object(nb::tuple(results));
}

// Computes the newest rows of u in place: u is the state of this call.
using ValueCall = OperationCall<ValueInputs, Options, Outputs, Gradients>;

void RunValues(const nb::args& args, const nb::kwargs& kwargs) {
  static const Keyword<ValueCall> words[] = {{"u", false, &WriteState<ValueCall>},
                                             {"k", false, &ReadRows<ValueCall, &ValueInputs::k>},
                                             {"v", false, &ReadRows<ValueCall, &ValueInputs::v>},
                                             {"beta", true, &ReadTensor<ValueCall, &ValueInputs::beta>},
                                             {"w", true, &ReadRows<ValueCall, &ValueInputs::w>},
                                             {"scale", true, &ReadOption<ValueCall, &Options::scale>},
                                             {"threads", true, &ReadThreads<ValueCall>}};
  ValueCall call;
  Read<ValueCall>(kValuesOp, words, 5, args.ptr(), kwargs.ptr(), call);
  CheckNeeded(kValuesOp, Pass::kForward,
              {{"u", call.state, "[B, Tk, Hkv, Dv]"},
               {"k", call.in.k, "[B, Tk, Hkv, D]"},
               {"v", call.in.v, "[B, N, Hkv, Dv]"}});
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kValuesOp, [&] { Values(ctx, call.in, call.options.scale, call.state); });
}

constexpr char kInPython[] = R"(
Returns o, a NumPy array in the dtype of q; with return_u=True and return_lse=True also u in that dtype, and lse
[B, H, T] in float32, or float64 for float64: (o, u), (o, lse) or (o, u, lse). An array whose last axis is not
contiguous is copied.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 100, 2, 8))
  >>> o, u = heed.deltaformer(q, k, v, rng.random((1, 100, 2)), return_u=True)
  >>> o.shape, bool(np.allclose(o, heed.attention(q, k, u, causal=True)))
  ((1, 100, 2, 8), True))";

constexpr char kBackwardInPython[] = R"(
o, u and lse are what heed.deltaformer(..., return_u=True, return_lse=True) returned. Returns the named tuple
heed.DeltaformerGradients: dq dk dv dbeta dw, NumPy arrays in the shape and dtype of what they are the gradients of;
dbeta and dw are None where no beta or w was given.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, k, v = rng.standard_normal((4, 1, 100, 2, 8))
  >>> beta = rng.random((1, 100, 2))
  >>> o, u, lse = heed.deltaformer(q, k, v, beta, return_u=True, return_lse=True)
  >>> g = heed.deltaformer_backward(do, q, k, v, o, u, lse, beta)
  >>> bool(np.isclose((g.dv * v).sum(), (do * o).sum())), g.dw is None
  (True, True))";

constexpr char kValuesText[] =
    R"(Computes the last N rows of u [B, Tk, Hkv, Dv] in place, from the rows before them:

  u_i = v_i - beta_i sum_{j < i} W_ij u_j,  W_ij = softmax over j < i of scale w_i^T k_j

These are the values of the newest N tokens, with v [B, N, Hkv, Dv], beta [B, N, Hkv] and w [B, N, Hkv, D], beside the
keys k [B, Tk, Hkv, D] of all. With N = Tk it is u of whole sequences, with N = 1 that of one more token; whole, in
parts and token by token have the same bits, those of heed.deltaformer's u. o of the newest tokens is then causal
attention of their queries to k and u, which a cache may keep.)";

constexpr char kValuesInPython[] = R"(
Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 100, 2, 8))
  >>> beta, u = rng.random((1, 100, 2)), np.zeros_like(v)
  >>> heed.deltaformer_values(u[:, :99], k[:, :99], v[:, :99], beta[:, :99])  # the first 99 tokens
  >>> heed.deltaformer_values(u, k, v[:, 99:], beta[:, 99:])  # one more
  >>> bool(np.allclose(heed.attention(q[:, 99:], k, u), heed.deltaformer(q, k, v, beta)[:, 99:]))
  True)";

constexpr Said kValuesSaid[] = {{"u", "values of all tokens; the newest are computed in place"},
                                {"k", "keys of all tokens"},
                                {"v", "values of the newest tokens"},
                                {"beta", "their factors; None: 1"},
                                {"w", "their queries of the values; None: their keys"},
                                {"scale", "factor of the logits; None: 1 / sqrt(D)"}};

constexpr Said kSaid[] = {{"beta", "factors of what is subtracted, [B, T, Hkv]; None: 1"},
                          {"w", "queries of the values, [B, T, Hkv, D]; None: k"},
                          {"scale", "factor of the logits; None: 1 / sqrt(D)"},
                          {"o", "the outputs of the forward pass"},
                          {"u", "its values u"},
                          {"lse", "its log-sum-exps, [B, H, T]"},
                          {"du", "the gradient of u; None: zeros"},
                          {"dlse", "the gradient of lse; None: zeros"},
                          {"return_u", "also return the values u"},
                          {"return_lse", "also return the log-sum-exps"}};

}  // namespace

void Bind(nb::module_& m) {
  constexpr char kArrays[] = "q: Array, k: Array, v: Array, ";
  constexpr char kOptionalArrays[] = "beta: Array | None = None, w: Array | None = None, *, ";
  constexpr char kKeywords[] =
      "scale: float | None = None, lengths: Ints | None = None, starts: Ints | None = None, cu_seqlens: Ints | None = "
      "None, ";
  static const std::string forward =
      JoinedText({"def deltaformer(", kArrays, kOptionalArrays, kKeywords,
                  "return_u: bool = False, return_lse: bool = False, threads: int | None = None) -> Result | "
                  "tuple[Result, ...]"});
  static const std::string backward =
      JoinedText({"def deltaformer_backward(do: Array, ", kArrays, "o: Array, u: Array, lse: Array, ", kOptionalArrays,
                  "du: Array | None = None, dlse: Array | None = None, ", kKeywords,
                  "threads: int | None = None) -> DeltaformerGradients"});
  const Function<Call> compute = {kOp, Pass::kForward,
                                  Joined<Call>({kInputs, kScale<Call>, kSequences<Call>, kReturns, kThreads<Call>}), 5,
                                  &Check};
  compute.Bind(m, forward, Docstring(doc::kForward, forward, {kSaid, doc::kDeltaformerFields}, kInPython), &RunForward);
  BindExplain(compute);
  BindBackward<Call>(m,
                     {kBackwardOp, Pass::kBackward,
                      Joined<Call>({kGradientOfO<Call>, kRequired, kResults, kOptional, kGradientOfU,
                                    kGradientOfLse<Call>, kScale<Call>, kSequences<Call>, kThreads<Call>}),
                      9, &Check},
                     "DeltaformerGradients", kTensors, backward,
                     Docstring(doc::kBackward, backward, {kSaid, doc::kDeltaformerFields}, kBackwardInPython));
  static const char values[] =
      "def deltaformer_values(u: OutArray, k: Array, v: Array, beta: Array | None = None, w: Array | None = None, *, "
      "scale: float | None = None, threads: int | None = None) -> None";
  m.def(kValuesOp, &RunValues, nb::sig(values), Docstring(kValuesText, values, {kValuesSaid}, kValuesInPython).c_str());
  BindTorch<Call>(
      m, kOp, Joined<Call>({kInputs, kTorchResults, kScale<Call>, kSequences<Call>, kThreads<Call>}), kBackwardOp,
      Joined<Call>({kTorchIncoming, kInputs, kResults, kGradients, kScale<Call>, kSequences<Call>, kThreads<Call>}));
}

}  // namespace heed::deltaformer

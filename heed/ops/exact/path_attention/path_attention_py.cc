// heed.path_attention and heed.path_attention_backward, and the functions behind PyTorch's operators.
#include "heed/ops/exact/path_attention/path_attention.h"

#include <span>
#include <string>
#include <vector>

#include "docstrings/path_attention.h"
#include "python/docstring.h"
#include "python/operation.h"

namespace heed::path_attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "path_attention", kBackwardOp[] = "path_attention_backward", kKeysOp[] = "path_attention_keys";

struct Call : OperationCall<BackwardInputs, Options, Outputs, Gradients> {
  bool return_lse = false;
};
using Word = Keyword<Call>;

constexpr Differentiable<Call> kTensors[] = {
    Rows<Call, &BackwardInputs::q, &Gradients::dq>("q", "dq"),
    Rows<Call, &BackwardInputs::k, &Gradients::dk>("k", "dk"),
    Rows<Call, &BackwardInputs::v, &Gradients::dv>("v", "dv"),
    Rows<Call, &BackwardInputs::w, &Gradients::dw>("w", "dw"),
    InPlace<Call, &BackwardInputs::beta, &Gradients::dbeta>("beta", "dbeta"),
    InPlace<Call, &BackwardInputs::log_forget, &Gradients::dlog_forget>("log_forget", "dlog_forget", true)};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
constexpr std::span<const Word> kAll = kInputs, kRequired = kAll.first(5), kLogForget = kAll.subspan(5, 1);
constexpr Word kResults[] = {{"o", false, &ReadRows<Call, &BackwardInputs::o>},
                             {"lse", false, &ReadTensor<Call, &BackwardInputs::lse>}};
constexpr Word kReturns[] = {{"return_lse", false, &ReadFlag<Call, &Call::return_lse>}};
constexpr Word kTorchResults[] = {{"o", false, &WriteResult<Call, &Outputs::o>},
                                  {"lse", true, &WriteResult<Call, &Outputs::lse>}};

void Check(const char* op, Pass pass, const Call& call) {
  CheckNeeded(op, pass,
              {{"q", call.in.q, "[B, T, H, D]"},
               {"k", call.in.k, "[B, T, Hkv, D]"},
               {"v", call.in.v, "[B, T, Hkv, Dv]"},
               {"w", call.in.w, "[B, T, Hkv, D]"},
               {"beta", call.in.beta}});
  if (pass == Pass::kBackward) CheckNeeded(op, pass, {{"do", call.in.d_o}, {"o", call.in.o}, {"lse", call.in.lse}});
}

nb::object RunForward(Call& call) {
  const ConstTensorView& q = call.in.q;
  const std::vector<int64_t> rows = {q.size(0), q.size(1), q.size(2), call.in.v.size(3)},
                             sums = {q.size(0), q.size(2), q.size(1)};
  return ComputeOneOrTwo(kOp, call, rows, call.return_lse, sums);
}

// Updates keys in place: they are the state of this call.
using KeyCall = OperationCall<KeyInputs, Options, Outputs, Gradients>;

void RunKeys(const nb::args& args, const nb::kwargs& kwargs) {
  static const Keyword<KeyCall> words[] = {{"keys", false, &WriteState<KeyCall>},
                                           {"w", false, &ReadRows<KeyCall, &KeyInputs::w>},
                                           {"beta", false, &ReadTensor<KeyCall, &KeyInputs::beta>},
                                           {"threads", true, &ReadThreads<KeyCall>}};
  KeyCall call;
  Read<KeyCall>(kKeysOp, words, 3, args.ptr(), kwargs.ptr(), call);
  CheckNeeded(kKeysOp, Pass::kForward, {{"keys", call.state}, {"w", call.in.w}, {"beta", call.in.beta}});
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kKeysOp, [&] { TransformKeys(ctx, call.in, call.state); });
}

constexpr char kInPython[] = R"(
Returns o, a NumPy array in the dtype of q, or (o, lse) with return_lse=True: lse [B, H, T] is float32, or float64 for
float64. An array whose last axis is not contiguous is copied.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v, w = rng.standard_normal((4, 1, 100, 2, 8))
  >>> w /= np.linalg.norm(w, axis=-1, keepdims=True)
  >>> o = heed.path_attention(q, k, v, w, 2 * rng.random((1, 100, 2)))
  >>> o.shape, bool(np.allclose(heed.path_attention(q, k, v, w, np.zeros((1, 100, 2))),
  ...                           heed.attention(q, k, v, causal=True)))
  ((1, 100, 2, 8), True))";

constexpr char kBackwardInPython[] = R"(
o and lse are what heed.path_attention(..., return_lse=True) returned. Returns the named tuple
heed.PathAttentionGradients: dq dk dv dw dbeta dlog_forget, NumPy arrays in the shape and dtype of what they are the
gradients of; dlog_forget is None where no log_forget was given.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, k, v, w = rng.standard_normal((5, 1, 100, 2, 8))
  >>> w /= np.linalg.norm(w, axis=-1, keepdims=True)
  >>> beta = 2 * rng.random((1, 100, 2))
  >>> o, lse = heed.path_attention(q, k, v, w, beta, return_lse=True)
  >>> g = heed.path_attention_backward(do, q, k, v, w, beta, o, lse)
  >>> bool(np.isclose((g.dq * q).sum(), (g.dk * k).sum())), bool(np.isclose((g.dv * v).sum(), (do * o).sum()))
  (True, True))";

constexpr char kKeysText[] =
    R"(Updates keys [B, Tk, Hkv, D] in place, so that each has passed the newest N tokens after it:

  k_j = H_{Tk-1} ... H_m k_j,  m = max(j + 1, Tk - N)

The last N keys are those of the tokens with w [B, N, Hkv, D] and beta [B, N, Hkv]. With N = Tk these are the keys of a
whole sequence for the tokens after it, with N = 1 those of one more token. o of the newest token is then attention of
its query to these keys, with log_forget as attention's log_decay. keys has the dtype of w, or float32 (float64 for
float64), in which rounding does not add up from token to token.)";

constexpr char kKeysInPython[] = R"(
Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v, w = rng.standard_normal((4, 1, 100, 2, 8))
  >>> w /= np.linalg.norm(w, axis=-1, keepdims=True)
  >>> beta, keys = 2 * rng.random((1, 100, 2)), k.copy()
  >>> heed.path_attention_keys(keys[:, :99], w[:, :99], beta[:, :99])  # the first 99 tokens
  >>> heed.path_attention_keys(keys, w[:, 99:], beta[:, 99:])  # one more
  >>> bool(np.allclose(heed.attention(q[:, 99:], keys, v), heed.path_attention(q, k, v, w, beta)[:, 99:]))
  True)";

constexpr Said kKeysSaid[] = {{"keys", "keys that have passed the tokens before the newest; changed in place"},
                              {"w", "directions of the newest tokens"},
                              {"beta", "their factors"}};

constexpr Said kSaid[] = {{"log_forget", "natural logarithms of forget gates, <= 0; None: 0"},
                          {"scale", "factor of the logits; None: 1 / sqrt(D)"},
                          {"o", "the outputs of the forward pass"},
                          {"lse", "its log-sum-exps, [B, H, T]"},
                          {"dlse", "the gradient of lse; None: zeros"},
                          {"return_lse", "also return the log-sum-exps"}};

}  // namespace

void Bind(nb::module_& m) {
  constexpr char kArrays[] = "q: Array, k: Array, v: Array, w: Array, beta: Array, ";
  constexpr char kGate[] = "log_forget: Array | None = None, *, ";
  constexpr char kKeywords[] =
      "scale: float | None = None, lengths: Ints | None = None, starts: Ints | None = None, cu_seqlens: Ints | None = "
      "None, ";
  static const std::string forward =
      JoinedText({"def path_attention(", kArrays, kGate, kKeywords,
                  "return_lse: bool = False, threads: int | None = None) -> Result | tuple[Result, Result]"});
  static const std::string backward =
      JoinedText({"def path_attention_backward(do: Array, ", kArrays, "o: Array, lse: Array, ", kGate,
                  "dlse: Array | None = None, ", kKeywords, "threads: int | None = None) -> PathAttentionGradients"});
  const Function<Call> compute = {kOp, Pass::kForward,
                                  Joined<Call>({kInputs, kScale<Call>, kSequences<Call>, kReturns, kThreads<Call>}), 6,
                                  &Check};
  compute.Bind(m, forward, Docstring(doc::kForward, forward, {kSaid, doc::kPathAttentionFields}, kInPython),
               &RunForward);
  BindExplain(compute);
  BindBackward<Call>(m,
                     {kBackwardOp, Pass::kBackward,
                      Joined<Call>({kGradientOfO<Call>, kRequired, kResults, kLogForget, kGradientOfLse<Call>,
                                    kScale<Call>, kSequences<Call>, kThreads<Call>}),
                      9, &Check},
                     "PathAttentionGradients", kTensors, backward,
                     Docstring(doc::kBackward, backward, {kSaid, doc::kPathAttentionFields}, kBackwardInPython));
  static const char keys[] =
      "def path_attention_keys(keys: OutArray, w: Array, beta: Array, *, threads: int | None = None) -> None";
  m.def(kKeysOp, &RunKeys, nb::sig(keys), Docstring(kKeysText, keys, {kKeysSaid}, kKeysInPython).c_str());
  BindTorch<Call>(m, kOp, Joined<Call>({kInputs, kTorchResults, kScale<Call>, kSequences<Call>, kThreads<Call>}),
                  kBackwardOp,
                  Joined<Call>({kTorchGradientsOfRows<Call>, kInputs, kResults, kGradients, kScale<Call>,
                                kSequences<Call>, kThreads<Call>}));
}

}  // namespace heed::path_attention

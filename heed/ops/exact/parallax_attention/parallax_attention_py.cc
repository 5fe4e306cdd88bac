// heed.parallax_attention and heed.parallax_attention_backward, and the functions behind PyTorch's operators.
#include "heed/ops/exact/parallax_attention/parallax_attention.h"

#include <cstdint>
#include <string>
#include <vector>

#include "docstrings/parallax_attention.h"
#include "python/docstring.h"
#include "python/operation.h"

namespace heed::parallax_attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "parallax_attention", kBackwardOp[] = "parallax_attention_backward";

struct Call : OperationCall<BackwardInputs, Options, Outputs, Gradients> {
  bool return_means = false, return_lse = false;
};
using Word = Keyword<Call>;

constexpr Differentiable<Call> kTensors[] = {Rows<Call, &BackwardInputs::q, &Gradients::dq>("q", "dq"),
                                             Rows<Call, &BackwardInputs::r, &Gradients::dr>("r", "dr"),
                                             Rows<Call, &BackwardInputs::k, &Gradients::dk>("k", "dk"),
                                             Rows<Call, &BackwardInputs::v, &Gradients::dv>("v", "dv")};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
constexpr Word kResults[] = {{"o", false, &ReadRows<Call, &BackwardInputs::o>},
                             {"m", false, &ReadRows<Call, &BackwardInputs::m>},
                             {"a", false, &ReadTensor<Call, &BackwardInputs::a>},
                             {"lse", false, &ReadTensor<Call, &BackwardInputs::lse>}};
constexpr Word kWindow[] = {
    {"window", true, [](Call& call, const Argument& a) { call.options.window = ToInt(a, 1, INT64_MAX); }}};
constexpr Word kReturns[] = {{"return_means", false, &ReadFlag<Call, &Call::return_means>},
                             {"return_lse", false, &ReadFlag<Call, &Call::return_lse>}};
constexpr Word kTorchResults[] = {{"o", false, &WriteResult<Call, &Outputs::o>},
                                  {"m", true, &WriteResult<Call, &Outputs::m>},
                                  {"a", true, &WriteResult<Call, &Outputs::a>},
                                  {"lse", true, &WriteResult<Call, &Outputs::lse>}};

void Check(const char* op, Pass pass, const Call& call) {
  CheckNeeded(op, pass,
              {{"q", call.in.q, "[B, Tq, H, D]"},
               {"k", call.in.k, "[B, Tk, Hkv, D]"},
               {"v", call.in.v, "[B, Tk, Hkv, Dv]"},
               {"r", call.in.r}});
  if (pass == Pass::kBackward) {
    CheckNeeded(op, pass,
                {{"do", call.in.d_o}, {"o", call.in.o}, {"m", call.in.m}, {"a", call.in.a}, {"lse", call.in.lse}});
  }
}

nb::object RunForward(Call& call) {
  const ConstTensorView& q = call.in.q;
  const DType wide = WideDType(q);
  const std::vector<int64_t> rows = {q.size(0), q.size(1), q.size(2), call.in.v.size(3)},
                             sums = {q.size(0), q.size(2), q.size(1)};
  const NewArray o(kOp, q.dtype(), rows);
  Outputs out = {o.view, {}, {}, {}};
  std::vector<NewArray> others;
  const auto add = [&](TensorView& to, const std::vector<int64_t>& sizes) {
    others.emplace_back(kOp, wide, sizes);
    to = others.back().view;
  };
  if (call.return_means) {
    add(out.m, rows);
    add(out.a, sums);
  }
  if (call.return_lse) add(out.lse, sums);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kOp, [&] { Forward(ctx, call.in, call.options, out); });
  if (others.empty()) return o.array;
  nb::list results;
  results.append(o.array);
  for (const NewArray& x : others) results.append(x.array);
  return nb::tuple(results);
}

constexpr char kInPython[] = R"(
Returns o, a NumPy array in the dtype of q; with return_means=True and return_lse=True also m and a, and lse, in
float32, or float64 for float64: (o, m, a), (o, lse) or (o, m, a, lse). An array whose last axis is not contiguous is
copied.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, r, k, v = rng.standard_normal((4, 1, 100, 2, 8))
  >>> o, m, a = heed.parallax_attention(q, r, k, v, return_means=True)
  >>> o.shape, bool(np.allclose(m, heed.attention(q, k, v, causal=True)))
  ((1, 100, 2, 8), True)
  >>> bool((heed.parallax_attention(q[:, 99:], r[:, 99:], k, v) == o[:, 99:]).all())  # decoding
  True)";

constexpr char kBackwardInPython[] = R"(
o, m, a and lse are what heed.parallax_attention(..., return_means=True, return_lse=True) returned. Returns the named
tuple heed.ParallaxAttentionGradients: dq dr dk dv, NumPy arrays in the shape and dtype of what they are the gradients
of.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, r, k, v = rng.standard_normal((5, 1, 100, 2, 8))
  >>> o, m, a, lse = heed.parallax_attention(q, r, k, v, return_means=True, return_lse=True)
  >>> g = heed.parallax_attention_backward(do, q, r, k, v, o, m, a, lse)
  >>> bool(np.isclose((g.dv * v).sum(), (do * o).sum())), bool(np.isclose((g.dr * r).sum(), (do * (o - m)).sum()))
  (True, True))";

constexpr Said kSaid[] = {{"scale", "factor of the first logits; None: 1 / sqrt(D)"},
                          {"window", "last keys that a row sees, including its own; None: all"},
                          {"o", "the outputs of the forward pass"},
                          {"m", "its means of the values"},
                          {"a", "its means of the second logits, [B, H, Tq]"},
                          {"lse", "its log-sum-exps, [B, H, Tq]"},
                          {"dlse", "the gradient of lse; None: zeros"},
                          {"return_means", "also return the means m and a"},
                          {"return_lse", "also return the log-sum-exps"}};

}  // namespace

void Bind(nb::module_& m) {
  constexpr char kArrays[] = "q: Array, r: Array, k: Array, v: Array, ";
  constexpr char kKeywords[] =
      "scale: float | None = None, window: int | None = None, lengths: Ints | None = None, starts: Ints | None = None, "
      "cu_seqlens: Ints | None = None, ";
  static const std::string forward =
      JoinedText({"def parallax_attention(", kArrays, "*, ", kKeywords,
                  "return_means: bool = False, return_lse: bool = False, threads: int | None = None) -> Result | "
                  "tuple[Result, ...]"});
  static const std::string backward = JoinedText(
      {"def parallax_attention_backward(do: Array, ", kArrays, "o: Array, m: Array, a: Array, lse: Array, *, ",
       "dlse: Array | None = None, ", kKeywords, "threads: int | None = None) -> ParallaxAttentionGradients"});
  const Function<Call> compute = {
      kOp, Pass::kForward, Joined<Call>({kInputs, kScale<Call>, kWindow, kSequences<Call>, kReturns, kThreads<Call>}),
      4, &Check};
  compute.Bind(m, forward, Docstring(doc::kForward, forward, {kSaid, doc::kParallaxAttentionFields}, kInPython),
               &RunForward);
  BindExplain(compute);
  BindBackward<Call>(m,
                     {kBackwardOp, Pass::kBackward,
                      Joined<Call>({kGradientOfO<Call>, kInputs, kResults, kGradientOfLse<Call>, kScale<Call>, kWindow,
                                    kSequences<Call>, kThreads<Call>}),
                      9, &Check},
                     "ParallaxAttentionGradients", kTensors, backward,
                     Docstring(doc::kBackward, backward, {kSaid, doc::kParallaxAttentionFields}, kBackwardInPython));
  BindTorch<Call>(m, kOp,
                  Joined<Call>({kInputs, kTorchResults, kScale<Call>, kWindow, kSequences<Call>, kThreads<Call>}),
                  kBackwardOp,
                  Joined<Call>({kTorchGradientsOfRows<Call>, kInputs, kResults, kGradients, kScale<Call>, kWindow,
                                kSequences<Call>, kThreads<Call>}));
}

}  // namespace heed::parallax_attention

// heed.attention_residual and heed.attention_residual_backward, and the functions behind PyTorch's operators.
#include "heed/ops/exact/attention_residual/attention_residual.h"

#include <vector>

#include "docstrings/attention_residual.h"
#include "python/docstring.h"
#include "python/operation.h"

namespace heed::attention_residual {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "attention_residual", kBackwardOp[] = "attention_residual_backward";

struct Call : OperationCall<BackwardInputs, Options, Outputs, Gradients> {
  bool return_weights = false;
};

constexpr Differentiable<Call> kTensors[] = {
    InPlace<Call, &BackwardInputs::query, &Gradients::dquery>("query", "dquery"),
    Rows<Call, &BackwardInputs::residuals, &Gradients::dresiduals>("residuals", "dresiduals"),
    InPlace<Call, &BackwardInputs::weight, &Gradients::dweight>("weight", "dweight", true)};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
constexpr Keyword<Call> kOptions[] = {{"eps", false, &ReadOption<Call, &Options::eps>},
                                      {"scale", false, &ReadOption<Call, &Options::scale>}};
constexpr Keyword<Call> kReturnWeights[] = {{"return_weights", false, &ReadFlag<Call, &Call::return_weights>}};
constexpr Keyword<Call> kTorchIncoming[] = {{"the gradient of o", false, &ReadRows<Call, &BackwardInputs::d_o>}};
constexpr Keyword<Call> kTorchResults[] = {{"o", false, &WriteResult<Call, &Outputs::o>},
                                           {"weights", true, &WriteResult<Call, &Outputs::weights>}};

void Check(const char* op, Pass pass, const Call& call) {
  const ConstTensorView& v = call.in.residuals;
  CheckNeeded(op, pass, {{"query", call.in.query}, {"residuals", v}});
  // The sizes of results follow from its rank.
  if (v.rank() < 3) Fail(op, "residuals", "has shape " + v.ShapeString(), "[L, ..., D] with 1 to 4 axes of tokens");
  if (pass == Pass::kBackward) CheckNeeded(op, pass, {{"do", call.in.d_o}});
}

nb::object RunForward(Call& call) {
  const ConstTensorView& v = call.in.residuals;
  const std::vector<int64_t> sizes(v.sizes().begin(), v.sizes().end());
  NewArray o(kOp, v.dtype(), std::vector<int64_t>(sizes.begin() + 1, sizes.end()));
  Context& ctx = ThreadContext(call.num_threads);
  if (!call.return_weights) {
    Compute(kOp, [&] { Forward(ctx, call.in, call.options, {o.view, {}}); });
    return o.array;
  }
  NewArray weights(kOp, WideDType(v), std::vector<int64_t>(sizes.begin(), sizes.end() - 1));
  Compute(kOp, [&] { Forward(ctx, call.in, call.options, {o.view, weights.view}); });
  return nb::make_tuple(o.array, weights.array);
}

constexpr char kInPython[] = R"(
Returns o, a NumPy array in the dtype of residuals, or (o, weights) with return_weights=True: weights [L, ...] are the
probabilities, float32, or float64 for float64. An array whose last axis is not contiguous is copied.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> outputs = [rng.standard_normal((1, 10, 16), np.float32) for layer in range(5)]
  >>> o, p = heed.attention_residual(np.zeros(16, np.float32), np.stack(outputs), return_weights=True)
  >>> bool(np.allclose(o, np.mean(outputs, 0), atol=1e-6)), p.shape  # a query of zeros: their mean
  (True, (5, 1, 10)))";

constexpr char kBackwardInPython[] = R"(
Returns the named tuple heed.AttentionResidualGradients: dquery dresiduals dweight, NumPy arrays in the shape and dtype
of what they are the gradients of; dweight is None where no weight was given.

Example:

  >>> import heed, numpy as np
  >>> g = heed.attention_residual_backward(np.ones((1, 4, 8)), np.zeros(8), np.ones((5, 1, 4, 8)))
  >>> float(g.dresiduals[0, 0, 0, 0])
  0.2)";

constexpr Said kSaid[] = {{"weight", "[D]: weight of the RMS norm; None: ones"},
                          {"eps", "added to the mean square of a row"},
                          {"scale", "factor of the logits"},
                          {"return_weights", "also return the probabilities"}};

}  // namespace

void Bind(nb::module_& m) {
  static const char forward[] =
      "def attention_residual(query: Array, residuals: Array, weight: Array | None = None, *, eps: float = 1e-06, "
      "scale: float = 1.0, return_weights: bool = False, threads: int | None = None) -> Result | tuple[Result, Result]";
  static const char backward[] =
      "def attention_residual_backward(do: Array, query: Array, residuals: Array, weight: Array | None = None, *, "
      "eps: float = 1e-06, scale: float = 1.0, threads: int | None = None) -> AttentionResidualGradients";
  const Function<Call> compute = {kOp, Pass::kForward,
                                  Joined<Call>({kInputs, kOptions, kReturnWeights, kThreads<Call>}), 3, &Check};
  compute.Bind(m, forward, Docstring(doc::kForward, forward, {kSaid, doc::kAttentionResidualFields}, kInPython),
               &RunForward);
  BindExplain(compute);
  BindBackward<Call>(
      m,
      {kBackwardOp, Pass::kBackward, Joined<Call>({kGradientOfO<Call>, kInputs, kOptions, kThreads<Call>}), 4, &Check},
      "AttentionResidualGradients", kTensors, backward,
      Docstring(doc::kBackward, backward, {kSaid, doc::kAttentionResidualFields}, kBackwardInPython));
  BindTorch<Call>(m, kOp, Joined<Call>({kInputs, kTorchResults, kOptions, kThreads<Call>}), kBackwardOp,
                  Joined<Call>({kTorchIncoming, kInputs, kGradients, kOptions, kThreads<Call>}));
}

}  // namespace heed::attention_residual

// heed.attention_weights and heed.attention_map.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <string>

#include "docstrings/attention_weights.h"
#include "heed/ops/exact/attention/attention_call_py.h"
#include "heed/ops/exact/attention/attention_options_py.h"
#include "heed/ops/exact/attention/weights/attention_weights.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/runtime.h"

namespace heed::attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr Said kArguments[] = {
    {"lse", "[B, Hq, Tq]: that of heed.attention, float32 or float64; None: computed"},
    {"rows", "ints: queries below Tq, in the order given; None: all"},
    {"heads", "ints: query heads below Hq, in the order given; None: all"},
    {"size", "(rows, columns) of the picture, at most (Tq, Tk)"},
    {"reduce", "'mean' or 'max': of the pairs of a bin"},
    {"options",
     "the other keywords of heed.attention, as they are there, but those of packed "
     "sequences, out and return_lse"},
};

constexpr char kWeightsInPython[] = R"(
Returns float32 [B, H, rows, Tk]; float64 arguments are computed in float64.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k = rng.standard_normal((2, 1, 6, 2, 16), np.float32)
  >>> heed.attention_weights(q, k, causal=True, rows=[0, 5])[0, 0, 0].tolist()
  [1.0, 0.0, 0.0, 0.0, 0.0, 0.0])";

constexpr char kMapInPython[] = R"(
Returns float32 [B, Hq, r, c]; float64 arguments are computed in float64.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k = rng.standard_normal((2, 1, 64, 2, 16), np.float32)
  >>> heed.attention_map(q, k, causal=True, size=(8, 8)).shape
  (1, 2, 8, 8))";

constexpr char kWeightsSignature[] =
    "def attention_weights(q: Array, k: Array, *, "
    "lse: Array | None = None, "
    "rows: Ints | None = None, "
    "heads: Ints | None = None, "
    "**options) -> numpy.typing.NDArray[numpy.float32]";

constexpr char kMapSignature[] =
    "def attention_map(q: Array, k: Array, *, "
    "size: tuple[int, int] = (64, 64), "
    "reduce: typing.Literal['mean', 'max'] = 'mean', "
    "**options) -> numpy.typing.NDArray[numpy.float32]";

// Returns a result array: computed in f64 for f64, else in f32.
template <class F>
nb::object Filled(const char* op, const Call& call, const std::vector<int64_t>& sizes, const F& fill) {
  const bool wide = call.in.q.dtype() == DType::kF64;
  NewArray array(op, wide ? DType::kF64 : DType::kF32, sizes);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(op, [&] { fill(ctx, array.view); });
  return wide ? nb::object(array.array.attr("astype")("float32")) : std::move(array.array);
}

nb::object AttentionWeights(const nb::args& args, const nb::kwargs& kwargs) {
  constexpr char kOp[] = "attention_weights";
  constexpr const char* kMore[] = {"lse", "rows", "heads"};
  Call call;
  ReadWeightsCall(kOp, kMore, args.ptr(), kwargs.ptr(), call);
  const ConstTensorView& q = call.in.q;
  const WeightsInputs in = {q, call.in.k, call.lse};
  const WeightsSelection selection = {call.rows, call.heads};
  const auto count = [](const ConstTensorView& chosen, int64_t all) {
    return chosen.present() && chosen.rank() == 1 ? chosen.size(0) : all;
  };
  return Filled(kOp, call, {q.size(0), count(call.heads, q.size(2)), count(call.rows, q.size(1)), call.in.k.size(1)},
                [&](Context& ctx, const TensorView& out) { Weights(ctx, in, call.options, selection, out); });
}

nb::object AttentionMap(const nb::args& args, const nb::kwargs& kwargs) {
  constexpr char kOp[] = "attention_map";
  constexpr const char* kMore[] = {"size", "reduce"};
  Call call;
  ReadWeightsCall(kOp, kMore, args.ptr(), kwargs.ptr(), call);
  const ConstTensorView& q = call.in.q;
  return Filled(
      kOp, call,
      {q.size(0), q.size(2), std::min(call.map_rows, q.size(1)), std::min(call.map_columns, call.in.k.size(1))},
      [&](Context& ctx, const TensorView& out) { Map(ctx, {q, call.in.k, {}}, call.options, call.reduce, out); });
}

}  // namespace

void BindWeights(nb::module_& m) {
  m.def("attention_weights", &AttentionWeights, nb::sig(Spelled(kWeightsSignature, &TakesPadded, kThreads)),
        Docstring(doc::kWeights, kWeightsSignature, {kArguments, doc::kAttentionWeightsFields}, kWeightsInPython)
            .c_str());
  m.def("attention_map", &AttentionMap, nb::sig(Spelled(kMapSignature, &TakesPadded, kThreads)),
        Docstring(doc::kMap, kMapSignature, {kArguments, doc::kAttentionWeightsFields}, kMapInPython).c_str());
}

}  // namespace heed::attention

// heed.rotary, heed.sinusoidal, heed.t5_bias and heed.t5_bias_backward.
#include "python/positions.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>

#include "docstrings/rotary.h"
#include "docstrings/rotary_scaling.h"
#include "docstrings/sinusoidal.h"
#include "docstrings/t5_bias.h"
#include "heed/ops/positions/rotary.h"
#include "heed/ops/positions/sinusoidal.h"
#include "heed/ops/positions/t5_bias.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/rope_scaling.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"

namespace heed::python {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 31;

void RequireFloat(const char* operation, const char* name, const ConstTensorView& t) {
  if (IsFloat(t.dtype())) return;
  Fail(operation, name, std::string("has dtype ") + Name(t.dtype()), "f64, f32, bf16 or f16");
}

// heed.rotary.

struct RotaryCall {
  Arrays arrays;
  ConstTensorView x, positions;
  std::optional<double> base;
  std::optional<bool> interleaved;
  RopeConfig config;
  RotaryOptions options;
};

constexpr char kRotary[] = "rotary";

constexpr Keyword<RotaryCall> kRotaryKeywords[] = {
    {"x", false, [](RotaryCall& c, const Argument& a) { c.x = c.arrays.Read(a, Kind::kFloat); }},
    {"positions", false, [](RotaryCall& c, const Argument& a) { c.positions = c.arrays.ReadList(a, Kind::kInt); }},
    {"base", false, [](RotaryCall& c, const Argument& a) { c.base = ToFinite(a); }},
    {"dim", true, [](RotaryCall& c, const Argument& a) { c.options.dim = ToInt(a, 1, INT64_MAX); }},
    {"interleaved", false, [](RotaryCall& c, const Argument& a) { c.interleaved = ToBool(a); }},
    {"scaling", true, [](RotaryCall& c, const Argument& a) { c.config = ToRopeConfig(a); }},
    {"inverse", false, [](RotaryCall& c, const Argument& a) { c.options.inverse = ToBool(a); }},
};

// The base and the rotated part of rows of D elements may be given in the dict or as keywords; if in both, they must
// agree.
void MergeConfig(const char* op, int64_t D, RotaryCall& call) {
  const auto& theta = call.config.rope_theta;
  if (theta && call.base && *theta != *call.base) {
    Fail(op, "base", "differs from scaling.rope_theta", "one of them, or equal");
  }
  call.options.base = theta.value_or(call.base.value_or(call.options.base));
  call.options.scaling = call.config.scaling;
  if (!call.config.partial_rotary_factor) return;
  if (!(*call.config.partial_rotary_factor > 0 && *call.config.partial_rotary_factor <= 1)) {
    Fail(op, "scaling.partial_rotary_factor", "is out of range", "above 0, at most 1");
  }
  // Transformers rounds down too.
  const auto dim = static_cast<int64_t>(static_cast<double>(D) * *call.config.partial_rotary_factor);
  if (call.options.dim && *call.options.dim != dim) {
    Fail(op, "dim", "is " + std::to_string(*call.options.dim),
         std::to_string(dim) + " by scaling.partial_rotary_factor");
  }
  call.options.dim = dim;
}

RotaryPairs PairsOf(const RotaryCall& call) {
  return *call.interleaved ? RotaryPairs::kInterleaved : RotaryPairs::kHalfSplit;
}

nb::object RotaryArray(const nb::args& args, const nb::kwargs& kwargs) {
  RotaryCall call;
  Read<RotaryCall>(kRotary, kRotaryKeywords, 2, args.ptr(), kwargs.ptr(), call);
  if (!call.x.present()) FailMissing(kRotary, "x");
  if (!call.positions.present()) FailMissing(kRotary, "positions");
  if (!call.interleaved) FailMissing(kRotary, "interleaved");
  RequireFloat(kRotary, "x", call.x);
  if (call.x.rank() != 0) MergeConfig(kRotary, call.x.size(call.x.rank() - 1), call);
  NewArray y(kRotary, call.x.dtype(), call.x.sizes());
  Context& ctx = ThreadContext(0);
  Compute(kRotary, [&] { Rotary(ctx, call.x, call.positions, PairsOf(call), call.options, y.view); });
  return y.array;
}

// heed.sinusoidal.

nb::object SinusoidalArray(nb::handle T, nb::handle D, nb::handle interleaved) {
  constexpr char kOp[] = "sinusoidal";
  const int64_t sizes[] = {ToInt({kOp, "T", T}, 0, kMostRows), ToInt({kOp, "D", D}, 1, kMostRows)};
  const bool neighbours = ToBool({kOp, "interleaved", interleaved});
  NewArray table(kOp, DType::kF32, sizes);
  Context& ctx = ThreadContext(0);
  Compute(kOp, [&] {
    Sinusoidal(ctx, neighbours ? SinusoidalOrder::kInterleaved : SinusoidalOrder::kConcatenated, table.view);
  });
  return table.array;
}

// heed.t5_bias and its gradient.

struct T5Call {
  Arrays arrays;
  ConstTensorView in;  // table or dbias
  std::optional<int64_t> Tq, Tk, buckets;
  std::optional<T5Direction> direction;
  T5BiasOptions options;
};

template <int64_t kMin, std::optional<int64_t> T5Call::* kField>
void ReadSize(T5Call& call, const Argument& a) {
  call.*kField = ToInt(a, kMin, kMostRows);
}

void ReadInput(T5Call& call, const Argument& a) {
  call.in = call.arrays.Read(a, Kind::kFloat);
  RequireFloat(a.operation, a.name, call.in);
}

void ReadDirection(T5Call& call, const Argument& a) {
  call.direction = ToBool(a) ? T5Direction::kBidirectional : T5Direction::kCausal;
}

void ReadDistance(T5Call& call, const Argument& a) { call.options.max_distance = ToInt(a, 1, INT64_MAX); }

void ReadAlign(T5Call& call, const Argument& a) {
  constexpr char kExpected[] = "'bottom_right' or 'top_left'";
  const std::string name = ToString(a, kExpected);
  if (name != "bottom_right" && name != "top_left") Fail(a, kExpected);
  call.options.top_left = name == "top_left";
}

constexpr Keyword<T5Call> kT5Keywords[] = {
    {"table", false, &ReadInput},
    {"Tq", false, &ReadSize<0, &T5Call::Tq>},
    {"Tk", false, &ReadSize<0, &T5Call::Tk>},
    {"bidirectional", false, &ReadDirection},
    {"max_distance", false, &ReadDistance},
    {"align", false, &ReadAlign},
};

constexpr Keyword<T5Call> kT5BackwardKeywords[] = {
    {"dbias", false, &ReadInput},
    {"Tq", false, &ReadSize<0, &T5Call::Tq>},
    {"Tk", false, &ReadSize<0, &T5Call::Tk>},
    {"buckets", false, &ReadSize<1, &T5Call::buckets>},
    {"bidirectional", false, &ReadDirection},
    {"max_distance", false, &ReadDistance},
    {"align", false, &ReadAlign},
};

void RequireT5(const char* operation, const char* in, const T5Call& call) {
  if (!call.in.present()) FailMissing(operation, in);
  if (!call.Tq) FailMissing(operation, "Tq");
  if (!call.Tk) FailMissing(operation, "Tk");
  if (!call.direction) FailMissing(operation, "bidirectional");
}

nb::object T5BiasArray(const nb::args& args, const nb::kwargs& kwargs) {
  constexpr char kOp[] = "t5_bias";
  T5Call call;
  Read<T5Call>(kOp, kT5Keywords, 3, args.ptr(), kwargs.ptr(), call);
  RequireT5(kOp, "table", call);
  if (call.in.rank() != 2) Fail(kOp, "table", "has shape " + call.in.ShapeString(), "[buckets, H]");
  const int64_t sizes[] = {call.in.size(1), *call.Tq, *call.Tk};
  NewArray bias(kOp, call.in.dtype(), sizes);
  Context& ctx = ThreadContext(0);
  Compute(kOp, [&] { T5Bias(ctx, call.in, *call.direction, call.options, bias.view); });
  return bias.array;
}

nb::object T5BiasBackwardArray(const nb::args& args, const nb::kwargs& kwargs) {
  constexpr char kOp[] = "t5_bias_backward";
  T5Call call;
  Read<T5Call>(kOp, kT5BackwardKeywords, 3, args.ptr(), kwargs.ptr(), call);
  RequireT5(kOp, "dbias", call);
  if (!call.buckets) FailMissing(kOp, "buckets");
  if (call.in.rank() != 3 || call.in.size(1) != *call.Tq || call.in.size(2) != *call.Tk) {
    Fail(kOp, "dbias", "has shape " + call.in.ShapeString(),
         "[H, " + std::to_string(*call.Tq) + ", " + std::to_string(*call.Tk) + "]");
  }
  const int64_t sizes[] = {*call.buckets, call.in.size(0)};
  NewArray dtable(kOp, call.in.dtype(), sizes);
  Context& ctx = ThreadContext(0);
  Compute(kOp, [&] { T5BiasBackward(ctx, call.in, *call.direction, call.options, dtable.view); });
  return dtable.array;
}

// Signatures for stubs and help(), and what docstrings add.

constexpr char kRotarySignature[] =
    "def rotary(x: Array, positions: Positions, *, "
    "base: float = 10000.0, dim: int | None = None, interleaved: bool, "
    "scaling: dict[str, typing.Any] | None = None, inverse: bool = False"
    ") -> Result";

constexpr char kSinusoidalSignature[] =
    "def sinusoidal(T: int, D: int, *, interleaved: bool = True"
    ") -> numpy.typing.NDArray[numpy.float32]";

constexpr char kT5Signature[] =
    "def t5_bias(table: Array, Tq: int, Tk: int, *, "
    "bidirectional: bool, max_distance: int = 128, "
    "align: typing.Literal['bottom_right', 'top_left'] = 'bottom_right'"
    ") -> Result";

constexpr char kT5BackwardSignature[] =
    "def t5_bias_backward(dbias: Array, Tq: int, Tk: int, *, "
    "buckets: int, bidirectional: bool, max_distance: int = 128, "
    "align: typing.Literal['bottom_right', 'top_left'] = 'bottom_right'"
    ") -> Result";

constexpr Said kArguments[] = {
    {"x", "[B, T, H, D] or [T, H, D]: rows to rotate, any float dtype"},
    {"positions", "[T] or [B, T]: positions of the rows, ints or lists of them"},
    {"base", "base of the frequencies, above 1"},
    {"dim", "elements of a row that are rotated: even, 2 to D; default D"},
    {"interleaved", "whether a pair is two neighbours, or elements half of dim apart; no default"},
    {"scaling", "`rope_scaling` or `rope_parameters` of a Transformers config, or None"},
    {"inverse", "whether to apply the inverse rotation"},
    {"T", "rows of the table, one per position"},
    {"D", "columns of the table, at least 1"},
    {"table", "[buckets, H]: a bias for each bucket of distances and head"},
    {"dbias", "[H, Tq, Tk]: the gradient of the bias"},
    {"Tq", "number of queries"},
    {"Tk", "number of keys"},
    {"buckets", "rows of the table"},
    {"bidirectional",
     "whether keys after a query have buckets of their own: True in T5's encoder, "
     "False in its decoder; no default"},
    {"max_distance", "distance from which on all share a bucket"},
    {"align", "position of query 0: Tk - Tq for 'bottom_right', 0 for 'top_left'"},
};
constexpr Said kSinusoidalArguments[] = {
    {"interleaved", "whether sines and cosines alternate, or all sines come first"}};

constexpr char kRotaryInPython[] = R"(
The keys of scaling are the fields of RotaryScaling (type means rope_type), rope_theta (the base)
and partial_rotary_factor (dim is this times D, rounded down). A value of None counts as absent.
Fields that a config has outside of the dict, such as original_max_position_embeddings of Phi-3 or
max_position_embeddings for 'dynamic', must be added to it. A key that the type does not use is an
error, so that no part of a config is ignored silently.

Returns y as a new NumPy array.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> x = rng.standard_normal((1, 6, 2, 16), np.float32)
  >>> y = heed.rotary(x, np.arange(6), interleaved=False)
  >>> back = heed.rotary(y, np.arange(6), interleaved=False, inverse=True)
  >>> bool(np.allclose(back, x, atol=1e-6))
  True)";

constexpr char kSinusoidalInPython[] = R"(
Returns a new NumPy array [T, D], float32.

Example:

  >>> import heed
  >>> heed.sinusoidal(2, 4)[0].tolist()
  [0.0, 1.0, 0.0, 1.0])";

constexpr char kT5InPython[] = R"(
Returns a new NumPy array [H, Tq, Tk] in the dtype of table, which can be given to
heed.attention as `bias` (T5 has scale=1 there).

Example:

  >>> import heed, numpy as np
  >>> table = np.arange(32, dtype=np.float32)[:, None]
  >>> heed.t5_bias(table, 1, 4, bidirectional=False)[0].tolist()
  [[3.0, 2.0, 1.0, 0.0]])";

constexpr char kT5BackwardInPython[] = R"(
Returns dtable as a new NumPy array [buckets, H] in the dtype of dbias.

Example:

  >>> import heed, numpy as np
  >>> dbias = np.ones((1, 1, 4), np.float32)
  >>> heed.t5_bias_backward(dbias, 1, 4, buckets=6, bidirectional=False)[:, 0].tolist()
  [1.0, 1.0, 1.0, 1.0, 0.0, 0.0])";

}  // namespace

RotaryChoice ToRotary(const Argument& argument, int64_t dim) {
  if (!PyDict_Check(argument.value.ptr())) Fail(argument, "a dict of heed.rotary's keywords");
  RotaryCall call;
  for (const auto& [key, value] : nb::borrow<nb::dict>(argument.value)) {
    const std::string name = ToString({argument.operation, "rotary's key", key}, "a string");
    const auto keyword = std::ranges::find_if(kRotaryKeywords, [&](const auto& known) {
      return name == known.name && name != "x" && name != "positions" && name != "inverse";
    });
    if (keyword == std::end(kRotaryKeywords)) {
      Fail(argument.operation, argument.name, "has the key '" + name + "'", "heed.rotary's keywords but inverse");
    }
    if (value.is_none() && keyword->none_is_absent) continue;
    const std::string full = std::string(argument.name) + "." + name;
    keyword->read(call, {argument.operation, full.c_str(), value});
  }
  if (!call.interleaved) {
    Fail(argument.operation, argument.name, "lacks 'interleaved'", "it, as no convention is the default");
  }
  MergeConfig(argument.operation, dim, call);
  return {PairsOf(call), call.options};
}

void BindPositions(nb::module_& m) {
  using namespace nanobind::literals;
  m.def("rotary", &RotaryArray, nb::sig(kRotarySignature),
        Docstring(JoinedText({doc::kRotary, "\n\n", doc::kScaledRotaryFrequencies}), kRotarySignature, {kArguments},
                  kRotaryInPython)
            .c_str());
  m.def("sinusoidal", &SinusoidalArray, "T"_a.none(), "D"_a.none(), nb::kw_only(), "interleaved"_a.none() = true,
        nb::sig(kSinusoidalSignature),
        Docstring(doc::kSinusoidal, kSinusoidalSignature, {kSinusoidalArguments, kArguments}, kSinusoidalInPython)
            .c_str());
  m.def("t5_bias", &T5BiasArray, nb::sig(kT5Signature),
        Docstring(doc::kT5Bias, kT5Signature, {kArguments}, kT5InPython).c_str());
  m.def("t5_bias_backward", &T5BiasBackwardArray, nb::sig(kT5BackwardSignature),
        Docstring(doc::kT5BiasBackward, kT5BackwardSignature, {kArguments}, kT5BackwardInPython).c_str());
}

}  // namespace heed::python

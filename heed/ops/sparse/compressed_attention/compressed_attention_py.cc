// heed.compressed_attention and heed.compressed_attention_backward, and the functions behind PyTorch's operators.
#include "heed/ops/sparse/compressed_attention/compressed_attention.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "docstrings/compressed_attention.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/patterns/pattern_py.h"
#include "python/docstring.h"
#include "python/layout.h"
#include "python/operation.h"

namespace heed::compressed_attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "compressed_attention", kBackwardOp[] = "compressed_attention_backward";
constexpr size_t kPositional = 5;

struct Call : OperationCall<BackwardInputs, Options, Outputs, Gradients> {
  Pattern chosen;  // owns the keys that in.chosen is a view of
  bool has_ratio = false, has_window = false;
  bool return_lse = false;
  nb::handle given_out;
  bool describe = false;  // for explain, which ignores `out`
};
using Words = std::vector<Keyword<Call>>;
using B = BackwardInputs;

// The keys that a pattern lists for each row, i64. Throws InvalidArgument for other patterns than `keys`.
ConstTensorView KeysOf(const Pattern& pattern, const Argument& a) {
  if (!pattern.present() || pattern.node()->builder != "keys") {
    Fail(a, "an int array of keys, or a pattern of heed.select.indexer or heed.patterns.keys");
  }
  const auto& table = std::get<patterns::Table>(pattern.node()->values[0]);
  return {table.values.data(), DType::kI64, table.shape};
}

void ReadChosen(Call& call, const Argument& a) {
  const Pattern* pattern = nullptr;
  if (!nb::try_cast(a.value, pattern) || pattern == nullptr) {
    call.in.chosen = call.arrays.ReadInPlace(a, Kind::kInt);
  } else {
    call.chosen = *pattern;
    call.in.chosen = KeysOf(call.chosen, a);
  }
}

constexpr Differentiable<Call> kTensors[] = {Rows<Call, &B::q, &Gradients::dq>("q", "dq"),
                                             Rows<Call, &B::k, &Gradients::dk>("k", "dk"),
                                             Rows<Call, &B::v, &Gradients::dv>("v", "dv"),
                                             Rows<Call, &B::k_cmp, &Gradients::dk_cmp>("k_cmp", "dk_cmp"),
                                             Rows<Call, &B::v_cmp, &Gradients::dv_cmp>("v_cmp", "dv_cmp"),
                                             Numbers<Call, &B::sinks, &Gradients::dsinks>("sinks", "dsinks", true)};
constexpr auto kInputs = InputsOf(kTensors), kGradients = GradientsOf(kTensors);
constexpr Keyword<Call> kChosen[] = {{"chosen", true, &ReadChosen}};
constexpr Keyword<Call> kOptions[] = {
    {"ratio", false,
     [](Call& call, const Argument& a) {
       call.options.ratio = ToInt(a, 1, INT64_MAX);
       call.has_ratio = true;
     }},
    {"window", false,
     [](Call& call, const Argument& a) {
       call.options.window = ToInt(a, 0, INT64_MAX);
       call.has_window = true;
     }},
    {"start", true, [](Call& call, const Argument& a) { call.options.start = ToInt(a, 0, INT64_MAX); }},
    {"scale", true, &ReadOption<Call, &Options::scale>},
    {"lengths", true, &ReadInts<Call, &Options::lengths>},
    {"starts", true, &ReadInts<Call, &Options::starts>},
    {"cu_seqlens", true, &ReadInts<Call, &Options::cu_seqlens>}};
constexpr Keyword<Call> kResults[] = {{"return_lse", false, &ReadFlag<Call, &Call::return_lse>},
                                      {"out", true, [](Call& call, const Argument& a) {
                                         if (call.describe) return;
                                         call.given_out = a.value;
                                         call.out.o = call.arrays.Write(a, Kind::kFloat);
                                       }}};
constexpr Keyword<Call> kThreads[] = {{"threads", true, &ReadThreads<Call>}};
constexpr Keyword<Call> kGradientOfO[] = {{"do", false, &ReadRows<Call, &B::d_o>}};
constexpr Keyword<Call> kOfForward[] = {{"o", true, &ReadRows<Call, &B::o>}, {"lse", true, &ReadTensor<Call, &B::lse>}};
constexpr Keyword<Call> kGradientOfLse[] = {{"dlse", true, &ReadTensor<Call, &B::d_lse>}};
constexpr Keyword<Call> kTorchIncoming[] = {{"the gradient of o", false, &ReadRows<Call, &B::d_o>},
                                            {"the gradient of lse", true, &ReadTensor<Call, &B::d_lse>}};
constexpr Keyword<Call> kTorchResults[] = {{"o", false, &WriteResult<Call, &Outputs::o>},
                                           {"lse", false, &WriteResult<Call, &Outputs::lse>}};

// Reads a call of Python; required arguments are present afterwards, with the rank and dtype that determine the
// results.
void ReadCall(const char* op, const Words& words, size_t num_positional, PyObject* args, PyObject* kwargs, Call& call) {
  Read<Call>(op, words, num_positional, args, kwargs, call);
  const BackwardInputs& in = call.in;
  for (const auto& [name, x, shape] : {std::tuple{"q", in.q, "[B, Tq, Hq, D]"},
                                       {"k", in.k, "[B, Tk, Hkv, D]"},
                                       {"v", in.v, "[B, Tk, Hkv, Dv]"},
                                       {"k_cmp", in.k_cmp, "[B, N, Hkv, D]"},
                                       {"v_cmp", in.v_cmp, "[B, N, Hkv, Dv]"}}) {
    if (!x.present()) FailMissing(op, name);
    if (x.rank() != 4) Fail(op, name, "has shape " + x.ShapeString(), shape);
  }
  if (!call.has_ratio) FailMissing(op, "ratio");
  if (!call.has_window) FailMissing(op, "window");
  if (!IsFloat(in.q.dtype())) Fail(op, "q", std::string("has dtype ") + Name(in.q.dtype()), "f64, f32, bf16 or f16");
}

std::vector<int64_t> SizesOfO(const B& in) { return {in.q.size(0), in.q.size(1), in.q.size(2), in.v.size(3)}; }
NewArray NewLse(const char* op, const B& in) {
  return NewArray(op, in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32,
                  std::vector<int64_t>{in.q.size(0), in.q.size(2), in.q.size(1)});
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words = Joined<Call>({kInputs, kChosen, kOptions, kResults, kThreads});
  Call call;
  ReadCall(kOp, words, kPositional, args.ptr(), kwargs.ptr(), call);
  WarnOfHeadsBeforeTokens(kOp, call.in.q, call.in.k, call.in.v);
  nb::object o = nb::borrow(call.given_out), lse;
  if (!o.is_valid()) {
    NewArray array(kOp, call.in.q.dtype(), SizesOfO(call.in));
    call.out.o = array.view;
    o = std::move(array.array);
  }
  if (call.return_lse) {
    NewArray array = NewLse(kOp, call.in);
    call.out.lse = array.view;
    lse = std::move(array.array);
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kOp, [&] { Forward(ctx, call.in, call.options, call.out); });
  if (!call.return_lse) return o;
  return nb::make_tuple(o, lse);
}

nb::object RunBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  static const Words words =
      Joined<Call>({kGradientOfO, kInputs, kOfForward, kGradientOfLse, kChosen, kOptions, kThreads});
  Call call;
  ReadCall(kBackwardOp, words, kPositional + 1, args.ptr(), kwargs.ptr(), call);
  B& in = call.in;
  if (!in.d_o.present()) FailMissing(kBackwardOp, "do");
  if (in.o.present() != in.lse.present()) {
    Fail(kBackwardOp, in.o.present() ? "lse" : "o", "is None", "o and lse, or none of them");
  }
  const bool again = !in.o.present();
  const NewArray o(kBackwardOp, in.q.dtype(), again ? SizesOfO(in) : std::vector<int64_t>{0}),
      lse = NewLse(kBackwardOp, in);
  return NewGradients<Call>(kBackwardOp, type, kTensors, call, [&](Context& ctx) {
    if (again) {
      Forward(ctx, in, call.options, {o.view, lse.view});
      in.o = o.view;
      in.lse = lse.view;
    }
    Backward(ctx, in, call.options, call.gradients);
  });
}

void RunTorch(const nb::args& args) {
  static const Words words = Joined<Call>({kInputs, kChosen, kTorchResults, kOptions, kThreads});
  RunForTorch<Call>(Caller::kTorch, kOp, words, args,
                    [](Context& ctx, Call& call) { Forward(ctx, call.in, call.options, call.out); });
}

void RunTorchBackward(const nb::args& args) {
  static const Words words =
      Joined<Call>({kTorchIncoming, kInputs, kChosen, kOfForward, kGradients, kOptions, kThreads});
  RunForTorch<Call>(Caller::kTorch, kBackwardOp, words, args,
                    [](Context& ctx, Call& call) { Backward(ctx, call.in, call.options, call.gradients); });
}

nb::dict RunExplain(DType dtype, int num_threads, PyObject* kwargs) {
  static const Words words = Joined<Call>({kInputs, kChosen, kOptions, kResults, kThreads});
  Call call;
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  ReadCall(kOp, words, kPositional, nullptr, kwargs, call);
  const Context& ctx = ThreadContext(num_threads);
  Explanation x;
  Compute(kOp, [&] { x = Explain(ctx, call.in, call.options); });
  return Described(x.kernel, x.target, x.why, x.flops, x.bytes, x.workspace_bytes, x.visited_pairs, x.invariant,
                   call.arrays.copied());
}

// The keys that a pattern lists as an array, for PyTorch's operator, which takes a tensor.
nb::object NewKeys(nb::handle value) {
  const Argument a = {kOp, "chosen", value};
  const Pattern pattern = ToPattern(a);
  const ConstTensorView keys = KeysOf(pattern, a);
  NewArray array(kOp, DType::kI64, keys.sizes());
  std::copy_n(keys.as<int64_t>(), keys.num_elements(), array.view.as<int64_t>());
  return array.array;
}

constexpr Said kSaid[] = {
    {"ratio", "tokens per compressed key"},
    {"window", "last keys, including the row's own; 0: none"},
    {"chosen",
     "int [B, Tq, n] or [B, Tq, Hkv, n]: the compressed keys that a row sees, each once and complete, in any order, -1 "
     "for none; or what heed.select.indexer or heed.patterns.keys returned; None: all that are complete"},
    {"start", "position of row 0; None: Tk - Tq, that is, k begins at position 0"},
    {"return_lse", "also return the log-sum-exp"},
    {"o", "the result of compressed_attention; None: computed again"},
    {"lse", "its log-sum-exp; None: computed again"},
    {"dlse", "gradient of lse, in its shape and dtype; None: zeros"},
};

constexpr char kInPython[] = R"(
An array whose last axis is not contiguous is copied, others are read in place. Returns o, a NumPy array, or (o, lse)
with return_lse=True: lse [B, Hq, Tq] is float32, or float64 for float64.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 64, 2, 8), np.float32)
  >>> k_cmp, v_cmp = (x.reshape(1, 16, 4, 2, 8).mean(2) for x in (k, v))  # a model learns how to compress
  >>> heed.compressed_attention(q, k, v, k_cmp, v_cmp, ratio=4, window=8, sinks=[0.0, 0.0]).shape
  (1, 64, 2, 8)
  >>> latest = (np.arange(64)[:, None] + 1) // 4 - 1 - np.arange(3)  # the last three complete ones of each row
  >>> o = heed.compressed_attention(q, k, v, k_cmp, v_cmp, ratio=4, window=8, chosen=np.maximum(latest, -1)[None])
  >>> o = heed.compressed_attention(q, k, v, k, v, ratio=1, window=0)
  >>> bool(np.allclose(o, heed.attention(q, k, v, causal=True), atol=1e-6))
  True
  >>> o = heed.compressed_attention(q, k, v, k_cmp, v_cmp, ratio=4, window=8, starts=[3])  # padding on the left
  >>> bool(o[:, :3].any()), bool(np.array_equal(o[:, 3:], heed.compressed_attention(q[:, 3:], k[:, 3:], v[:, 3:],
  ...                                                                                k_cmp, v_cmp, ratio=4, window=8)))
  (False, True))";

constexpr char kBackwardInPython[] = R"(
Returns the named tuple heed.CompressedAttentionGradients: dq dk dv dk_cmp dv_cmp dsinks, NumPy arrays in the shape and
dtype of what they are the gradients of; dsinks is None where no sinks were given.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, k, v = rng.standard_normal((4, 1, 64, 2, 8), np.float32)
  >>> k_cmp, v_cmp = (x.reshape(1, 16, 4, 2, 8).mean(2) for x in (k, v))
  >>> g = heed.compressed_attention_backward(do, q, k, v, k_cmp, v_cmp, ratio=4, window=8)
  >>> g.dk_cmp.shape, g.dsinks is None
  ((1, 16, 2, 8), True))";

constexpr char kTakes[] =
    "q: Array, k: Array, v: Array, k_cmp: Array, v_cmp: Array, *, ratio: int, window: int, "
    "chosen: Array | Pattern | None = None, sinks: Floats | None = None, "
    "start: int | None = None, scale: float | None = None, lengths: Ints | None = None, starts: Ints | None = None, "
    "cu_seqlens: Ints | None = None, ";

}  // namespace

void Bind(nb::module_& m) {
  static const std::string forward = JoinedText(
      {"def compressed_attention(", kTakes,
       "return_lse: bool = False, out: OutArray | None = None, threads: int | None = None) -> Result | tuple[Result, "
       "Result]"});
  static const std::string backward =
      JoinedText({"def compressed_attention_backward(do: Array, ", kTakes,
                  "o: Array | None = None, lse: Array | None = None, dlse: Array | None = None, threads: int | None = "
                  "None) -> CompressedAttentionGradients"});
  m.def(kOp, &RunForward, nb::sig(forward.c_str()),
        Docstring(doc::kForward, forward, {kSaid, doc::kCompressedAttentionFields}, kInPython).c_str());
  const nb::object gradients = GradientsType<Call>(m, "CompressedAttentionGradients", kBackwardOp, kGradients);
  m.def(
      kBackwardOp,
      [gradients](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(gradients, args, kwargs); },
      nb::sig(backward.c_str()),
      Docstring(doc::kBackward, backward, {kSaid, doc::kCompressedAttentionFields}, kBackwardInPython).c_str());
  m.def("_torch_compressed_attention", &RunTorch);
  m.def("_torch_compressed_attention_backward", &RunTorchBackward);
  m.def("_keys_of_pattern", &NewKeys);
  RegisterExplain(kOp, &RunExplain);
}

}  // namespace heed::compressed_attention

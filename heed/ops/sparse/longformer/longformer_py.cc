// heed.longformer and heed.longformer_backward, and the functions behind PyTorch's operators.
#include "heed/ops/sparse/longformer/longformer.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "docstrings/longformer.h"
#include "heed/core/error.h"
#include "heed/ops/exact/attention/attention_options_py.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/layout.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::longformer {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "longformer", kBackwardOp[] = "longformer_backward";
constexpr Renamed kRenamed[] = {{"o", "out"}};
constexpr Renamed kBackwardRenamed[] = {{"d_o", "do"}, {"d_lse", "dlse"}};
constexpr Renamed kTorchRenamed[] = {{"d_o", "the gradient of o"}, {"d_lse", "the gradient of lse"}};

struct Call {
  Arrays arrays;
  BackwardInputs in;
  Options options;
  bool window_given = false, seed_given = false, return_lse = false, describe = false;
  nb::handle out;
  TensorView out_view, out_lse;
  Gradients gradients;  // PyTorch's
  int num_threads = 0;
};

template <auto kField>
void ReadTensor(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}
template <ConstTensorView Options::*kField>
void ReadInts(Call& call, const Argument& a) {
  call.options.*kField = call.arrays.ReadList(a, Kind::kInt);
}
template <TensorView Gradients::*kField>
void WriteGradient(Call& call, const Argument& a) {
  call.gradients.*kField = call.arrays.Write(a, Kind::kFloat);
}
void ReadOut(Call& call, const Argument& a) {
  if (call.describe) return;
  call.out = a.value;
  call.out_view = call.arrays.Write(a, Kind::kFloat);
}
void ReadWindow(Call& call, const Argument& a) {
  call.options.window = ToInt(a, 0, INT64_MAX);
  call.window_given = true;
}
void ReadSeed(Call& call, const Argument& a) {
  call.options.seed = ToUnsigned(a);
  call.seed_given = true;
}
void ReadTorchSeed(Call& call, const Argument& a) { call.options.seed = attention::ToSeedBits(call.arrays, a); }
constexpr Keyword<Call> kInputs[] = {
    {"q", false, &ReadTensor<&BackwardInputs::q>},  {"k", false, &ReadTensor<&BackwardInputs::k>},
    {"v", false, &ReadTensor<&BackwardInputs::v>},  {"qg", true, &ReadTensor<&BackwardInputs::qg>},
    {"kg", true, &ReadTensor<&BackwardInputs::kg>}, {"vg", true, &ReadTensor<&BackwardInputs::vg>}};
constexpr Keyword<Call> kOptions[] = {
    {"window", false, &ReadWindow},
    {"tokens", false, &ReadInts<&Options::tokens>},
    {"scale", true, [](Call& c, const Argument& a) { c.options.scale = ToFinite(a); }},
    {"key_lengths", true, &ReadInts<&Options::key_lengths>},
    {"key_starts", true, &ReadInts<&Options::key_starts>},
    {"query_lengths", true, &ReadInts<&Options::query_lengths>},
    {"softcap", true,
     [](Call& c, const Argument& a) {
       c.options.softcap = ToFinite(a);
       if (c.options.softcap <= 0) Fail(a, "a finite number above 0");
     }},
    {"dropout", false, [](Call& c, const Argument& a) { c.options.dropout = ToFinite(a); }},
    {"seed", true, &ReadSeed},
    {"dropout_offset", false,
     [](Call& c, const Argument& a) { c.options.dropout_offset = static_cast<uint32_t>(ToInt(a, 0, UINT32_MAX)); }},
    {"cu_seqlens_q", true, &ReadInts<&Options::cu_seqlens_q>},
    {"precision", false, [](Call& c, const Argument& a) { c.options.precision = attention::ToPrecision(a); }},
    {"invariant", false, [](Call& c, const Argument& a) { c.options.invariant = ToBool(a); }},
    {"threads", true,
     [](Call& c, const Argument& a) { c.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads)); }}};
constexpr Keyword<Call> kResults[] = {
    {"return_lse", false, [](Call& c, const Argument& a) { c.return_lse = ToBool(a); }}, {"out", true, &ReadOut}};
constexpr Keyword<Call> kGradientOfO = {"do", false, &ReadTensor<&BackwardInputs::d_o>};
constexpr Keyword<Call> kOfForward[] = {{"o", true, &ReadTensor<&BackwardInputs::o>},
                                        {"lse", true, &ReadTensor<&BackwardInputs::lse>},
                                        {"dlse", true, &ReadTensor<&BackwardInputs::d_lse>}};
constexpr Keyword<Call> kTorchIncoming[] = {{"the gradient of o", false, &ReadTensor<&BackwardInputs::d_o>},
                                            {"the gradient of lse", true, &ReadTensor<&BackwardInputs::d_lse>}};
constexpr Keyword<Call> kTorchResults[] = {
    {"out", false, &ReadOut},
    {"lse", false, [](Call& c, const Argument& a) { c.out_lse = c.arrays.Write(a, Kind::kFloat); }}};
constexpr Keyword<Call> kTorchGradients[] = {
    {"dq", true, &WriteGradient<&Gradients::dq>},   {"dk", true, &WriteGradient<&Gradients::dk>},
    {"dv", true, &WriteGradient<&Gradients::dv>},   {"dqg", true, &WriteGradient<&Gradients::dqg>},
    {"dkg", true, &WriteGradient<&Gradients::dkg>}, {"dvg", true, &WriteGradient<&Gradients::dvg>}};

using Keywords = std::vector<Keyword<Call>>;
Keywords Joined(std::initializer_list<std::span<const Keyword<Call>>> parts) {
  Keywords keywords;
  for (const auto& part : parts) keywords.insert(keywords.end(), part.begin(), part.end());
  return keywords;
}

// The options of attention that say where keys and rows stand to each other, which the two parts of this do not share: all
// that are not above.
std::vector<std::string> Refused() {
  std::vector<std::string> names = {"need_dbias"};
  for (const attention::OptionArgument& x : attention::OptionKeywords()) {
    if (std::ranges::none_of(kOptions, [&](const auto& own) { return std::string_view(own.name) == x.keyword.name; })) {
      names.emplace_back(x.keyword.name);
    }
  }
  return names;
}

std::string WhyRefused(const std::string& op, const std::string& name) {
  return op + ": " + name + " is an option of attention that longformer does not have; " +
         "attention with pattern=heed.patterns.longformer(window, tokens) has it";
}

void RefuseOthers(const char* op, PyObject* kwargs) {
  static const std::vector<std::string> all_refused = Refused();
  PyObject *key, *value;
  for (Py_ssize_t position = 0; kwargs != nullptr && PyDict_Next(kwargs, &position, &key, &value);) {
    const char* name = PyUnicode_AsUTF8(key);
    if (name == nullptr) throw nb::python_error();
    for (const std::string& refused : all_refused) {
      if (refused == name) throw Unsupported(WhyRefused(op, name));
    }
  }
}

// Reads a call of Python: whatever is required is there.
void ReadCall(const char* op, const Keywords& keywords, size_t num_positional, PyObject* args, PyObject* kwargs,
              Call& call) {
  RefuseOthers(op, kwargs);
  Read<Call>(op, keywords, num_positional, args, kwargs, call);
  if (!call.in.q.present()) FailMissing(op, "q");
  if (!call.in.k.present()) FailMissing(op, "k");
  if (!call.in.v.present()) FailMissing(op, "v");
  if (!call.window_given) FailMissing(op, "window");
  if (!call.options.tokens.present()) FailMissing(op, "tokens");
  const bool packed = call.options.cu_seqlens_q.present();
  for (const auto& [name, x, shape] :
       {std::tuple{"q", call.in.q, "Hq, D]"}, {"k", call.in.k, "Hkv, D]"}, {"v", call.in.v, "Hkv, Dv]"}}) {
    if (x.rank() == 4 || (packed && x.rank() == 3)) continue;
    Fail(op, name, "has shape " + x.ShapeString(),
         std::string(packed ? "[T_total, " : "[B, T, ") + shape + (packed ? " (or with a leading 1)" : ""));
  }
  if (!IsFloat(call.in.q.dtype())) {
    Fail(op, "q", std::string("has dtype ") + Name(call.in.q.dtype()), "f64, f32, bf16 or f16");
  }
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  static const Keywords keywords = Joined({kInputs, kOptions, kResults});
  Call call;
  ReadCall(kOp, keywords, std::size(kInputs), args.ptr(), kwargs.ptr(), call);
  WarnOfHeadsBeforeTokens(kOp, call.in.q, call.in.k, call.in.v);
  if (call.options.dropout > 0 && !call.seed_given) call.options.seed = attention::FreshSeed();
  nb::object o, lse;
  Outputs out = {call.out_view, {}};
  if (call.out.is_valid()) {
    o = nb::borrow(call.out);
  } else {
    NewArray array = attention::NewO(kOp, call.in.q, call.in.v);
    o = std::move(array.array);
    out.o = array.view;
  }
  if (call.return_lse) {
    NewArray array = attention::NewLse(kOp, call.in.q, call.options.cu_seqlens_q.present());
    lse = std::move(array.array);
    out.lse = array.view;
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kOp, kRenamed, [&] { Forward(ctx, call.in, call.options, out); });
  if (!call.return_lse) return o;
  return nb::make_tuple(o, lse);
}

nb::object RunBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  static const Keywords keywords = Joined({std::span(&kGradientOfO, 1), kInputs, kOptions, kOfForward});
  Call call;
  ReadCall(kBackwardOp, keywords, std::size(kInputs) + 1, args.ptr(), kwargs.ptr(), call);
  if (!call.in.d_o.present()) FailMissing(kBackwardOp, "do");
  if (call.options.dropout > 0 && !call.seed_given) {
    Fail(kBackwardOp, "seed", "is None", "that of the forward pass, whose pairs are dropped again");
  }
  const bool again = !call.in.o.present() && !call.in.lse.present();
  if (!again && !(call.in.o.present() && call.in.lse.present())) {
    Fail(kBackwardOp, call.in.o.present() ? "lse" : "o", "is None", "o and lse, or none of them");
  }
  Context& ctx = ThreadContext(call.num_threads);
  nb::object o, lse;
  if (again) {
    NewArray new_o = attention::NewO(kBackwardOp, call.in.q, call.in.v);
    NewArray new_lse = attention::NewLse(kBackwardOp, call.in.q, call.options.cu_seqlens_q.present());
    Compute(kBackwardOp, kBackwardRenamed, [&] { Forward(ctx, call.in, call.options, {new_o.view, new_lse.view}); });
    call.in.o = new_o.view;
    call.in.lse = new_lse.view;
    o = std::move(new_o.array);
    lse = std::move(new_lse.array);
  }
  const auto like = [&](const ConstTensorView& x, TensorView& view) {
    if (!x.present()) return nb::object(nb::none());
    NewArray array(kBackwardOp, x.dtype(), x.sizes());
    view = array.view;
    return std::move(array.array);
  };
  Gradients g;
  const nb::object dq = like(call.in.q, g.dq), dk = like(call.in.k, g.dk), dv = like(call.in.v, g.dv);
  const nb::object dqg = like(call.in.qg, g.dqg), dkg = like(call.in.kg, g.dkg), dvg = like(call.in.vg, g.dvg);
  Compute(kBackwardOp, kBackwardRenamed, [&] { Backward(ctx, call.in, call.options, g); });
  return NewNamedTuple(type, nb::make_tuple(dq, dk, dv, dqg, dkg, dvg));
}

// The options in the order of the schema, whose seed is a tensor.
Keywords TorchOptions() {
  Keywords keywords(std::begin(kOptions), std::end(kOptions));
  for (Keyword<Call>& keyword : keywords) {
    if (std::string_view(keyword.name) == "seed") keyword.read = &ReadTorchSeed;
  }
  return keywords;
}

void RunTorch(const nb::args& args) {
  static const Keywords options = TorchOptions(), keywords = Joined({kInputs, kTorchResults, options});
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kOp, keywords, keywords.size(), args.ptr(), nullptr, call);
  WarnOfHeadsBeforeTokens(kOp, call.in.q, call.in.k, call.in.v);
  Context& ctx = TorchContext(call.num_threads);
  Compute(kOp, kTorchRenamed, [&] { Forward(ctx, call.in, call.options, {call.out_view, call.out_lse}); });
}

void RunTorchBackward(const nb::args& args) {
  static const Keywords options = TorchOptions();
  static const Keywords keywords =
      Joined({kTorchIncoming, kInputs, std::span(kOfForward).first(2), kTorchGradients, options});
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kOp, keywords, keywords.size(), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(call.num_threads);
  Compute(kOp, kTorchRenamed, [&] { Backward(ctx, call.in, call.options, call.gradients); });
}

nb::dict RunExplain(DType dtype, int num_threads, PyObject* kwargs) {
  static const Keywords keywords = Joined({kInputs, kOptions, kResults});
  Call call;
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  ReadCall(kOp, keywords, std::size(kInputs), nullptr, kwargs, call);
  const Context& ctx = ThreadContext(num_threads);
  Explanation x;
  Compute(kOp, kRenamed, [&] { x = Explain(ctx, call.in, call.options); });
  return Described(x.kernel, x.target, x.why, x.flops, x.bytes, x.workspace_bytes, x.visited_pairs, x.invariant,
                   call.arrays.copied());
}

constexpr Said kSaid[] = {
    {"softcap", "bound of the logits, > 0"},
    {"seed", "of the pairs that are dropped, from 0 to 2^64 - 1; None draws one from NumPy's global generator, which "
             "longformer_backward cannot know"},
    {"precision", "'highest', or 'high': of f32 where matrix tiles are three products of bf16 pieces instead of "
                  "six, with a relative error of 1e-5"},
    {"o", "what heed.longformer returned; None, with lse: computed again"},
    {"lse", "what heed.longformer returned with it"},
    {"dlse", "the gradient of lse, in its shape and dtype; absent: zero"},
};

constexpr char kInPython[] = R"(
Vectors of ints may be lists. An array whose last axis is not contiguous is copied, others are read in place. Of the
options of heed.attention those are missing that say where rows and keys stand to each other. Returns o, or (o, lse)
with return_lse=True, as NumPy arrays.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v, qg, kg, vg = rng.standard_normal((6, 1, 64, 2, 8), np.float32)
  >>> o = heed.longformer(q, k, v, qg, kg, vg, window=16, tokens=[0])
  >>> bool(np.allclose(o[:, 0], heed.attention(qg[:, :1], kg, vg)[:, 0], atol=1e-6))
  True)";

constexpr char kBackwardInPython[] = R"(
Returns the named tuple heed.LongformerGradients: dq dk dv dqg dkg dvg, NumPy arrays in the shape and dtype of what
they are the gradients of; None where that was not given.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> do, q, k, v, qg, kg, vg = rng.standard_normal((7, 1, 64, 2, 8), np.float32)
  >>> g = heed.longformer_backward(do, q, k, v, qg, kg, vg, window=16, tokens=[0])
  >>> g.dkg.shape, bool(g.dq[0, 0].any()), bool(g.dqg[0, 1:].any())
  ((1, 64, 2, 8), False, False))";

constexpr char kInputsSignature[] =
    "q: Array, k: Array, v: Array, qg: Array | None = None, kg: Array | None = None, vg: Array | None = None, *, "
    "window: int, tokens: Ints, ";
constexpr char kOptionsSignature[] =
    "scale: float | None = None, key_lengths: Ints | None = None, key_starts: Ints | None = None, "
    "query_lengths: Ints | None = None, softcap: float | None = None, dropout: float = 0.0, seed: int | None = None, "
    "dropout_offset: int = 0, cu_seqlens_q: Ints | None = None, "
    "precision: typing.Literal['highest', 'high'] = 'highest', invariant: bool = False, ";
constexpr char kTorchSchema[] =
    "int window, Tensor tokens, float? scale=None, Tensor? key_lengths=None, Tensor? key_starts=None, "
    "Tensor? query_lengths=None, float? softcap=None, float dropout=0.0, Tensor? seed=None, int dropout_offset=0, "
    "Tensor? cu_seqlens_q=None, str precision='highest', bool invariant=False, int? threads=None";

}  // namespace

void Bind(nb::module_& m) {
  const std::string inputs = kInputsSignature, options = kOptionsSignature;
  const auto forward_of = [&](const std::string& return_lse, const std::string& result) {
    return "def longformer(" + inputs + options + "return_lse: " + return_lse + ", " +
           "out: OutArray | None = None, threads: int | None = None) -> " + result;
  };
  // Signatures live as long as the module.
  static const std::string forward = forward_of("typing.Literal[False] = False", "Result");
  static const std::string with_lse = forward_of("typing.Literal[True]", "tuple[Result, Result]");
  static const std::string backward =
      "def longformer_backward(do: Array, " + inputs + "o: Array | None = None, lse: Array | None = None, " +
      "dlse: Array | None = None, " + options + "threads: int | None = None) -> LongformerGradients";
  const std::string text = Docstring(doc::kForward, forward, {kSaid, doc::kLongformerFields}, kInPython);
  m.def(kOp, &RunForward, nb::sig(forward.c_str()), text.c_str());
  m.def(kOp, &RunForward, nb::sig(with_lse.c_str()), text.c_str());
  const nb::object gradients =
      NamedTupleType(m, "LongformerGradients", "dq dk dv dqg dkg dvg", GradientsDoc(kBackwardOp));
  m.def(kBackwardOp,
        [gradients](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(gradients, args, kwargs); },
        nb::sig(backward.c_str()),
        Docstring(doc::kBackward, backward, {kSaid, doc::kLongformerFields}, kBackwardInPython).c_str());
  m.attr("_torch_longformer_options") = kTorchSchema;
  nb::dict refused;
  for (const std::string& name : Refused()) refused[name.c_str()] = WhyRefused(kOp, name);
  m.attr("_torch_longformer_refused") = refused;
  m.def("_torch_longformer", &RunTorch);
  m.def("_torch_longformer_backward", &RunTorchBackward);
  RegisterExplain(kOp, &RunExplain);
}

}  // namespace heed::longformer

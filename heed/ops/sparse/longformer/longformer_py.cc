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
#include "heed/ops/sparse/longformer/longformer_internal.h"
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

using attention::Joined;
using attention::Keywords;

// Reads the options that attention has too, and the results, as attention's binding does.
struct Call : attention::Call {
  BackwardInputs tensors;
  Options own;
  Gradients of_tensors;  // for PyTorch
  bool window_given = false;

  Options all_options() const {
    Options all = own;
    ForEachShared([&](auto field, auto there) { all.*field = options.*there; });
    return all;
  }
};

Call& Own(attention::Call& call) { return static_cast<Call&>(call); }

template <auto kField>
void ReadTensor(attention::Call& call, const Argument& a) {
  Own(call).tensors.*kField = call.arrays.Read(a, Kind::kFloat);
}
template <TensorView Gradients::* kField>
void WriteGradient(attention::Call& call, const Argument& a) {
  Own(call).of_tensors.*kField = call.arrays.Write(a, Kind::kFloat);
}
void ReadWindow(attention::Call& call, const Argument& a) {
  Own(call).own.window = ToInt(a, 0, INT64_MAX);
  Own(call).window_given = true;
}
void ReadTokens(attention::Call& call, const Argument& a) {
  Own(call).own.tokens = call.arrays.ReadList(a, Kind::kInt);
}
void ReadSoftcap(attention::Call& call, const Argument& a) {
  call.options.softcap = ToFinite(a);
  if (call.options.softcap <= 0) Fail(a, "a finite number above 0");
}
constexpr Keyword<attention::Call> kInputs[] = {
    {"q", false, &ReadTensor<&BackwardInputs::q>},  {"k", false, &ReadTensor<&BackwardInputs::k>},
    {"v", false, &ReadTensor<&BackwardInputs::v>},  {"qg", true, &ReadTensor<&BackwardInputs::qg>},
    {"kg", true, &ReadTensor<&BackwardInputs::kg>}, {"vg", true, &ReadTensor<&BackwardInputs::vg>}};
constexpr Keyword<attention::Call> kPattern[] = {{"window", false, &ReadWindow}, {"tokens", false, &ReadTokens}};
constexpr Keyword<attention::Call> kGradientOfO = {"do", false, &ReadTensor<&BackwardInputs::d_o>};
constexpr Keyword<attention::Call> kOfForward[] = {{"o", true, &ReadTensor<&BackwardInputs::o>},
                                                   {"lse", true, &ReadTensor<&BackwardInputs::lse>},
                                                   {"dlse", true, &ReadTensor<&BackwardInputs::d_lse>}};
constexpr Keyword<attention::Call> kTorchIncoming[] = {
    {"the gradient of o", false, &ReadTensor<&BackwardInputs::d_o>},
    {"the gradient of lse", true, &ReadTensor<&BackwardInputs::d_lse>}};
constexpr Keyword<attention::Call> kTorchGradients[] = {
    {"dq", true, &WriteGradient<&Gradients::dq>},   {"dk", true, &WriteGradient<&Gradients::dk>},
    {"dv", true, &WriteGradient<&Gradients::dv>},   {"dqg", true, &WriteGradient<&Gradients::dqg>},
    {"dkg", true, &WriteGradient<&Gradients::dkg>}, {"dvg", true, &WriteGradient<&Gradients::dvg>}};

bool IsShared(const attention::OptionRow& row) {
  bool is_shared = false;
  ForEachShared([&](auto, auto there) { is_shared = is_shared || row.field == attention::OptionField(there); });
  return is_shared;
}

// The options that are shared with attention, in the order of its rows, as keywords of Python or arguments of an
// operator.
std::vector<attention::OptionArgument> Shared(const std::vector<attention::OptionArgument>& all) {
  std::vector<attention::OptionArgument> shared;
  std::ranges::copy_if(all, std::back_inserter(shared), &IsShared, [](const auto& x) -> const auto& { return *x.row; });
  std::ranges::sort(shared, {}, &attention::OptionArgument::row);
  return shared;
}

// The keywords window, tokens and the shared options, then threads.
Keywords Of(const std::vector<attention::OptionArgument>& all) {
  Keywords keywords = Joined({kPattern});
  for (const attention::OptionArgument& x : Shared(all)) {
    keywords.push_back(x.keyword);
    if (x.row->field == attention::OptionField(&attention::Options::softcap)) keywords.back().read = &ReadSoftcap;
  }
  return Joined({keywords, attention::ThreadsKeyword()});
}

// Arguments of calls on several processes, which attention does not take beside a pattern either.
constexpr const char* kOfProcesses[] = {"comm", "method", "order"};

// Other options relate positions of keys and rows, which differ between the two problems.
std::vector<std::string> Refused() {
  std::vector<std::string> names(std::begin(kOfProcesses), std::end(kOfProcesses));
  names.emplace_back("need_dbias");
  for (const attention::OptionArgument& x : attention::OptionKeywords()) {
    const bool has_own = x.row->field == attention::OptionField(&attention::Options::window);
    if (!IsShared(*x.row) && !has_own) names.emplace_back(x.keyword.name);
  }
  return names;
}

std::string WhyRefused(const std::string& op, const std::string& name) {
  std::string text = op + ": " + name + " is an option of attention that longformer does not have";
  if (std::ranges::find(kOfProcesses, name) == std::end(kOfProcesses)) {
    text += "; attention with pattern=heed.patterns.longformer(window, tokens) has it";
  }
  return text;
}

void RefuseOthers(const char* op, PyObject* kwargs) {
  static const std::vector<std::string> all_refused = Refused();
  PyObject *key, *value;
  for (Py_ssize_t position = 0; kwargs != nullptr && PyDict_Next(kwargs, &position, &key, &value);) {
    const char* name = PyUnicode_AsUTF8AndSize(key, nullptr);
    if (name == nullptr) throw nb::python_error();
    for (const std::string& refused : all_refused) {
      if (refused == name) throw Unsupported(WhyRefused(op, name));
    }
  }
}

// Reads a call of Python; required arguments are present afterwards.
void ReadCall(const char* op, const Keywords& keywords, size_t num_positional, PyObject* args, PyObject* kwargs,
              Call& call) {
  RefuseOthers(op, kwargs);
  Read<attention::Call>(op, keywords, num_positional, args, kwargs, call);
  const BackwardInputs& in = call.tensors;
  if (!in.q.present()) FailMissing(op, "q");
  if (!in.k.present()) FailMissing(op, "k");
  if (!in.v.present()) FailMissing(op, "v");
  if (!call.window_given) FailMissing(op, "window");
  if (!call.own.tokens.present()) FailMissing(op, "tokens");
  const bool packed = call.options.cu_seqlens_q.present();
  for (const auto& [name, x, shape] :
       {std::tuple{"q", in.q, "Hq, D]"}, {"k", in.k, "Hkv, D]"}, {"v", in.v, "Hkv, Dv]"}}) {
    if (x.rank() == 4 || (packed && x.rank() == 3)) continue;
    Fail(op, name, "has shape " + x.ShapeString(),
         std::string(packed ? "[T_total, " : "[B, T, ") + shape + (packed ? " (or with a leading 1)" : ""));
  }
  if (!IsFloat(in.q.dtype())) {
    Fail(op, "q", std::string("has dtype ") + Name(in.q.dtype()), "f64, f32, bf16 or f16");
  }
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  static const Keywords keywords = Joined({kInputs, Of(attention::OptionKeywords()), attention::ResultKeywords()});
  Call call;
  ReadCall(kOp, keywords, std::size(kInputs), args.ptr(), kwargs.ptr(), call);
  const BackwardInputs& in = call.tensors;
  WarnOfHeadsBeforeTokens(kOp, in.q, in.k, in.v);
  if (call.options.dropout > 0 && !call.seed_given) call.options.seed = attention::FreshSeed();
  const attention::Results results = attention::NewResults(kOp, call, in.q, in.v.size(in.v.rank() - 1));
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kOp, [&] { Forward(ctx, in, call.all_options(), {results.views.o, results.views.lse}); });
  return results.Returned();
}

nb::object RunBackward(const nb::object& type, const nb::args& args, const nb::kwargs& kwargs) {
  static const Keywords keywords =
      Joined({std::span(&kGradientOfO, 1), kInputs, Of(attention::OptionKeywords()), kOfForward});
  Call call;
  ReadCall(kBackwardOp, keywords, std::size(kInputs) + 1, args.ptr(), kwargs.ptr(), call);
  BackwardInputs& in = call.tensors;
  if (!in.d_o.present()) FailMissing(kBackwardOp, "do");
  if (call.options.dropout > 0 && !call.seed_given) {
    Fail(kBackwardOp, "seed", "is None", "that of the forward pass, whose pairs are dropped again");
  }
  const bool again = !in.o.present() && !in.lse.present();
  if (!again && !(in.o.present() && in.lse.present())) {
    Fail(kBackwardOp, in.o.present() ? "lse" : "o", "is None", "o and lse, or none of them");
  }
  const Options options = call.all_options();
  Context& ctx = ThreadContext(call.num_threads);
  attention::Results results;
  if (again) {
    call.return_lse = true;
    results = attention::NewResults(kBackwardOp, call, in.q, in.v.size(in.v.rank() - 1));
    Compute(kBackwardOp, [&] { Forward(ctx, in, options, {results.views.o, results.views.lse}); });
    in.o = results.views.o;
    in.lse = results.views.lse;
  }
  const auto like = [&](const ConstTensorView& x, TensorView& view) {
    if (!x.present()) return nb::object(nb::none());
    NewArray array(kBackwardOp, x.dtype(), x.sizes());
    view = array.view;
    return std::move(array.array);
  };
  Gradients g;
  const nb::object dq = like(in.q, g.dq), dk = like(in.k, g.dk), dv = like(in.v, g.dv);
  const nb::object dqg = like(in.qg, g.dqg), dkg = like(in.kg, g.dkg), dvg = like(in.vg, g.dvg);
  Compute(kBackwardOp, [&] { Backward(ctx, in, options, g); });
  return NewNamedTuple(type, nb::make_tuple(dq, dk, dv, dqg, dkg, dvg));
}

void RunTorch(const nb::args& args) {
  static const Keywords keywords = Joined({kInputs, attention::TorchResults(), Of(attention::TorchOptions())});
  Call call;
  call.arrays.AllowTorch();
  Read<attention::Call>(kOp, keywords, keywords.size(), args.ptr(), nullptr, call);
  WarnOfHeadsBeforeTokens(kOp, call.tensors.q, call.tensors.k, call.tensors.v);
  Context& ctx = TorchContext(call.num_threads);
  ComputeForTorch(kOp, [&] { Forward(ctx, call.tensors, call.all_options(), {call.out_view, call.out_lse}); });
}

void RunTorchBackward(const nb::args& args) {
  static const Keywords keywords =
      Joined({kTorchIncoming, kInputs, std::span(kOfForward).first(2), kTorchGradients, Of(attention::TorchOptions())});
  Call call;
  call.arrays.AllowTorch();
  Read<attention::Call>(kOp, keywords, keywords.size(), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(call.num_threads);
  ComputeForTorch(kOp, [&] { Backward(ctx, call.tensors, call.all_options(), call.of_tensors); });
}

nb::dict RunExplain(DType dtype, int num_threads, PyObject* kwargs) {
  static const Keywords keywords = Joined({kInputs, Of(attention::OptionKeywords()), attention::ResultKeywords()});
  Call call;
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  ReadCall(kOp, keywords, std::size(kInputs), nullptr, kwargs, call);
  const Context& ctx = ThreadContext(num_threads);
  Explanation x;
  Compute(kOp, [&] { x = Explain(ctx, call.tensors, call.all_options()); });
  return Described(x.kernel, x.target, x.why, x.flops, x.bytes, x.workspace_bytes, x.visited_pairs, x.invariant,
                   call.arrays.copied());
}

constexpr Said kSaid[] = {
    {"softcap", "soft cap of the logits, > 0"},
    {"seed",
     "seed of the dropout mask, from 0 to 2^64 - 1; None draws one from NumPy's global generator, which "
     "longformer_backward cannot know"},
    {"precision",
     "'highest', or 'high': for f32 on AMX three products of a bf16 split (3xBF16) instead of six, with a relative "
     "error "
     "of 1e-5"},
    {"o", "o of heed.longformer; None, together with lse: recomputed"},
    {"lse", "lse of heed.longformer, from the same call as o"},
    {"dlse", "the gradient of lse, in its shape and dtype; absent: zero"},
};

constexpr char kInPython[] = R"(
Vectors of ints may be lists. An array whose last axis is not contiguous is copied, others are read in place. The
options of heed.attention that relate positions of rows and keys are not taken. Returns o, or (o, lse) with
return_lse=True, as NumPy arrays.

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
}  // namespace

void Bind(nb::module_& m) {
  const std::string inputs = kInputsSignature;
  const auto forward_of = [&](const std::string& return_lse, const std::string& result) {
    return attention::Spelled("def longformer(" + inputs + "**options) -> " + result, &IsShared,
                              "return_lse: " + return_lse + ", " + attention::kOutAndThreads);
  };
  const char* const forward = forward_of("typing.Literal[False] = False", "Result");
  const char* const with_lse = forward_of("typing.Literal[True]", "tuple[Result, Result]");
  const char* const backward = attention::Spelled("def longformer_backward(do: Array, " + inputs +
                                                      "o: Array | None = None, lse: Array | None = None, " +
                                                      "dlse: Array | None = None, **options) -> LongformerGradients",
                                                  &IsShared, attention::kThreads);
  const std::string text = Docstring(doc::kForward, forward, {kSaid, doc::kLongformerFields}, kInPython);
  m.def(kOp, &RunForward, nb::sig(forward), text.c_str());
  m.def(kOp, &RunForward, nb::sig(with_lse), text.c_str());
  const nb::object gradients =
      NamedTupleType(m, "LongformerGradients", "dq dk dv dqg dkg dvg", GradientsDoc(kBackwardOp));
  m.def(
      kBackwardOp,
      [gradients](const nb::args& args, const nb::kwargs& kwargs) { return RunBackward(gradients, args, kwargs); },
      nb::sig(backward),
      Docstring(doc::kBackward, backward, {kSaid, doc::kLongformerFields}, kBackwardInPython).c_str());
  m.attr("_longformer_options") = attention::ForTorch(Shared(attention::TorchOptions()));
  nb::dict refused;
  for (const std::string& name : Refused()) refused[name.c_str()] = WhyRefused(kOp, name);
  m.attr("_torch_longformer_refused") = refused;
  m.def("_torch_longformer", &RunTorch);
  m.def("_torch_longformer_backward", &RunTorchBackward);
  RegisterExplain(kOp, &RunExplain);
}

}  // namespace heed::longformer

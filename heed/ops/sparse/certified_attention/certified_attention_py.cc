// heed.certified_attention, and attend(epsilon=...) of caches.
#include "heed/ops/sparse/certified_attention/certified_attention_py.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "docstrings/certified_attention.h"
#include "heed/engines/softmax/certified/sketch.h"
#include "heed/ops/exact/attention/attend/attend_py.h"
#include "heed/ops/exact/attention/attention_options_py.h"
#include "heed/ops/exact/attention/attention_signature_py.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"
#include "heed/patterns/pattern.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/layout.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::certified_attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

using attention::Joined;
using attention::Keywords;
using attention::OptionArgument;

constexpr char kOp[] = "certified_attention";
constexpr const char *kEpsilon = "epsilon", *kLevel = "level", *kReturnBound = "return_bound", *kTree = "tree";

// Reads the options that attention has too, and the results, as attention's binding does.
struct Call : attention::Call {
  double epsilon = Options().epsilon;
  Level level = Options().level;
  bool return_bound = true;
  TensorView out_bound;  // for PyTorch

  Options all_options() const { return {options, epsilon, level}; }
};

Call& Own(attention::Call& call) { return static_cast<Call&>(call); }

template <ConstTensorView attention::Inputs::* kField>
void ReadInput(attention::Call& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}
void ReadEpsilon(attention::Call& call, const Argument& a) { Own(call).epsilon = ToFinite(a); }
void ReadLevel(attention::Call& call, const Argument& a) {
  constexpr char kExpected[] = "'auto', 'sketch', 'box' or 'skip'";
  constexpr std::pair<std::string_view, Level> kLevels[] = {
      {"auto", Level::kAuto}, {"sketch", Level::kSketch}, {"box", Level::kBox}, {"skip", Level::kSkip}};
  const std::string name = ToString(a, kExpected);
  for (const auto& [of, level] : kLevels) {
    if (of == name) {
      Own(call).level = level;
      return;
    }
  }
  Fail(a, kExpected);
}

using K = attention::Inputs;
constexpr Keyword<attention::Call> kInputs[] = {
    {"q", false, &ReadInput<&K::q>}, {"k", false, &ReadInput<&K::k>}, {"v", false, &ReadInput<&K::v>}};
constexpr Keyword<attention::Call> kCertificate[] = {{kEpsilon, false, &ReadEpsilon}, {kLevel, false, &ReadLevel}};
constexpr Keyword<attention::Call> kBoundOfCache[] = {
    {kReturnBound, false, [](attention::Call& c, const Argument& a) { Own(c).return_bound = ToBool(a); }}};
constexpr Keyword<attention::Call> kTorchBound[] = {
    {"lse", true, [](attention::Call& c, const Argument& a) { c.out_lse = c.arrays.Write(a, Kind::kFloat); }},
    {"bound", true, [](attention::Call& c, const Argument& a) { Own(c).out_bound = c.arrays.Write(a, Kind::kFloat); }}};

bool IsTaken(const attention::OptionRow& row) {
  const auto is = [&](auto field) { return row.field == attention::OptionField(field); };
  using O = attention::Options;
  return !is(&O::dropout) && !is(&O::seed) && !is(&O::dropout_offset);
}

// All options of attention: C++ refuses those that are not supported, with the reason.
Keywords OptionsOfAttention() {
  Keywords keywords;
  for (const OptionArgument& x : attention::OptionKeywords()) keywords.push_back(x.keyword);
  return keywords;
}

nb::object NewBound(const char* op, const Call& call, TensorView* view) {
  const ConstTensorView& q = call.in.q;
  const int r = q.rank();
  std::vector<int64_t> sizes = {q.size(r - 2), q.size(r - 3)};
  if (!call.options.cu_seqlens_q.present()) sizes.insert(sizes.begin(), q.size(0));
  NewArray array(op, DType::kF32, sizes);
  *view = array.view;
  return std::move(array.array);
}

void CheckQueries(const char* op, const ConstTensorView& q, const std::string& shape) {
  if (!q.present()) FailMissing(op, "q");
  if (q.rank() != 4) Fail(op, "q", "has shape " + q.ShapeString(), shape);
}

// Returns (o, bound), or (o, bound, lse).
nb::object Returned(const Call& call, const attention::Results& results, const nb::object& bound) {
  if (!call.return_lse) return nb::make_tuple(results.o, bound);
  return nb::make_tuple(results.o, bound, results.lse);
}

nb::object RunForward(const nb::args& args, const nb::kwargs& kwargs) {
  static const Keywords keywords =
      Joined({kInputs, kCertificate, OptionsOfAttention(), attention::ResultKeywords(), attention::ThreadsKeyword()});
  Call call;
  Read<attention::Call>(kOp, keywords, std::size(kInputs), args.ptr(), kwargs.ptr(), call);
  attention::CheckForResults(kOp, call);
  if (call.in.q.dtype() == DType::kF64) Fail(kOp, "q", "has dtype f64", "f32, bf16 or f16");
  WarnOfHeadsBeforeTokens(kOp, call.in.q, call.in.k, call.in.v);
  const attention::Results results = attention::NewResults(kOp, call, call.in.q, call.in.v.size(call.in.v.rank() - 1));
  Outputs out = {results.views.o, {}, results.views.lse, {}};
  const nb::object bound = NewBound(kOp, call, &out.bound);
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kOp, [&] { Forward(ctx, {call.in.q, call.in.k, call.in.v}, call.all_options(), out); });
  return Returned(call, results, bound);
}

nb::dict RunExplain(DType dtype, int num_threads, PyObject* kwargs) {
  static const Keywords keywords = Joined({kInputs, kCertificate, OptionsOfAttention(), attention::ResultKeywords()});
  Call call;
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  Read<attention::Call>(kOp, keywords, std::size(kInputs), nullptr, kwargs, call);
  attention::CheckForResults(kOp, call);
  const Context& ctx = ThreadContext(num_threads);
  Explanation x;
  Compute(kOp, [&] { x = Explain(ctx, {call.in.q, call.in.k, call.in.v}, call.all_options()); });
  return Described(x.kernel, x.target, x.why, x.flops, x.bytes, x.workspace_bytes, x.visited_pairs, x.invariant,
                   call.arrays.copied());
}

// Returns the keywords for plain attention if there is no epsilon.
std::optional<nb::kwargs> WithoutEpsilon(const char* op, const nb::kwargs& kwargs) {
  const auto given = [&](const char* name) { return kwargs.contains(name) && !nb::object(kwargs[name]).is_none(); };
  if (given(kEpsilon)) return std::nullopt;
  const auto refuse = [&](const char* name) {
    Fail({op, name, kwargs[name]}, "its default without epsilon, on which it depends");
  };
  if (kwargs.contains(kLevel) && !nb::object(kwargs[kLevel]).equal(nb::str("auto"))) refuse(kLevel);
  if (kwargs.contains(kReturnBound) && !nb::object(kwargs[kReturnBound]).is(nb::bool_(false))) refuse(kReturnBound);
  if (!kwargs.contains(kEpsilon) && !kwargs.contains(kLevel) && !kwargs.contains(kReturnBound)) return kwargs;
  nb::dict rest;
  for (const auto& [key, value] : kwargs) {
    const auto is = [&](const char* name) { return key.equal(nb::str(name)); };
    if (!is(kEpsilon) && !is(kLevel) && !is(kReturnBound)) rest[key] = value;
  }
  return nb::borrow<nb::kwargs>(rest);
}

void ReadAttend(const char* op, const CacheOwner& cache, bool for_torch, const nb::args& args, const nb::kwargs& kwargs,
                Call& call) {
  if (kwargs.contains(kTree) && !nb::object(kwargs[kTree]).is_none()) {
    Fail(op, kTree, "is given",
         "none with epsilon: keys of a draft do not follow each other, and bounds are of 64 that do");
  }
  call.options.causal = true;
  call.return_bound = false;
  if (for_torch) call.arrays.AllowTorch();
  const Keywords keywords = Joined({std::span(kInputs).first(1), kCertificate, kBoundOfCache, OptionsOfAttention(),
                                    attention::ResultKeywords(), attention::ThreadsKeyword(),
                                    std::span(kTorchBound).first(for_torch ? 2 : 0)});
  Read<attention::Call>(op, keywords, 1, args.ptr(), kwargs.ptr(), call);
  CheckQueries(op, call.in.q, "[" + std::to_string(cache.batch) + ",T,H," + std::to_string(cache.dim) + "]");
}

void Run(const char* op, Context& ctx, const CacheOwner& cache, const Call& call, const Outputs& out) {
  Compute(op, [&] {
    const std::shared_lock lock(cache.mutex);
    Attend(ctx, cache.base().view(), call.in.q, call.all_options(), out);
  });
}

constexpr Said kSaid[] = {
    {"level",
     "'sketch'; 'auto', which is 'sketch' where that is faster and else dense; 'box', bounds from the range of each "
     "channel; or 'skip', which computes all logits and skips only values, per row and head"},
};
constexpr Said kAttendSaid[] = {
    {"epsilon",
     "None, or the largest dropped probability of a row, in [0, 1): drops blocks of keys whose sketch proves that "
     "their probability is no larger. Needs a cache with sketch='int8', unless level is 'skip', and takes no tree"},
    {"level",
     "with epsilon: 'sketch'; 'auto', which is dense for a while for heads that kept more than 70 % of their "
     "blocks; 'box', bounds from the range of each channel; or 'skip', which computes all logits and skips only "
     "values"},
    {"return_bound", "with epsilon: whether to return the bound of each row's dropped probability too, [batch, Hq, T]"},
};

constexpr char kInPython[] = R"(
Returns (o, bound), or (o, bound, lse) with return_lse=True, as NumPy arrays; bound is float32. Vectors of ints may be
lists.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> k, v = rng.standard_normal((2, 1, 1000, 1, 16), np.float32)
  >>> q = 4 * k[:, 400:401]
  >>> o, bound = heed.certified_attention(q, k, v, epsilon=0.05, level='sketch')
  >>> error = np.abs(o - heed.attention(q, k, v)).max()
  >>> bool(error <= 2 * bound.max() * np.abs(v).max()), bool(0 < bound.max() <= 0.05)
  (True, True))";

constexpr char kSignature[] =
    "def certified_attention(q: Array, k: Array, v: Array, *, epsilon: float = 0.02, "
    "level: typing.Literal['auto', 'sketch', 'box', 'skip'] = 'auto', **options) -> ";

// The signature of attend, in which **options represents the options of attention.
std::string Unspelled(bool bound, bool lse) {
  constexpr char kNo[] = "typing.Literal[False] = False", kYes[] = "typing.Literal[True]";
  std::string result = "Result";
  if (bound || lse) result = std::string("tuple[Result, Result") + (bound && lse ? ", Result]" : "]");
  return std::string("def attend(self, q: Array, *, causal: bool = True, tree: Ints | None = None, return_lse: ") +
         (lse ? kYes : kNo) +
         ", epsilon: float | None = None, level: typing.Literal['auto', 'sketch', 'box', 'skip'] = 'auto', "
         "return_bound: " +
         (bound ? kYes : kNo) + ", **options) -> " + result;
}

// Returns the blocks that run(outputs) selects for each row. The call computes attention too, and its result is
// discarded. At level skip each query head selects blocks, otherwise each key head.
template <class Run>
Pattern Chosen(const Call& call, int64_t key_heads, int64_t keys, int64_t value_dim, const Run& run) {
  const ConstTensorView& q = call.in.q;
  const int64_t B = q.size(0), T = q.size(1), N = (keys + softmax::kSketchKeys - 1) / softmax::kSketchKeys;
  const int64_t H = call.level == Level::kSkip ? q.size(2) : key_heads, num_lists = B * T * H;
  const auto marks = std::make_unique<bool[]>(static_cast<size_t>(num_lists * N));
  std::vector<std::byte> o(static_cast<size_t>(B * T * q.size(2) * value_dim) * SizeOf(q.dtype()));
  run(Outputs{{o.data(), q.dtype(), {B, T, q.size(2), value_dim}},
              {},
              {},
              {marks.get(), DType::kBool, {B, H, T, N}, {T * H * N, N, H * N, 1}}});
  int64_t most = 0;
  const auto list = [&](int64_t at) { return std::span(marks.get() + at * N, static_cast<size_t>(N)); };
  for (int64_t at = 0; at < num_lists; ++at) most = std::max<int64_t>(most, std::ranges::count(list(at), true));
  std::vector<int32_t> index(static_cast<size_t>(num_lists * most), -1);
  for (int64_t at = 0; at < num_lists; ++at) {
    int32_t* to = index.data() + at * most;
    for (int64_t block = 0; block < N; ++block) {
      if (list(at)[static_cast<size_t>(block)]) *to++ = static_cast<int32_t>(block);
    }
  }
  return patterns::RowBlocks({index.data(), DType::kI32, {B, T, H, most}}, softmax::kSketchKeys);
}

// heed.select.certified: takes keys or a cache by position; the other arguments are keywords.
Pattern Select(const nb::args& args, const nb::kwargs& kwargs) {
  constexpr char kSelector[] = "certified";
  static const Keywords keywords =
      Joined({std::span(kInputs).first(1), kCertificate, OptionsOfAttention(), attention::ThreadsKeyword()});
  Call call;
  call.arrays.AllowTorch();
  Read<attention::Call>(kSelector, keywords, 0, nb::tuple().ptr(), kwargs.ptr(), call);
  const ConstTensorView& q = call.in.q;
  CheckQueries(kSelector, q, "[B,Tq,Hq,D]");
  if (call.options.cu_seqlens_q.present())
    Fail(kSelector, "cu_seqlens_q", "is given", "none: lists of blocks are those of a batch");
  if (call.level == Level::kSkip && call.options.key_starts.present()) {
    Fail(kSelector, "key_starts", "is given", "none at level skip, whose blocks count from there");
  }
  const nb::object keys = args[0];
  const CacheOwner* cache = nullptr;
  if (!nb::try_cast(keys, cache)) cache = nullptr;
  if (cache == nullptr) {
    call.in.k = call.arrays.Read({kSelector, "k", keys}, Kind::kFloat);
    if (call.in.k.rank() != 4) Fail(kSelector, "k", "has shape " + call.in.k.ShapeString(), "[B,Tk,Hkv,D]");
  }
  ArrayLayout layout;
  const bool of_torch = ImportTorch({kSelector, "q", kwargs["q"]}, layout);
  Context& ctx = of_torch ? TorchContext(call.num_threads) : ThreadContext(call.num_threads);
  Pattern pattern;
  Compute(kSelector, [&] {
    if (cache != nullptr) {
      const std::shared_lock lock(cache->mutex);
      const KVView view = cache->base().view();
      const int64_t longest = view.lengths.empty() ? 0 : *std::ranges::max_element(view.lengths);
      pattern = Chosen(call, view.heads, longest, view.value_dim,
                       [&](const Outputs& out) { Attend(ctx, view, q, call.all_options(), out); });
      return;
    }
    constexpr double kZero = 0;  // a value in every dtype: the selection does not depend on values
    const ConstTensorView& k = call.in.k;
    const ConstTensorView v(&kZero, k.dtype(), {k.size(0), k.size(1), k.size(2), 1}, {0, 0, 0, 1});
    pattern = Chosen(call, k.size(2), k.size(1), 1,
                     [&](const Outputs& out) { Forward(ctx, {q, k, v}, call.all_options(), out); });
  });
  return pattern;
}

}  // namespace

nb::object AttendOn(const CacheOwner& cache, const nb::args& args, const nb::kwargs& kwargs) {
  const std::string name = cache.Op("attend");
  const char* const op = name.c_str();
  if (const auto rest = WithoutEpsilon(op, kwargs)) return attention::AttendOn(cache, args, *rest);
  Call call;
  ReadAttend(op, cache, false, args, kwargs, call);
  const attention::Results results = attention::NewResults(op, call, call.in.q, cache.value_dim);
  Outputs out = {results.views.o, {}, results.views.lse, {}};
  const nb::object bound = call.return_bound ? NewBound(op, call, &out.bound) : nb::none();
  Run(op, ThreadContext(call.num_threads), cache, call, out);
  if (!call.return_bound) return results.Returned();
  return Returned(call, results, bound);
}

void AttendOnTorch(const CacheOwner& cache, const nb::args& args, const nb::kwargs& kwargs) {
  const std::string op = cache.Op("attend");
  if (const auto rest = WithoutEpsilon(op.c_str(), kwargs)) return attention::AttendOnTorch(cache, args, *rest);
  Call call;
  ReadAttend(op.c_str(), cache, true, args, kwargs, call);
  Run(op.c_str(), TorchContext(call.num_threads), cache, call, {call.out_view, call.out_bound, call.out_lse, {}});
}

const char* AttendSignature(bool bound, bool lse) { return attention::SpelledForCache(Unspelled(bound, lse)); }

std::string AttendText() {
  return Docstring(
      std::string(attention::doc::kAttend) + "\n\nWith epsilon:\n\n" + doc::kAttend, Unspelled(false, false),
      {kAttendSaid, kAttendArguments},
      std::string(kAttendInPython) + "\nWith return_bound=True the bound is returned after o, before lse.");
}

void Bind(nb::module_& m) {
  const auto signature = [](const std::string& return_lse, const std::string& result) {
    return attention::Spelled(kSignature + result, &IsTaken,
                              "return_lse: " + return_lse + ", " + attention::kOutAndThreads);
  };
  const char* const forward = signature("typing.Literal[False] = False", "tuple[Result, Result]");
  const char* const with_lse = signature("typing.Literal[True]", "tuple[Result, Result, Result]");
  const std::string text =
      Docstring(doc::kForward, forward, {kSaid, attention::kArguments, doc::kCertifiedAttentionFields}, kInPython);
  m.def(kOp, &RunForward, nb::sig(forward), text.c_str());
  m.def(kOp, &RunForward, nb::sig(with_lse), text.c_str());
  m.def("_certified", &Select);
  RegisterExplain(kOp, &RunExplain);
}

}  // namespace heed::certified_attention

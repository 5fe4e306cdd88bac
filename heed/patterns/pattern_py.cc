// heed.Pattern, and the functions that heed.patterns builds it with.
#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/patterns/pattern.h"
#include "heed/patterns/pattern_block_mask.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/patterns/pattern_py.h"
#include "python/arguments.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"

namespace heed::python {
namespace {

constexpr int64_t kMostSizes = int64_t{1} << 31;

patterns::Value ValueOf(Arrays& arrays, const patterns::Parameter& parameter, const Argument& a) {
  using patterns::Parameter;
  switch (parameter.kind) {
    case Parameter::kSize:
    case Parameter::kCount: return ToInt(a, INT64_MIN, INT64_MAX);
    case Parameter::kSeed: return static_cast<int64_t>(ToUnsigned(a));
    case Parameter::kBlock: {
      if (!PyTuple_Check(a.value.ptr()) && !PyList_Check(a.value.ptr())) {
        return ToInt(a, INT64_MIN, INT64_MAX);
      }
      patterns::Table block;
      block.shape = {PyObject_Size(a.value.ptr())};
      for (int64_t i = 0; i < block.shape[0]; ++i) {
        block.values.push_back(ToInt({a.operation, a.name, a.value[i]}, INT64_MIN, INT64_MAX));
      }
      return block;
    }
    case Parameter::kInts: return patterns::Copied(a.operation, a.name, arrays.ReadList(a, Kind::kInt), false);
    case Parameter::kBools: return patterns::Copied(a.operation, a.name, arrays.ReadList(a, Kind::kBool), true);
    case Parameter::kPatterns: {
      std::vector<Pattern> heads;
      if (!PyTuple_Check(a.value.ptr()) && !PyList_Check(a.value.ptr())) Fail(a, "a list of patterns");
      for (const nb::handle head : a.value) {
        const Pattern* pattern = nullptr;
        if (!nb::try_cast(head, pattern) || pattern == nullptr) Fail(a, "a list of patterns");
        heads.push_back(*pattern);
      }
      return heads;
    }
  }
  throw InternalError("pattern: no such parameter");
}

// Calls a builder by name, with all of its arguments in order.
Pattern Make(const std::string& name, const nb::args& arguments) {
  const patterns::Builder& builder = *patterns::FindBuilder(name);
  Arrays arrays;
  std::vector<patterns::Value> values;
  for (size_t i = 0; i < builder.parameters.size(); ++i) {
    const patterns::Parameter& parameter = builder.parameters[i];
    values.push_back(ValueOf(arrays, parameter, {builder.name, parameter.name, arguments[i]}));
  }
  return patterns::Build(builder, std::move(values));
}

// Implements heed.torch.pattern_from_block_mask; block and lengths are pairs.
Pattern MakeBlockMask(nb::handle row_ptr, nb::handle columns, nb::handle parts, nb::handle bits,
                      const std::pair<int64_t, int64_t>& block, const std::pair<int64_t, int64_t>& lengths) {
  Arrays arrays;
  const auto read = [&](const char* name, nb::handle value) {
    return arrays.ReadList({"block_mask", name, value}, Kind::kInt);
  };
  return patterns::BlockMask({read("row_ptr", row_ptr), read("columns", columns), read("parts", parts),
                              read("bits", bits), block.first, block.second, lengths.first, lengths.second});
}

Pattern Parse(nb::handle expression) {
  const std::string text = ToString({"parse", "expression", expression}, "a string");
  try {
    return Pattern::Parse(text);
  } catch (const InvalidArgument& error) {  // from the expression, unless a builder threw
    const std::string what = error.what();
    throw InvalidArgument(what.starts_with("pattern: ") ? "parse: expression " + what.substr(9) : what);
  }
}

// Sizes and positions of mask() and density().
PatternCall CallOf(const char* op, nb::handle Tq, nb::handle Tk, nb::handle heads, nb::handle batch, nb::handle align,
                   nb::handle key_heads) {
  PatternCall call;
  call.Tq = ToInt({op, "Tq", Tq}, 0, kMostSizes);
  call.Tk = ToInt({op, "Tk", Tk}, 0, kMostSizes);
  call.query_heads = call.key_heads = ToInt({op, "heads", heads}, 1, kMostSizes);
  if (!key_heads.is_none()) {
    const Argument a = {op, "key_heads", key_heads};
    call.key_heads = ToInt(a, 1, kMostSizes);
    if (call.query_heads % call.key_heads != 0) Fail(a, "one that divides heads, " + std::to_string(call.query_heads));
  }
  const int64_t entries = ToInt({op, "batch", batch}, 0, kMostSizes);
  const Argument a = {op, "align", align};
  if (!PyUnicode_Check(align.ptr())) {
    constexpr char kExpected[] = "'bottom_right', 'top_left' or an int array [batch]";
    if (PyLong_Check(align.ptr()) || align.is_none()) Fail(a, kExpected);
    Arrays arrays;
    const ConstTensorView starts = arrays.ReadPositions(a);
    if (starts.dtype() != DType::kI64) Fail(op, a.name, std::string("has dtype ") + Name(starts.dtype()), "i32 or i64");
    if (starts.rank() != 1 || starts.size(0) != entries) {
      Fail(op, a.name, "has shape " + starts.ShapeString(), "[" + std::to_string(entries) + "]");
    }
    for (int64_t b = 0; b < entries; ++b) {
      call.starts.push_back(LoadAsInt64(starts.dtype(), starts.data(), b * starts.stride(0)));
      const int64_t start = call.starts.back();
      if (-patterns::kLargest <= start && start <= patterns::kLargest) continue;
      Fail(op, a.name, "contains " + std::to_string(start), "a position of at most 2^61 either way");
    }
    return call;
  }
  const std::string where = ToChoice(a, {"bottom_right", "top_left"});
  call.starts.assign(static_cast<size_t>(entries), where == "top_left" ? 0 : call.Tk - call.Tq);
  return call;
}

nb::object MaskArray(const Pattern& pattern, nb::handle Tq, nb::handle Tk, nb::handle heads, nb::handle batch,
                     nb::handle causal, nb::handle align, nb::handle key_heads) {
  const PatternCall call = CallOf("mask", Tq, Tk, heads, batch, align, key_heads);
  const bool is_causal = ToBool({"mask", "causal", causal});
  const int64_t sizes[] = {static_cast<int64_t>(call.starts.size()), call.query_heads, call.Tq, call.Tk};
  NewArray keep("mask", DType::kBool, sizes);
  Mask(pattern, call, is_causal, keep.view);
  return keep.array;
}

double DensityOf(const Pattern& pattern, nb::handle Tq, nb::handle Tk, nb::handle heads, nb::handle batch,
                 nb::handle causal, nb::handle align, nb::handle key_heads) {
  const PatternCall call = CallOf("density", Tq, Tk, heads, batch, align, key_heads);
  return Density(pattern, call, ToBool({"density", "causal", causal}));
}

// Patterns recently passed to PyTorch's operators, by their key in a schema. Protected by the GIL.
std::map<std::string, std::weak_ptr<const patterns::Node>>& Named() {
  static auto& named = *new std::map<std::string, std::weak_ptr<const patterns::Node>>;
  return named;
}

// Returns the key of a pattern, which stays alive until the operators have read it.
std::string KeyOf(nb::handle value) {
  const Pattern pattern = ToPattern({"attention", "pattern", value});
  constexpr size_t kMany = 256;
  auto& named = Named();
  if (named.size() > kMany) std::erase_if(named, [](const auto& one) { return one.second.expired(); });
  named[pattern.node()->key] = pattern.node();
  return pattern.node()->key;
}

nb::object PatternOf(const std::string& key) {
  const auto found = Named().find(key);
  if (found == Named().end()) return nb::none();
  std::shared_ptr<const patterns::Node> node = found->second.lock();
  return node == nullptr ? nb::none() : nb::cast(Pattern(std::move(node)));
}

constexpr char kClassText[] =
    "The keys that each row of sparse attention attends to: an immutable set of pairs of a position and a key.\n\n"
    "Made by the functions of heed.patterns; `|` is the union of two, `&` the intersection; `repr` is an\n"
    "expression that heed.patterns.parse reads. heed.attention(..., pattern=p) takes it.\n\n"
    "Example:\n\n"
    "  >>> import heed\n"
    "  >>> P = heed.patterns\n"
    "  >>> P.sliding_window(2) | P.global_tokens([0])\n"
    "  sliding_window(left=2, right=0) | global_tokens(tokens=[0])";

constexpr char kMaskText[] =
    "The kept pairs, only those with j <= p if causal.\n\n"
    "Args:\n"
    "  `Tq`: rows\n"
    "  `Tk`: keys\n"
    "  `heads`: query heads\n"
    "  `batch`: batch entries\n"
    "  `causal`: whether keys after a row's position are left out\n"
    "  `align`: position of row 0: 'bottom_right' (Tk - Tq), 'top_left' (0), or an int array [batch]\n"
    "  `key_heads`: number of key heads, for patterns per key head; None: as many as query heads\n\n"
    "Returns a new NumPy array [batch, heads, Tq, Tk], bool.\n\n"
    "Example:\n\n"
    "  >>> import heed\n"
    "  >>> heed.patterns.dilated(1, 2).mask(3, 3)[0, 0].astype(int).tolist()\n"
    "  [[1, 0, 1], [0, 1, 0], [1, 0, 1]]";

constexpr char kDensityText[] =
    "The fraction of kept pairs among all, or among those with j <= p if causal; 0 if there is no pair.\n\n"
    "Args:\n"
    "  `Tq`: rows\n"
    "  `Tk`: keys\n"
    "  `heads`: query heads\n"
    "  `batch`: batch entries\n"
    "  `causal`: whether keys after a row's position are left out, of both\n"
    "  `align`: position of row 0: 'bottom_right' (Tk - Tq), 'top_left' (0), or an int array [batch]\n"
    "  `key_heads`: number of key heads, for patterns per key head; None: as many as query heads\n\n"
    "Example:\n\n"
    "  >>> import heed\n"
    "  >>> heed.patterns.atrous(2).density(4, 4)\n"
    "  0.5";

}  // namespace

Pattern ToPattern(const Argument& a) {
  const Pattern* pattern = nullptr;
  if (!nb::try_cast(a.value, pattern) || pattern == nullptr) Fail(a, "a pattern of heed.patterns");
  return *pattern;
}

Pattern ToPatternByKey(const Argument& a) {
  const std::string key = ToString(a, "an expression of a pattern");
  const auto found = Named().find(key);
  if (found != Named().end()) {
    if (std::shared_ptr<const patterns::Node> node = found->second.lock()) return Pattern(std::move(node));
  }
  return Pattern::Parse(key);
}

void BindPatterns(nb::module_& m) {
  using namespace nanobind::literals;
  nb::class_<Pattern>(m, "Pattern", kClassText, nb::is_weak_referenceable())
      .def(
          "__or__", [](const Pattern& a, const Pattern& b) { return a | b; }, nb::is_operator())
      .def(
          "__and__", [](const Pattern& a, const Pattern& b) { return a & b; }, nb::is_operator())
      .def(
          "__eq__", [](const Pattern& a, const Pattern& b) { return a == b; }, nb::is_operator())
      .def("__hash__", [](const Pattern& p) { return std::hash<std::string>()(p.node()->key); })
      .def("__repr__", &Pattern::ToString)
      .def("mask", &MaskArray, "Tq"_a.none(), "Tk"_a.none(), "heads"_a.none() = 1, "batch"_a.none() = 1,
           "causal"_a.none() = false, "align"_a.none() = "bottom_right", "key_heads"_a = nb::none(),
           nb::sig("def mask(self, Tq: int, Tk: int, heads: int = 1, batch: int = 1, causal: bool = False, "
                   "align: Align = 'bottom_right', key_heads: int | None = None) -> numpy.typing.NDArray[numpy.bool_]"),
           kMaskText)
      .def("density", &DensityOf, "Tq"_a.none(), "Tk"_a.none(), "heads"_a.none() = 1, "batch"_a.none() = 1,
           "causal"_a.none() = false, "align"_a.none() = "bottom_right", "key_heads"_a = nb::none(),
           nb::sig("def density(self, Tq: int, Tk: int, heads: int = 1, batch: int = 1, causal: bool = False, "
                   "align: Align = 'bottom_right', key_heads: int | None = None) -> float"),
           kDensityText);
  m.def("_pattern", &Make);
  m.def("_block_mask", &MakeBlockMask);
  m.def("_parse_pattern", &Parse, "expression"_a.none());
  m.def("_pattern_key", &KeyOf);
  m.def("_pattern_of", &PatternOf);
}

}  // namespace heed::python

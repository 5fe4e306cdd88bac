// Reads options, and gives their types and defaults in signatures and schemas, by the type of the field.
#include "heed/ops/exact/attention/attention_options_py.h"

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "heed/patterns/pattern_py.h"
#include "python/argument_names.h"

namespace heed::attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

// An option's value from Python or from an operator.
struct Given {
  Call& call;
  const OptionRow& row;
  bool of_torch;
  const Argument& a;
};

void ReadInto(const Given& g, bool& x) { x = ToBool(g.a); }
void ReadInto(const Given& g, double& x) { x = ToFinite(g.a); }
void ReadInto(const Given& g, std::optional<double>& x) { x = ToFinite(g.a); }
void ReadInto(const Given& g, int64_t& x) { x = ToInt(g.a, g.row.Is(kZeroIsNone) ? 1 : 0, INT64_MAX); }
void ReadInto(const Given& g, uint32_t& x) { x = static_cast<uint32_t>(ToInt(g.a, 0, UINT32_MAX)); }
void ReadInto(const Given& g, Precision& x) { x = ToPrecision(g.a); }
void ReadInto(const Given& g, Pattern& x) { x = g.of_torch ? ToPatternByKey(g.a) : ToPattern(g.a); }

// Reads an int of Python, or the bits of one in a tensor.
void ReadInto(const Given& g, uint64_t& x) {
  g.call.seed_given = true;
  x = g.of_torch ? ToSeedBits(g.call.arrays, g.a) : ToUnsigned(g.a);
}

// Reads a word, or positions, which have a field of their own.
void ReadInto(const Given& g, Align& x) {
  constexpr char kExpected[] = "'bottom_right', 'top_left' or an int array [B]";
  const Argument& a = g.a;
  if (PyLong_Check(a.value.ptr()) || a.value.is_none()) Fail(a, kExpected);
  if (!PyUnicode_Check(a.value.ptr())) {
    g.call.options.query_starts = g.call.arrays.ReadPositions(a);
    return;
  }
  const std::string name = ToString(a, kExpected);
  if (name != "bottom_right" && name != "top_left") Fail(a, kExpected);
  x = name == "top_left" ? Align::kTopLeft : Align::kBottomRight;
}

void ReadInto(const Given& g, Window& x) {
  const auto [left, right] = ToPair(g.a, "left", "right", -1);
  x = {left, right};
}

void ReadInto(const Given& g, ConstTensorView& x) {
  Arrays& arrays = g.call.arrays;
  const Kind kind = g.row.holds == Holds::kInts    ? Kind::kInt
                    : g.row.holds == Holds::kBools ? Kind::kBool
                                                   : Kind::kFloat;
  if (g.row.Broadcasts()) {
    x = arrays.ReadBroadcast(g.a, kind);
  } else if (!TakesNumbers(g.row)) {
    x = arrays.ReadInPlace(g.a, kind);
  } else if (&x == &g.call.options.query_starts) {
    x = arrays.ReadPositions(g.a);
  } else {
    x = arrays.ReadList(g.a, kind);
  }
}

// A tuple is a pair, except in explain, where it may be a shape.
void ReadSegments(Call& call, const Argument& a) {
  Options& options = call.options;
  const bool is_tuple = PyTuple_Check(a.value.ptr());
  if (!is_tuple || (call.describe && PyObject_Size(a.value.ptr()) > 0 && PyLong_Check(nb::object(a.value[0]).ptr()))) {
    options.segments_q = options.segments_k = call.arrays.ReadList(a, Kind::kInt);
    return;
  }
  if (PyObject_Size(a.value.ptr()) != 2) Fail(a, "an int array [B, T] or a pair (segments_q, segments_k)");
  options.segments_q = call.arrays.ReadList({a.operation, "segments of q", a.value[0]}, Kind::kInt);
  options.segments_k = call.arrays.ReadList({a.operation, "segments of k", a.value[1]}, Kind::kInt);
}

// The type and default of an option.
struct Typed {
  const char *type, *value;
};
struct Types {
  Typed python, torch;
};
template <class T>
constexpr Types kTypes;
template <>
constexpr Types kTypes<bool> = {{"bool", "False"}, {"bool", "False"}};
template <>
constexpr Types kTypes<double> = {{"float", "0.0"}, {"float", "0.0"}};
template <>
constexpr Types kTypes<std::optional<double>> = {{"float | None", "None"}, {"float?", "None"}};
template <>
constexpr Types kTypes<int64_t> = {{"int", "0"}, {"int", "0"}};
template <>
constexpr Types kTypes<uint32_t> = {{"int", "0"}, {"int", "0"}};
template <>
constexpr Types kTypes<uint64_t> = {{"int | None", "None"}, {"Tensor?", "None"}};
template <>
constexpr Types kTypes<Align> = {{"Align", "'bottom_right'"}, {"str", "'bottom_right'"}};
template <>
constexpr Types kTypes<Window> = {{"tuple[int, int] | None", "None"}, {"int[]?", "None"}};
template <>
constexpr Types kTypes<Precision> = {{"typing.Literal['highest', 'high']", "'highest'"}, {"str", "'highest'"}};
template <>
constexpr Types kTypes<Pattern> = {{"Pattern | None", "None"}, {"str?", "None"}};
template <>
constexpr Types kTypes<ConstTensorView> = {{"Array | None", "None"}, {"Tensor?", "None"}};

template <size_t I, bool kOfTorch>
void ReadOption(Call& call, const Argument& a) {
  constexpr const OptionRow& row = kOptionRows[I];
  std::visit([&](auto field) { ReadInto({call, row, kOfTorch, a}, call.options.*field); }, row.field);
}

template <size_t I, bool kOfTorch>
OptionArgument ArgumentOf() {
  constexpr const OptionRow& row = kOptionRows[I];
  const Types types = std::visit([]<class T>(T Options::*) { return kTypes<T>; }, row.field);
  OptionArgument result = {&row, {row.name, false, &ReadOption<I, kOfTorch>}, {}, {}};
  result.type = kOfTorch ? types.torch.type : types.python.type;
  result.value = kOfTorch ? types.torch.value : types.python.value;
  if (row.Is(kZeroIsNone)) {
    result.type += kOfTorch ? "?" : " | None";
    result.value = "None";
  }
  if (!kOfTorch && TakesNumbers(row)) result.type = row.holds == Holds::kInts ? "Ints | None" : "Floats | None";
  result.keyword.none_is_absent = result.value == "None";
  return result;
}

template <bool kOfTorch, size_t... I>
std::vector<OptionArgument> ArgumentsOf(std::index_sequence<I...>) {
  return {ArgumentOf<I, kOfTorch>()...};
}

template <bool kOfTorch>
std::vector<OptionArgument> Arguments() {
  return ArgumentsOf<kOfTorch>(std::make_index_sequence<std::size(kOptionRows)>());
}

}  // namespace

bool TakesNumbers(const OptionRow& row) {
  return row.holds == Holds::kInts || (row.holds == Holds::kFloats && !row.Has('K') && !row.Has('D'));
}

const std::vector<OptionArgument>& OptionKeywords() {
  static const std::vector<OptionArgument> keywords = [] {
    std::vector<OptionArgument> all = Arguments<false>();
    std::erase_if(all, [](const OptionArgument& x) {  // set by align and by segments
      return x.row->field == OptionField(&Options::query_starts) || x.row->field == OptionField(&Options::segments_k);
    });
    for (OptionArgument& x : all) {
      if (x.row->field != OptionField(&Options::segments_q)) continue;
      x.keyword = {"segments", true, &ReadSegments};
      x.type = "Segments | None";
    }
    return all;
  }();
  return keywords;
}

const std::vector<OptionArgument>& TorchOptions() {
  static const std::vector<OptionArgument> options = [] {
    std::vector<OptionArgument> all = Arguments<true>();
    for (OptionArgument& x : all)
      x.keyword.name = NameInPython("attention", x.row->name).data();  // a string literal, which
                                                                       // outlives the keyword
    std::ranges::stable_sort(all, {}, [](const OptionArgument& x) { return x.row->place; });
    return all;
  }();
  return options;
}

nb::tuple ForTorch(const std::vector<OptionArgument>& options) {
  nb::list described;
  for (const OptionArgument& x : options) {
    const OptionRow& row = *x.row;
    described.append(nb::make_tuple(row.name, x.type + " " + row.name + "=" + x.value, TakesNumbers(row),
                                    row.gradient != nullptr, row.not_on_cache == nullptr));
  }
  described.append(nb::make_tuple("threads", "int? threads=None", false, false, true));
  return nb::tuple(described);
}

const char* Spelled(std::string signature, Takes takes, const std::string& more) {
  static std::deque<std::string> all;
  constexpr std::string_view kWord = "**options";
  std::string keywords;
  for (const OptionArgument& x : OptionKeywords()) {
    if (takes(*x.row)) keywords += std::string(x.keyword.name) + ": " + x.type + " = " + x.value + ", ";
  }
  keywords += more;
  if (more.empty()) keywords.resize(keywords.size() - 2);
  return all.emplace_back(signature.replace(signature.find(kWord), kWord.size(), keywords)).c_str();
}

}  // namespace heed::attention

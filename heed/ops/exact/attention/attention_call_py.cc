// The options of attention, each with its Python name and how it is read.
#include "heed/ops/exact/attention/attention_call_py.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "heed/ops/sparse/common/pattern_py.h"
#include "python/arguments.h"
#include "python/runtime.h"

namespace heed::attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

void ReadAlign(Call& call, const Argument& a) {
  constexpr char kExpected[] = "'bottom_right', 'top_left' or an int array [B]";
  if (PyLong_Check(a.value.ptr()) || a.value.is_none()) Fail(a, kExpected);
  if (PyUnicode_Check(a.value.ptr())) {
    const std::string name = ToString(a, kExpected);
    if (name != "bottom_right" && name != "top_left") Fail(a, kExpected);
    call.options.align =
        name == "top_left" ? Align::kTopLeft : Align::kBottomRight;
  } else {
    call.options.query_starts = call.arrays.ReadPositions(a);
  }
}

void ReadWindow(Call& call, const Argument& a) {
  constexpr char kExpected[] = "a pair (left, right) of ints of at least -1";
  if (!PyTuple_Check(a.value.ptr()) && !PyList_Check(a.value.ptr()))
    Fail(a, kExpected);
  if (PyObject_Size(a.value.ptr()) != 2) Fail(a, kExpected);
  call.options.window.left =
      ToInt({a.operation, "window[0]", a.value[0]}, -1, INT64_MAX);
  call.options.window.right =
      ToInt({a.operation, "window[1]", a.value[1]}, -1, INT64_MAX);
}

// A tuple is a pair, unless explain is given a shape.
void ReadSegments(Call& call, const Argument& a) {
  Options& options = call.options;
  const bool is_tuple = PyTuple_Check(a.value.ptr());
  if (!is_tuple || (call.describe && PyObject_Size(a.value.ptr()) > 0 &&
                    PyLong_Check(nb::object(a.value[0]).ptr()))) {
    options.segments_q = options.segments_k =
        call.arrays.ReadList(a, Kind::kInt);
    return;
  }
  if (PyObject_Size(a.value.ptr()) != 2) {
    Fail(a, "an int array [B, T] or a pair (segments_q, segments_k)");
  }
  options.segments_q =
      call.arrays.ReadList({a.operation, "segments_q", a.value[0]}, Kind::kInt);
  options.segments_k =
      call.arrays.ReadList({a.operation, "segments_k", a.value[1]}, Kind::kInt);
}

void ReadOut(Call& call, const Argument& a) {
  if (call.describe) return;
  call.out = a.value;
  call.out_view = call.arrays.Write(a, Kind::kFloat);
}

template <ConstTensorView Inputs::*kField>
void ReadInput(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}

template <ConstTensorView Call::*kField>
void ReadArray(Call& call, const Argument& a) {
  call.*kField = call.arrays.Read(a, Kind::kFloat);
}

template <ConstTensorView Options::*kField>
void ReadInts(Call& call, const Argument& a) {
  call.options.*kField = call.arrays.ReadList(a, Kind::kInt);
}

template <ConstTensorView Options::*kField>
void ReadFloats(Call& call, const Argument& a) {
  call.options.*kField = call.arrays.ReadList(a, Kind::kFloat);
}

// In the order of the signature below; None is the default where the second
// column says so.
constexpr Keyword<Call> kKeywords[] = {
    {"q", false, &ReadInput<&Inputs::q>},
    {"k", false, &ReadInput<&Inputs::k>},
    {"v", false, &ReadInput<&Inputs::v>},
    {"scale", true,
     [](Call& c, const Argument& a) { c.options.scale = ToFinite(a); }},
    {"causal", false,
     [](Call& c, const Argument& a) { c.options.causal = ToBool(a); }},
    {"align", false, &ReadAlign},
    {"window", true, &ReadWindow},
    {"sink_tokens", false,
     [](Call& c, const Argument& a) {
       c.options.sink_tokens = ToInt(a, 0, INT64_MAX);
     }},
    {"prefix", true, &ReadInts<&Options::prefix>},
    {"chunk", true,
     [](Call& c, const Argument& a) {
       c.options.chunk = ToInt(a, 1, INT64_MAX);
     }},
    {"segments", true, &ReadSegments},
    {"key_lengths", true, &ReadInts<&Options::key_lengths>},
    {"key_starts", true, &ReadInts<&Options::key_starts>},
    {"query_lengths", true, &ReadInts<&Options::query_lengths>},
    {"mask", true,
     [](Call& c, const Argument& a) {
       c.options.mask = c.arrays.ReadBroadcast(a, Kind::kBool);
     }},
    {"pattern", true,
     [](Call& c, const Argument& a) { c.options.pattern = ToPattern(a); }},
    {"bias", true,
     [](Call& c, const Argument& a) {
       c.options.bias = c.arrays.ReadBroadcast(a, Kind::kFloat);
     }},
    {"alibi", true, &ReadFloats<&Options::alibi>},
    {"softcap", true,
     [](Call& c, const Argument& a) { c.options.softcap = ToFinite(a); }},
    {"sinks", true, &ReadFloats<&Options::sinks>},
    {"log_decay", true,
     [](Call& c, const Argument& a) {
       c.options.log_decay = c.arrays.ReadInPlace(a, Kind::kFloat);
     }},
    {"dropout", false,
     [](Call& c, const Argument& a) { c.options.dropout = ToFinite(a); }},
    {"seed", true,
     [](Call& c, const Argument& a) {
       c.options.seed = ToUnsigned(a);
       c.seed_given = true;
     }},
    {"dropout_offset", false,
     [](Call& c, const Argument& a) {
       c.options.dropout_offset =
           static_cast<uint32_t>(ToInt(a, 0, UINT32_MAX));
     }},
    {"cu_seqlens_q", true, &ReadInts<&Options::cu_seqlens_q>},
    {"cu_seqlens_k", true, &ReadInts<&Options::cu_seqlens_k>},
    {"precision", false, [](Call& c, const Argument& a) { c.options.precision = ToPrecision(a); }},
    {"invariant", false,
     [](Call& c, const Argument& a) { c.options.invariant = ToBool(a); }},
    {"return_lse", false,
     [](Call& c, const Argument& a) { c.return_lse = ToBool(a); }},
    {"out", true, &ReadOut},
    {"threads", true,
     [](Call& c, const Argument& a) {
       c.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads));
     }},
};

void ReadSize(Call& call, const Argument& a) {
  constexpr char kExpected[] = "a pair (rows, columns) of ints of at least 1";
  if (!PyTuple_Check(a.value.ptr()) && !PyList_Check(a.value.ptr()))
    Fail(a, kExpected);
  if (PyObject_Size(a.value.ptr()) != 2) Fail(a, kExpected);
  call.map_rows = ToInt({a.operation, "size[0]", a.value[0]}, 1, INT64_MAX);
  call.map_columns = ToInt({a.operation, "size[1]", a.value[1]}, 1, INT64_MAX);
}

void ReadReduce(Call& call, const Argument& a) {
  constexpr char kExpected[] = "'mean' or 'max'";
  const std::string name = ToString(a, kExpected);
  if (name != "mean" && name != "max") Fail(a, kExpected);
  call.reduce = name == "max" ? Reduce::kMax : Reduce::kMean;
}

// What is asked about weights beside the options of attention.
constexpr Keyword<Call> kWeightsKeywords[] = {
    {"lse", true, &ReadArray<&Call::lse>},
    {"rows", true,
     [](Call& c, const Argument& a) { c.rows = c.arrays.ReadList(a, Kind::kInt); }},
    {"heads", true,
     [](Call& c, const Argument& a) { c.heads = c.arrays.ReadList(a, Kind::kInt); }},
    {"size", false, &ReadSize},
    {"reduce", false, &ReadReduce},
};

// What attention_backward takes beside q, k, v and the options of attention: its first
// argument, then those after v.
constexpr Keyword<Call> kGradientOfO = {"do", false, &ReadArray<&Call::d_o>};
constexpr Keyword<Call> kBackwardKeywords[] = {
    {"o", false, &ReadArray<&Call::o>},
    {"lse", false, &ReadArray<&Call::lse>},
    {"dlse", true, &ReadArray<&Call::d_lse>},
    {"need_dbias", false,
     [](Call& c, const Argument& a) { c.need_dbias = ToBool(a); }},
};

template <TensorView Gradients::*kField>
void WriteGradient(Call& call, const Argument& a) {
  call.gradients.*kField = call.arrays.Write(a, Kind::kFloat);
}

// What attend of a cache takes beside q and the options of attention.
constexpr Keyword<Call> kTree = {
    "tree", true, [](Call& c, const Argument& a) { c.tree = c.arrays.ReadPositions(a); }};

// What the operators of heed.torch take beside q, k and v ...
constexpr Keyword<Call> kTorchResults[] = {
    {"out", false, &ReadOut},
    {"lse", false,
     [](Call& c, const Argument& a) { c.out_lse = c.arrays.Write(a, Kind::kFloat); }},
};
constexpr Keyword<Call> kTorchGradients[] = {
    {"dq", true, &WriteGradient<&Gradients::dq>},
    {"dk", true, &WriteGradient<&Gradients::dk>},
    {"dv", true, &WriteGradient<&Gradients::dv>},
    {"dbias", true, &WriteGradient<&Gradients::dbias>},
    {"dsinks", true, &WriteGradient<&Gradients::dsinks>},
    {"dalibi", true, &WriteGradient<&Gradients::dalibi>},
    {"dlog_decay", true, &WriteGradient<&Gradients::dlog_decay>},
};
constexpr Keyword<Call> kTorchIncoming[] = {
    {"the gradient of o", false, &ReadArray<&Call::d_o>},
    {"the gradient of lse", true, &ReadArray<&Call::d_lse>},
};
// ... and instead of options that are unions, or of another type.
constexpr Keyword<Call> kTorchKeywords[] = {
    {"heads_first", false,
     [](Call& c, const Argument& a) { c.heads_first = ToBool(a); }},
    {"query_starts", true,
     [](Call& c, const Argument& a) {
       c.options.query_starts = c.arrays.ReadPositions(a);
     }},
    {"pattern", true,
     [](Call& c, const Argument& a) { c.options.pattern = ToPatternByKey(a); }},
    {"segments_q", true, &ReadInts<&Options::segments_q>},
    {"segments_k", true, &ReadInts<&Options::segments_k>},
    {"seed", true,
     [](Call& c, const Argument& a) {
       const ConstTensorView seed = c.arrays.Read(a, Kind::kInt);
       if (seed.num_elements() != 1 || seed.dtype() != DType::kI64)
         Fail(a, "an int64 tensor of one element");
       c.options.seed = static_cast<uint64_t>(*seed.as<int64_t>());
     }},
};

bool IsOutput(std::string_view name) { return name == "return_lse" || name == "out"; }

}  // namespace

uint64_t FreshSeed() {
  const auto bytes =
      nb::cast<nb::bytes>(nb::module_::import_("numpy").attr("random").attr("bytes")(sizeof(uint64_t)));
  uint64_t seed;
  std::memcpy(&seed, bytes.data(), sizeof(seed));
  return seed;
}

Precision ToPrecision(const Argument& a) {
  constexpr char kExpected[] = "'highest' or 'high'";
  const std::string name = ToString(a, kExpected);
  if (name != "highest" && name != "high") Fail(a, kExpected);
  return name == "high" ? Precision::kHigh : Precision::kHighest;
}

NewArray NewO(const char* op, const ConstTensorView& q, const ConstTensorView& v) {
  std::vector<int64_t> sizes(q.sizes().begin(), q.sizes().end());
  sizes.back() = v.size(v.rank() - 1);
  return {op, q.dtype(), sizes};
}

NewArray NewLse(const char* op, const ConstTensorView& q, bool packed) {
  const int heads = q.rank() - 2;
  std::vector<int64_t> sizes = {q.size(heads), q.size(heads - 1)};
  if (!packed) sizes.insert(sizes.begin(), q.size(0));
  return {op, q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, sizes};
}

void ReadCall(const char* operation, PyObject* args, PyObject* kwargs,
              Call& call) {
  Read<Call>(operation, kKeywords, 3, args, kwargs, call);
}

void ReadWeightsCall(const char* operation, std::span<const char* const> more,
                     PyObject* args, PyObject* kwargs, Call& call) {
  std::vector<Keyword<Call>> keywords;
  for (const Keyword<Call>& keyword : kKeywords) {
    const std::string_view name = keyword.name;
    if (name != "v" && !IsOutput(name)) keywords.push_back(keyword);
  }
  for (const Keyword<Call>& keyword : kWeightsKeywords) {
    for (const char* name : more) {
      if (std::string_view(keyword.name) == name) keywords.push_back(keyword);
    }
  }
  Read<Call>(operation, keywords, 2, args, kwargs, call);
}

void ReadBackwardCall(const char* operation, PyObject* args, PyObject* kwargs,
                      Call& call) {
  std::vector<Keyword<Call>> keywords = {kGradientOfO};
  for (const Keyword<Call>& keyword : kKeywords) {
    if (!IsOutput(keyword.name)) keywords.push_back(keyword);
  }
  keywords.insert(keywords.begin() + 4, std::begin(kBackwardKeywords),
                  std::end(kBackwardKeywords));
  Read<Call>(operation, keywords, 6, args, kwargs, call);
}

void ReadAttendCall(const char* operation, AttendArguments which, PyObject* args,
                    PyObject* kwargs, Call& call) {
  const auto make = [](bool needs_scale, bool for_torch) {
    std::vector<Keyword<Call>> keywords;
    for (Keyword<Call> keyword : kKeywords) {
      const std::string_view name = keyword.name;
      if (name == "k" || name == "v") continue;
      if (name == "scale" && needs_scale) keyword.none_is_absent = false;
      keywords.push_back(keyword);
    }
    keywords.push_back(kTree);
    if (!for_torch) return keywords;
    keywords.push_back(kTorchResults[1]);
    keywords.back().none_is_absent = true;
    return keywords;
  };
  static const std::vector<Keyword<Call>> tables[2][2] = {
      {make(false, false), make(false, true)}, {make(true, false), make(true, true)}};
  if (which.for_torch) call.arrays.AllowTorch();
  Read<Call>(operation, tables[which.needs_scale][which.for_torch], 1, args, kwargs, call);
}

namespace {

const Keyword<Call>& TorchKeyword(std::string_view name) {
  for (const Keyword<Call>& keyword : kTorchKeywords) {
    if (name == keyword.name) return keyword;
  }
  return *std::ranges::find(kKeywords, name, &Keyword<Call>::name);
}

// The given ones, then all options in the order of the schema.
std::vector<Keyword<Call>> TorchKeywords(
    std::initializer_list<std::span<const Keyword<Call>>> first) {
  std::vector<Keyword<Call>> keywords;
  for (const auto& some : first) keywords.insert(keywords.end(), some.begin(), some.end());
  std::string_view rest = kTorchOptions;  // "type name=default, ..."
  for (size_t end; (end = rest.find('=')) != rest.npos;) {
    const size_t begin = rest.rfind(' ', end) + 1;
    keywords.push_back(TorchKeyword(rest.substr(begin, end - begin)));
    rest.remove_prefix(end + 1);
  }
  return keywords;
}

}  // namespace

void ReadTorchCall(const char* operation, PyObject* args, Call& call) {
  static const std::vector<Keyword<Call>> keywords = TorchKeywords(
      {std::span(kKeywords).first(3), kTorchResults});
  call.arrays.AllowTorch();
  Read<Call>(operation, keywords, keywords.size(), args, nullptr, call);
}

void ReadTorchBackwardCall(const char* operation, PyObject* args, Call& call) {
  static const std::vector<Keyword<Call>> keywords =
      TorchKeywords({kTorchIncoming, std::span(kKeywords).first(3),
                     std::span(kBackwardKeywords).first(2), kTorchGradients});
  call.arrays.AllowTorch();
  Read<Call>(operation, keywords, keywords.size(), args, nullptr, call);
}

void CheckForResults(const char* operation, const Call& call) {
  const bool packed = call.options.cu_seqlens_q.present();
  const auto check = [&](const char* name, const ConstTensorView& x,
                         const char* heads) {
    if (!x.present()) FailMissing(operation, name);
    if (x.rank() == 4 || (packed && x.rank() == 3)) return;
    Fail(operation, name, "has shape " + x.ShapeString(),
         std::string(packed ? "[T_total, " : "[B, T, ") + heads +
             (packed ? " (or with a leading 1)" : ""));
  };
  check("q", call.in.q, "Hq, D]");
  check("k", call.in.k, "Hkv, D]");
  check("v", call.in.v, "Hkv, Dv]");
  if (!IsFloat(call.in.q.dtype())) {
    Fail(operation, "q", std::string("has dtype ") + Name(call.in.q.dtype()),
         "f64, f32, bf16 or f16");
  }
}

}  // namespace heed::attention

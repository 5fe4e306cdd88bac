// heed.attention, heed.merge_attention and the part of heed.explain that is
// about them.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "docstrings/attention.h"
#include "heed/ops/exact/attention/attention.h"
#include "python/arguments.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"

namespace heed::attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr char kOp[] = "attention";
constexpr char kMergeOp[] = "merge_attention";

// What the C++ surface calls by another name.
constexpr Renamed kRenamed[] = {{"o", "out"}, {"query_starts", "align"}};

// What one call was given.
struct Call {
  Arrays arrays;
  Inputs in;
  Options options;
  bool describe = false;  // explain: `out` is of no interest
  bool return_lse = false;
  nb::handle out;
  TensorView out_view;
  int num_threads = 0;
};

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

void ReadPrecision(Call& call, const Argument& a) {
  constexpr char kExpected[] = "'highest' or 'high'";
  const std::string name = ToString(a, kExpected);
  if (name != "highest" && name != "high") Fail(a, kExpected);
  call.options.precision =
      name == "high" ? Precision::kHigh : Precision::kHighest;
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
    {"bias", true,
     [](Call& c, const Argument& a) {
       c.options.bias = c.arrays.ReadBroadcast(a, Kind::kFloat);
     }},
    {"alibi", true, &ReadFloats<&Options::alibi>},
    {"softcap", true,
     [](Call& c, const Argument& a) { c.options.softcap = ToFinite(a); }},
    {"sinks", true, &ReadFloats<&Options::sinks>},
    {"dropout", false,
     [](Call& c, const Argument& a) { c.options.dropout = ToFinite(a); }},
    {"seed", false,
     [](Call& c, const Argument& a) { c.options.seed = ToUnsigned(a); }},
    {"dropout_offset", false,
     [](Call& c, const Argument& a) {
       c.options.dropout_offset =
           static_cast<uint32_t>(ToInt(a, 0, UINT32_MAX));
     }},
    {"cu_seqlens_q", true, &ReadInts<&Options::cu_seqlens_q>},
    {"cu_seqlens_k", true, &ReadInts<&Options::cu_seqlens_k>},
    {"precision", false, &ReadPrecision},
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

// The ranks and the dtype that decide what the outputs are; Forward checks the
// rest.
void CheckForOutputs(const Call& call) {
  const bool packed = call.options.cu_seqlens_q.present();
  const auto check = [&](const char* name, const ConstTensorView& x,
                         const char* heads) {
    if (!x.present()) FailMissing(kOp, name);
    if (x.rank() == 4 || (packed && x.rank() == 3)) return;
    Fail(kOp, name, "has shape " + x.ShapeString(),
         std::string(packed ? "[T_total, " : "[B, T, ") + heads +
             (packed ? " (or with a leading 1)" : ""));
  };
  check("q", call.in.q, "Hq, D]");
  check("k", call.in.k, "Hkv, D]");
  check("v", call.in.v, "Hkv, Dv]");
  if (!IsFloat(call.in.q.dtype())) {
    Fail(kOp, "q", std::string("has dtype ") + Name(call.in.q.dtype()),
         "f64 or f32");
  }
}

DType LseDType(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

nb::object Attention(const nb::args& args, const nb::kwargs& kwargs) {
  Call call;
  Read<Call>(kOp, kKeywords, 3, args.ptr(), kwargs.ptr(), call);
  CheckForOutputs(call);
  const ConstTensorView& q = call.in.q;
  const auto sizes = q.sizes();

  nb::object o, lse;
  Outputs outputs;
  if (call.out.is_valid()) {
    o = nb::borrow(call.out);
    outputs.o = call.out_view;
  } else {
    std::vector<int64_t> o_sizes(sizes.begin(), sizes.end());
    o_sizes.back() = call.in.v.size(call.in.v.rank() - 1);
    NewArray array(kOp, q.dtype(), o_sizes);
    o = std::move(array.array);
    outputs.o = array.view;
  }
  if (call.return_lse) {
    const size_t rank = sizes.size();
    const int64_t lse_sizes[] = {sizes[0], sizes[rank - 2], sizes[rank - 3]};
    const size_t skip = call.options.cu_seqlens_q.present() ? 1 : 0;
    NewArray array(kOp, LseDType(q.dtype()),
                   std::span(lse_sizes).subspan(skip));
    lse = std::move(array.array);
    outputs.lse = array.view;
  }
  Context& ctx = ThreadContext(call.num_threads);
  Compute(kOp, kRenamed, [&] { Forward(ctx, call.in, call.options, outputs); });
  if (!call.return_lse) return o;
  return nb::make_tuple(o, lse);
}

nb::dict ExplainAttention(DType dtype, int num_threads, PyObject* kwargs) {
  Call call;
  call.describe = true;
  call.arrays.AllowShapes(dtype);
  Read<Call>(kOp, kKeywords, 0, nullptr, kwargs, call);
  // Self-attention is described by q alone.
  if (!call.in.k.present()) call.in.k = call.in.q;
  if (!call.in.v.present()) call.in.v = call.in.k;
  CheckForOutputs(call);
  const Context& ctx = ThreadContext(num_threads);
  Explanation e;
  Compute(kOp, kRenamed,
          [&] { e = heed::attention::Explain(ctx, call.in, call.options); });

  // Counts are doubles because they can pass 2^63; whole ones are ints to
  // Python.
  const auto count = [](double x) { return nb::steal(PyLong_FromDouble(x)); };
  nb::list copies;
  for (const char* name : call.arrays.copied()) copies.append(name);
  nb::dict result;
  result["kernel"] = e.kernel;
  result["target"] = e.target;
  result["why"] = e.why;
  result["flops"] = count(e.flops);
  result["bytes"] = count(e.bytes);
  result["workspace_bytes"] = e.workspace_bytes;
  result["visited_pairs"] = count(e.visited_pairs);
  result["invariant"] = e.invariant;
  result["copies"] = copies;
  return result;
}

// A packed lse [H, T] beside o [1, T, H, D]: the same with a leading 1, for
// Merge.
template <class View>
View WithLeadingAxis(const View& lse) {
  return View(lse.data(), lse.dtype(), {1, lse.size(0), lse.size(1)},
              {0, lse.stride(0), lse.stride(1)}, lse.device());
}

nb::object MergeAttention(nb::handle parts_argument,
                          nb::handle sinks_argument) {
  constexpr char kExpected[] = "a sequence of pairs (o, lse)";
  Arrays arrays;
  std::deque<std::string> names;  // of arguments, which messages point to
  std::vector<Part> parts;
  const nb::object sequence =
      nb::steal(PySequence_Fast(parts_argument.ptr(), kExpected));
  if (!sequence.is_valid()) {
    PyErr_Clear();
    Fail({kMergeOp, "parts", parts_argument}, kExpected);
  }
  for (nb::handle item : sequence) {
    const std::string name = "parts[" + std::to_string(parts.size()) + "]";
    const bool is_pair =
        (PyTuple_Check(item.ptr()) || PyList_Check(item.ptr())) &&
        nb::len(item) == 2;
    if (!is_pair)
      Fail({kMergeOp, names.emplace_back(name).c_str(), item},
           "a pair (o, lse)");
    const char* o = names.emplace_back(name + ".o").c_str();
    const char* lse = names.emplace_back(name + ".lse").c_str();
    parts.push_back({arrays.Read({kMergeOp, o, item[0]}, Kind::kFloat),
                     arrays.Read({kMergeOp, lse, item[1]}, Kind::kFloat)});
    const Part& part = parts.back();
    if (part.o.rank() != 4 && part.o.rank() != 3) {
      Fail(kMergeOp, o, "has shape " + part.o.ShapeString(),
           "[B, Tq, Hq, Dv] or [Tq_total, Hq, Dv]");
    }
    if (!IsFloat(part.o.dtype())) {
      Fail(kMergeOp, o, std::string("has dtype ") + Name(part.o.dtype()),
           "f64, f32, bf16 or f16");
    }
    if (part.lse.rank() != 3 && part.lse.rank() != 2) {
      Fail(kMergeOp, lse, "has shape " + part.lse.ShapeString(),
           "[B, Hq, Tq] or [Hq, Tq_total]");
    }
  }
  if (parts.empty())
    Fail(kMergeOp, "parts", "is empty", "at least one pair (o, lse)");
  ConstTensorView sinks;
  if (!sinks_argument.is_none()) {
    sinks = arrays.ReadList({kMergeOp, "sinks", sinks_argument}, Kind::kFloat);
  }

  // One f64 part makes an f64 result; 16-bit parts of two kinds make f32.
  DType dtype = parts[0].o.dtype();
  for (const Part& part : parts) {
    if (part.o.dtype() == dtype) continue;
    const bool wide = dtype == DType::kF64 || part.o.dtype() == DType::kF64;
    dtype = wide ? DType::kF64 : DType::kF32;
  }
  NewArray o(kMergeOp, dtype, parts[0].o.sizes());
  NewArray lse(kMergeOp, LseDType(dtype), parts[0].lse.sizes());
  TensorView lse_view = lse.view;
  if (parts[0].o.rank() == 4 && parts[0].lse.rank() == 2) {
    lse_view = WithLeadingAxis(lse_view);
    for (Part& part : parts) {
      if (part.lse.rank() == 2) part.lse = WithLeadingAxis(part.lse);
    }
  }
  Context& ctx = ThreadContext(0);
  Compute(kMergeOp, {}, [&] { Merge(ctx, parts, sinks, {o.view, lse_view}); });
  return nb::make_tuple(o.array, lse.array);
}

constexpr char kPython[] =
    "\n\nIn Python. Every argument but q, k, v is by keyword. Arrays are "
    "anything on the CPU with\n"
    "DLPack or the buffer protocol; vectors of lengths, slopes and sinks may "
    "be lists. An array\n"
    "whose last axis is not contiguous is copied (heed.explain says so), "
    "others are read in place.\n"
    "align is 'bottom_right', 'top_left' or query_starts; window is (left, "
    "right); segments is one\n"
    "array for both sides or a pair; precision is 'highest' or 'high'. Returns "
    "o, or (o, lse) with\n"
    "return_lse=True, as NumPy arrays; o is `out` where that is given. "
    "threads=None is\n"
    "heed.set_num_threads, else one per CPU that the process may use. Errors "
    "are\n"
    "heed.InvalidArgument (a ValueError) and heed.Unsupported (a "
    "RuntimeError).";

#define HEED_ARRAYS \
  "q: heed._typing.Array, k: heed._typing.Array, v: heed._typing.Array, *, "
constexpr char kSignature[] =
    "def attention(" HEED_ARRAYS
    "scale: float | None = None, causal: bool = False, align: "
    "heed._typing.Align = 'bottom_right', "
    "window: tuple[int, int] | None = None, sink_tokens: int = 0, "
    "prefix: heed._typing.Ints | None = None, chunk: int | None = None, "
    "segments: heed._typing.Segments | None = None, "
    "key_lengths: heed._typing.Ints | None = None, key_starts: "
    "heed._typing.Ints | None = None, "
    "query_lengths: heed._typing.Ints | None = None, mask: heed._typing.Array "
    "| None = None, "
    "bias: heed._typing.Array | None = None, alibi: heed._typing.Floats | None "
    "= None, "
    "softcap: float | None = None, sinks: heed._typing.Floats | None = None, "
    "dropout: float = 0.0, "
    "seed: int = 0, dropout_offset: int = 0, cu_seqlens_q: heed._typing.Ints | "
    "None = None, "
    "cu_seqlens_k: heed._typing.Ints | None = None, "
    "precision: typing.Literal['highest', 'high'] = 'highest', invariant: bool "
    "= False, "
    "return_lse: typing.Literal[False] = False, out: heed._typing.OutArray | "
    "None = None, "
    "threads: int | None = None) -> heed._typing.Result";
// The same options, for type checkers: they know the result by return_lse.
constexpr char kLseSignature[] =
    "def attention(" HEED_ARRAYS
    "return_lse: typing.Literal[True], **options: "
    "typing_extensions.Unpack[heed._typing.AttentionOptions]) "
    "-> tuple[heed._typing.Result, heed._typing.Result]";
constexpr char kMergeSignature[] =
    "def merge_attention(parts: "
    "collections.abc.Sequence[tuple[heed._typing.Array, "
    "heed._typing.Array]], *, sinks: heed._typing.Floats | None = None) "
    "-> tuple[heed._typing.Result, heed._typing.Result]";
#undef HEED_ARRAYS

}  // namespace

void Bind(nb::module_& m) {
  using namespace nanobind::literals;
  m.def("attention", &Attention, nb::sig(kSignature),
        (std::string(doc::kForward) + kPython).c_str());
  m.def("attention", &Attention, nb::sig(kLseSignature));
  m.def("merge_attention", &MergeAttention, "parts"_a.none(), nb::kw_only(),
        "sinks"_a = nb::none(), nb::sig(kMergeSignature), doc::kMerge);
  RegisterExplain(kOp, &ExplainAttention);
}

}  // namespace heed::attention

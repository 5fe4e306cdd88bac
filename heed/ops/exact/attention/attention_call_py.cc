// Keyword tables of every function with attention's arguments, and readers of the arguments that are not options.
#include "heed/ops/exact/attention/attention_call_py.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "heed/ops/exact/attention/attention_options_py.h"
#include "python/arguments.h"
#include "python/runtime.h"

namespace heed::attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

void ReadOut(Call& call, const Argument& a) {
  if (call.describe) return;
  call.out = a.value;
  call.out_view = call.arrays.Write(a, Kind::kFloat);
}

template <ConstTensorView Inputs::* kField>
void ReadInput(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}

template <ConstTensorView Call::* kField>
void ReadArray(Call& call, const Argument& a) {
  call.*kField = call.arrays.Read(a, Kind::kFloat);
}

template <ConstTensorView Call::* kField>
void ReadIndices(Call& call, const Argument& a) {
  call.*kField = call.arrays.ReadList(a, Kind::kInt);
}

constexpr Keyword<Call> kInputs[] = {
    {"q", false, &ReadInput<&Inputs::q>},
    {"k", false, &ReadInput<&Inputs::k>},
    {"v", false, &ReadInput<&Inputs::v>},
};
constexpr Keyword<Call> kResults[] = {
    {"return_lse", false, [](Call& c, const Argument& a) { c.return_lse = ToBool(a); }},
    {"out", true, &ReadOut},
};
constexpr Keyword<Call> kThreadsKeyword = {
    "threads", true, [](Call& c, const Argument& a) { c.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads)); }};

void ReadMethod(Call& call, const Argument& a) {
  using distributed::Method;
  const std::string name = ToChoice(a, {"auto", "all_gather", "ulysses", "ring"});
  call.divided.method = name == "auto"      ? Method::kAuto
                        : name == "ulysses" ? Method::kUlysses
                        : name == "ring"    ? Method::kRing
                                            : Method::kAllGather;
}
void ReadOrder(Call& call, const Argument& a) {
  const bool zigzag = ToChoice(a, {"contiguous", "zigzag"}) == "zigzag";
  call.divided.order = zigzag ? distributed::Order::kZigzag : distributed::Order::kContiguous;
}

// Keywords of calls whose tokens several processes hold.
constexpr Keyword<Call> kProcesses[] = {
    {"comm", true,
     [](Call& c, const Argument& a) {
       if (c.describe) Fail(a, "None: explain describes the call of one process");
       c.communicator.emplace(a);
     }},
    {"method", false, &ReadMethod},
    {"order", false, &ReadOrder},
};

void ReadReduce(Call& call, const Argument& a) {
  constexpr char kExpected[] = "'mean' or 'max'";
  const std::string name = ToString(a, kExpected);
  if (name != "mean" && name != "max") Fail(a, kExpected);
  call.reduce = name == "max" ? Reduce::kMax : Reduce::kMean;
}

// Keywords of the weights functions beside the options of attention.
constexpr Keyword<Call> kWeightsKeywords[] = {
    {"lse", true, &ReadArray<&Call::lse>},
    {"rows", true, &ReadIndices<&Call::rows>},
    {"heads", true, &ReadIndices<&Call::heads>},
    {"size", false,
     [](Call& c, const Argument& a) { std::tie(c.map_rows, c.map_columns) = ToPair(a, "rows", "columns", 1); }},
    {"reduce", false, &ReadReduce},
    {"tokens", true, [](Call& c, const Argument& a) { c.tokens = a.value; }},
};

// Arguments of attention_backward beside q, k, v and the options of attention: the first one, then those after v.
constexpr Keyword<Call> kGradientOfO = {"do", false, &ReadArray<&Call::d_o>};
constexpr Keyword<Call> kBackwardKeywords[] = {
    {"o", false, &ReadArray<&Call::o>},
    {"lse", false, &ReadArray<&Call::lse>},
    {"dlse", true, &ReadArray<&Call::d_lse>},
    {"need_dbias", false, [](Call& c, const Argument& a) { c.need_dbias = ToBool(a); }},
};

// Arguments of a cache's attend beside q and the options of attention.
constexpr Keyword<Call> kTree = {"tree", true, [](Call& c, const Argument& a) { c.tree = c.arrays.ReadPositions(a); }};

// Arguments of heed.torch's operators beside q, k, v and the options.
constexpr Keyword<Call> kTorchResults[] = {
    {"out", false, &ReadOut},
    {"lse", false, [](Call& c, const Argument& a) { c.out_lse = c.arrays.Write(a, Kind::kFloat); }},
};
constexpr Keyword<Call> kTorchIncoming[] = {
    {"the gradient of o", false, &ReadArray<&Call::d_o>},
    {"the gradient of lse", true, &ReadArray<&Call::d_lse>},
};
constexpr Keyword<Call> kHeadsFirst = {"heads_first", false,
                                       [](Call& c, const Argument& a) { c.heads_first = ToBool(a); }};

template <int64_t Tile::* kField>
void ReadPlace(Call& call, const Argument& a) {
  call.tile.*kField = ToInt(a, 0, INT64_MAX);
}

constexpr Keyword<Call> kTorchTile[] = {
    {"lse", false, &ReadArray<&Call::lse>},
    {"sequence", false, &ReadPlace<&Tile::sequence>},
    {"first_head", false, &ReadPlace<&Tile::first_head>},
    {"first_row", false, &ReadPlace<&Tile::first_row>},
    {"first_key", false, &ReadPlace<&Tile::first_key>},
    {"with_dropout", false, [](Call& c, const Argument& a) { c.tile.dropout = ToBool(a); }},
    {"out", false, &ReadOut},
};

void WriteGradient(Call& call, const Argument& a) {
  ForEachGradient({}, {}, [&](const char* name, TensorView Gradients::* gradient, auto, auto) {
    if (std::string_view(name) == a.name) call.gradients.*gradient = call.arrays.Write(a, Kind::kFloat);
  });
}

Table One(const Keyword<Call>& keyword) { return {&keyword, 1}; }

Keywords Of(const std::vector<OptionArgument>& options) {
  Keywords keywords;
  for (const OptionArgument& x : options) keywords.push_back(x.keyword);
  return keywords;
}

}  // namespace

uint64_t FreshSeed() {
  const auto bytes = nb::cast<nb::bytes>(nb::module_::import_("numpy").attr("random").attr("bytes")(sizeof(uint64_t)));
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

nb::object Results::Returned() const {
  if (!lse.is_valid()) return o;
  return nb::make_tuple(o, lse);
}

Results NewResults(const char* op, const Call& call, const ConstTensorView& q, int64_t value_channels) {
  Results r;
  if (call.out.is_valid()) {
    r.o = nb::borrow(call.out);
    r.views.o = call.out_view;
  } else {
    std::vector<int64_t> sizes(q.sizes().begin(), q.sizes().end());
    sizes.back() = value_channels;
    NewArray array(op, q.dtype(), sizes);
    r.o = std::move(array.array);
    r.views.o = array.view;
  }
  if (!call.return_lse) return r;
  const int heads = q.rank() - 2;
  std::vector<int64_t> sizes = {q.size(heads), q.size(heads - 1)};
  if (!call.options.cu_seqlens_q.present()) sizes.insert(sizes.begin(), q.size(0));
  NewArray array(op, q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, sizes);
  r.lse = std::move(array.array);
  r.views.lse = array.view;
  return r;
}

Keywords Joined(std::initializer_list<Table> parts) {
  Keywords keywords;
  for (const Table& part : parts) keywords.insert(keywords.end(), part.begin(), part.end());
  return keywords;
}

Table ResultKeywords() { return kResults; }
Table ThreadsKeyword() { return One(kThreadsKeyword); }
Table TorchResults() { return kTorchResults; }

std::pair<int64_t, int64_t> ToPair(const Argument& a, const char* first, const char* second, int64_t least) {
  const std::string expected =
      std::string("a pair (") + first + ", " + second + ") of ints of at least " + std::to_string(least);
  if (!PyTuple_Check(a.value.ptr()) && !PyList_Check(a.value.ptr())) Fail(a, expected);
  if (PyObject_Size(a.value.ptr()) != 2) Fail(a, expected);
  int64_t numbers[2];
  for (int i = 0; i < 2; ++i) {
    const std::string name = std::string(a.name) + "[" + std::to_string(i) + "]";
    numbers[i] = ToInt({a.operation, name.c_str(), a.value[i]}, least, INT64_MAX);
  }
  return {numbers[0], numbers[1]};
}

uint64_t ToSeedBits(Arrays& arrays, const Argument& a) {
  const ConstTensorView seed = arrays.Read(a, Kind::kInt);
  CheckOnCpu(a, seed);
  if (seed.num_elements() != 1 || seed.dtype() != DType::kI64) Fail(a, "an int64 tensor of one element");
  return static_cast<uint64_t>(*seed.as<int64_t>());
}

void ReadCall(const char* operation, PyObject* args, PyObject* kwargs, Call& call) {
  static const Keywords keywords = Joined({kInputs, Of(OptionKeywords()), kResults, kProcesses, One(kThreadsKeyword)});
  Read<Call>(operation, keywords, 3, args, kwargs, call);
}

void ReadWeightsCall(const char* operation, std::span<const char* const> more, PyObject* args, PyObject* kwargs,
                     Call& call) {
  Keywords keywords = Joined({std::span(kInputs).first(2), Of(OptionKeywords()), One(kThreadsKeyword)});
  for (const Keyword<Call>& keyword : kWeightsKeywords) {
    if (std::ranges::find(more, std::string_view(keyword.name)) != more.end()) keywords.push_back(keyword);
  }
  Read<Call>(operation, keywords, 2, args, kwargs, call);
  for (const auto& [name, x, shape] :
       {std::tuple{"q", call.in.q, "[B, T, Hq, D]"}, {"k", call.in.k, "[B, T, Hkv, D]"}}) {
    if (!x.present()) FailMissing(operation, name);
    if (x.rank() != 4) Fail(operation, name, "has shape " + x.ShapeString(), shape);
    if (!IsFloat(x.dtype())) {
      Fail(operation, name, std::string("has dtype ") + Name(x.dtype()), "f64, f32, bf16 or f16");
    }
  }
}

void ReadBackwardCall(const char* operation, PyObject* args, PyObject* kwargs, Call& call) {
  static const Keywords keywords =
      Joined({One(kGradientOfO), kInputs, kBackwardKeywords, Of(OptionKeywords()), kProcesses, One(kThreadsKeyword)});
  Read<Call>(operation, keywords, 6, args, kwargs, call);
}

void ReadAttendCall(const char* operation, AttendArguments which, PyObject* args, PyObject* kwargs, Call& call) {
  const auto make = [](bool needs_scale, bool for_torch) {
    Keywords keywords =
        Joined({std::span(kInputs).first(1), Of(OptionKeywords()), kResults, One(kThreadsKeyword), One(kTree),
                std::span(kProcesses).first(1), std::span(kTorchResults).last(for_torch ? 1 : 0)});
    for (Keyword<Call>& keyword : keywords) {
      const std::string_view name = keyword.name;
      if (name == "scale" && needs_scale) keyword.none_is_absent = false;
      if (name == "lse") keyword.none_is_absent = true;
    }
    return keywords;
  };
  static const Keywords tables[2][2] = {{make(false, false), make(false, true)}, {make(true, false), make(true, true)}};
  if (which.for_torch) call.arrays.AllowTorch();
  Read<Call>(operation, tables[which.needs_scale][which.for_torch], 1, args, kwargs, call);
}

void ReadTorchCall(const char* operation, PyObject* args, Call& call) {
  static const Keywords keywords =
      Joined({kInputs, kTorchResults, One(kHeadsFirst), Of(TorchOptions()), One(kThreadsKeyword)});
  call.arrays.AllowTorch();
  call.arrays.AllowDevices();
  Read<Call>(operation, keywords, keywords.size(), args, nullptr, call);
}

void ReadTorchBackwardCall(const char* operation, PyObject* args, Call& call) {
  static const Keywords keywords = [] {
    Keywords gradients;
    ForEachGradient({}, {},
                    [&](const char* name, auto, auto, auto) { gradients.push_back({name, true, &WriteGradient}); });
    return Joined({kTorchIncoming, kInputs, std::span(kBackwardKeywords).first(2), gradients, One(kHeadsFirst),
                   Of(TorchOptions()), One(kThreadsKeyword)});
  }();
  call.arrays.AllowTorch();
  call.arrays.AllowDevices();
  Read<Call>(operation, keywords, keywords.size(), args, nullptr, call);
}

void ReadTorchWeightsCall(const char* operation, PyObject* args, Call& call) {
  static const Keywords keywords =
      Joined({std::span(kInputs).first(2), kTorchTile, One(kHeadsFirst), Of(TorchOptions()), One(kThreadsKeyword)});
  call.arrays.AllowTorch();
  Read<Call>(operation, keywords, keywords.size(), args, nullptr, call);
}

void ReadProcesses(const char* operation, nb::handle comm, nb::handle method, nb::handle order, Call& call) {
  const nb::handle values[] = {comm, method, order};
  for (size_t i = 0; i < std::size(kProcesses); ++i) {
    kProcesses[i].read(call, {operation, kProcesses[i].name, values[i]});
  }
}

void CheckForResults(const char* operation, const Call& call) {
  const bool packed = call.options.cu_seqlens_q.present();
  const auto check = [&](const char* name, const ConstTensorView& x, const char* heads) {
    if (!x.present()) FailMissing(operation, name);
    if (x.rank() == 4 || (packed && x.rank() == 3)) return;
    Fail(operation, name, "has shape " + x.ShapeString(),
         std::string(packed ? "[T_total, " : "[B, T, ") + heads + (packed ? " (or with a leading 1)" : ""));
  };
  check("q", call.in.q, "Hq, D]");
  check("k", call.in.k, "Hkv, D]");
  check("v", call.in.v, "Hkv, Dv]");
  if (!IsFloat(call.in.q.dtype())) {
    Fail(operation, "q", std::string("has dtype ") + Name(call.in.q.dtype()), "f64, f32, bf16 or f16");
  }
}

}  // namespace heed::attention

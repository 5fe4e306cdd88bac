// heed.NSACache.
#include "heed/state/nsa_cache.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "docstrings/nsa.h"
#include "docstrings/nsa_attend.h"
#include "docstrings/nsa_cache.h"
#include "heed/core/fork_safe_mutex.h"
#include "heed/ops/sparse/nsa/nsa_attend.h"
#include "python/caches/kv_cache_py.h"
#include "python/caches/kv_cache_signature_py.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/torch_host.h"

namespace heed::python {
namespace {

using namespace nanobind::literals;

constexpr char kName[] = "NSACache";

// The cache, the selection of its rows, and its lock: a call that changes the cache runs alone, calls that only read it
// run together.
struct NSAOwner {
  NSACache cache;
  nsa::Options options;
  mutable ForkSafeMutex mutex;

  NSAOwner(NSACache&& given, const nsa::Options& what) : cache(std::move(given)), options(what) {}
};

struct InitCall {
  NSACache::Options cache;
  nsa::Options options;
};
template <int64_t NSACache::Options::* kField>
void ReadOfCache(InitCall& call, const Argument& a) {
  call.cache.*kField = ToInt(a, 1, INT64_MAX);
}
template <int64_t nsa::Options::* kField>
void ReadOption(InitCall& call, const Argument& a) {
  call.options.*kField = ToInt(a, 1, INT64_MAX);
}
constexpr Keyword<InitCall> kInit[] = {
    {"batch", false, &ReadOfCache<&NSACache::Options::batch>},
    {"heads", false, &ReadOfCache<&NSACache::Options::heads>},
    {"dim", false, &ReadOfCache<&NSACache::Options::dim>},
    {"value_dim", true, &ReadOfCache<&NSACache::Options::value_dim>},
    {"block", false, &ReadOption<&nsa::Options::block>},
    {"stride", true, &ReadOption<&nsa::Options::stride>},
    {"count", false, &ReadOption<&nsa::Options::count>},
    {"window", false, &ReadOption<&nsa::Options::window>},
    {"length", true, &ReadOption<&nsa::Options::length>},
    {"capacity", true, &ReadOfCache<&NSACache::Options::capacity>},
    {"page", false, [](InitCall& c, const Argument& a) { ReadPage(c.cache, a); }},
    {"dtype", false, [](InitCall& c, const Argument& a) { ReadDType(c.cache, a); }},
};

void Init(NSAOwner* self, const nb::args& args, const nb::kwargs& kwargs) {
  InitCall call;
  call.cache.batch = call.cache.heads = call.cache.dim = -1;
  Read<InitCall>(kName, kInit, 4, args.ptr(), kwargs.ptr(), call);
  for (const auto& [name, value] :
       {std::pair{"batch", call.cache.batch}, {"heads", call.cache.heads}, {"dim", call.cache.dim}}) {
    if (value == -1) FailMissing(kName, name);
  }
  CheckPage(kName, call.cache);
  nsa::Options& o = call.options;
  if (o.stride == 0) o.stride = o.block;
  if (o.length == 0) o.length = o.block;
  call.cache.stride = o.stride;
  call.cache.length = o.length;
  new (self) NSAOwner(NSACache(call.cache), o);
}

struct RowsCall {
  Arrays arrays;
  int64_t batch = 0;
  ConstTensorView k, v, k_cmp, v_cmp;
  std::vector<int64_t> lengths;
};
template <ConstTensorView RowsCall::* kField>
void ReadRowsOf(RowsCall& call, const Argument& a) {
  call.*kField = call.arrays.ReadInPlace(a, Kind::kFloat);
}
void ReadCompressed(RowsCall& call, const Argument& a) {
  if (!PySequence_Check(a.value.ptr()) || PySequence_Size(a.value.ptr()) != 2)
    Fail(a, "a pair (k_cmp, v_cmp), or None");
  const nb::object first = nb::steal(PySequence_GetItem(a.value.ptr(), 0)),
                   second = nb::steal(PySequence_GetItem(a.value.ptr(), 1));
  if (!first.is_valid() || !second.is_valid()) throw nb::python_error();
  call.k_cmp = call.arrays.ReadInPlace({a.operation, "compressed[0]", first}, Kind::kFloat);
  call.v_cmp = call.arrays.ReadInPlace({a.operation, "compressed[1]", second}, Kind::kFloat);
}
constexpr Keyword<RowsCall> kRows[] = {
    {"k", false, &ReadRowsOf<&RowsCall::k>},
    {"v", false, &ReadRowsOf<&RowsCall::v>},
    {"lengths", true,
     [](RowsCall& call, const Argument& a) { call.lengths = ReadPerSequence(call.arrays, a, call.batch); }},
    {"compressed", true, &ReadCompressed},
};

template <bool kOfTorch>
void Append(NSAOwner& self, const nb::args& args, const nb::kwargs& kwargs) {
  constexpr char kOp[] = "NSACache.append";
  RowsCall call;
  if (kOfTorch) call.arrays.AllowTorch();
  call.batch = self.cache.options().batch;
  Read<RowsCall>(kOp, kRows, 3, args.ptr(), kwargs.ptr(), call);
  if (!call.k.present()) FailMissing(kOp, "k");
  if (!call.v.present()) FailMissing(kOp, "v");
  Compute(kOp, [&] {
    const std::unique_lock lock(self.mutex);
    self.cache.Append(call.k, call.v, call.lengths, call.k_cmp, call.v_cmp);
  });
}

struct AttendCall {
  Arrays arrays;
  ConstTensorView q, gates;
  nsa::Options options;
  nb::handle out;
  TensorView o;
  int num_threads = 0;
};
constexpr Keyword<AttendCall> kAttend[] = {
    {"q", false, [](AttendCall& c, const Argument& a) { c.q = c.arrays.Read(a, Kind::kFloat); }},
    {"gates", false, [](AttendCall& c, const Argument& a) { c.gates = c.arrays.Read(a, Kind::kFloat); }},
    {"scale", true, [](AttendCall& c, const Argument& a) { c.options.scale = ToFinite(a); }},
    {"out", true, [](AttendCall& c, const Argument& a) { c.out = a.value, c.o = c.arrays.Write(a, Kind::kFloat); }},
    {"threads", true,
     [](AttendCall& c, const Argument& a) { c.num_threads = static_cast<int>(ToInt(a, 1, kMaxThreads)); }},
};

constexpr char kAttendOp[] = "NSACache.attend";

void ReadAttend(const NSAOwner& self, const nb::args& args, const nb::kwargs& kwargs, AttendCall& call) {
  call.options = self.options;
  Read<AttendCall>(kAttendOp, kAttend, 2, args.ptr(), kwargs.ptr(), call);
  if (!call.q.present()) FailMissing(kAttendOp, "q");
  if (!call.gates.present()) FailMissing(kAttendOp, "gates");
  if (call.q.rank() != 4) Fail(kAttendOp, "q", "has shape " + call.q.ShapeString(), "[batch, T, Hq, dim]");
}

void Run(Context& ctx, const NSAOwner& self, const AttendCall& call) {
  Compute(kAttendOp, [&] {
    const std::shared_lock lock(self.mutex);
    nsa::Attend(ctx, self.cache.view(), call.q, call.gates, call.options, call.o);
  });
}

nb::object Attend(const NSAOwner& self, const nb::args& args, const nb::kwargs& kwargs) {
  AttendCall call;
  ReadAttend(self, args, kwargs, call);
  nb::object o = nb::borrow(call.out);
  if (!o.is_valid()) {
    NewArray array(
        kAttendOp, self.cache.options().dtype,
        std::vector<int64_t>{call.q.size(0), call.q.size(1), call.q.size(2), self.cache.options().value_dim});
    call.o = array.view;
    o = std::move(array.array);
  }
  Run(ThreadContext(call.num_threads), self, call);
  return o;
}

// Writes the result to the tensor `out`.
void AttendOnTorch(const NSAOwner& self, const nb::args& args, const nb::kwargs& kwargs) {
  AttendCall call;
  call.arrays.AllowTorch();
  ReadAttend(self, args, kwargs, call);
  Run(TorchContext(call.num_threads), self, call);
}

nb::object Array(const char* op, std::span<const int64_t> values) {
  const int64_t size = std::ssize(values);
  NewArray array(op, DType::kI64, {&size, 1});
  std::ranges::copy(values, array.view.as<int64_t>());
  return array.array;
}
std::vector<int64_t> Copied(const NSAOwner& self, std::span<const int64_t> (NSACache::*numbers)() const) {
  const GilReleased released;
  const std::shared_lock lock(self.mutex);
  const auto values = (self.cache.*numbers)();
  return {values.begin(), values.end()};
}

void Trim(NSAOwner& self, nb::handle lengths) {
  constexpr char kOp[] = "NSACache.trim";
  Arrays arrays;
  const auto values = ReadPerSequence(arrays, {kOp, "lengths", lengths}, self.cache.options().batch);
  Compute(kOp, [&] {
    const std::unique_lock lock(self.mutex);
    self.cache.Trim(values);
  });
}

nb::object ForkNSAAs(const NSAOwner& self, nb::handle type) {
  CheckSubclass(kName, type, nb::type<NSAOwner>());
  const auto forked = [&] {
    const GilReleased released;
    const std::shared_lock lock(self.mutex);
    return self.cache.Fork();
  };
  nb::object fork = nb::inst_alloc(type);
  new (nb::inst_ptr<NSAOwner>(fork)) NSAOwner(forked(), self.options);
  nb::inst_mark_ready(fork);
  return fork;
}
nb::object ForkNSA(nb::handle_t<NSAOwner> self) { return ForkNSAAs(nb::cast<const NSAOwner&>(self), self.type()); }
nb::object DeepCopyNSA(nb::handle_t<NSAOwner> self, nb::handle) { return ForkNSA(self); }

int64_t NumBytes(const NSAOwner& self) {
  const GilReleased released;
  const std::shared_lock lock(self.mutex);
  return self.cache.nbytes();
}

nb::str Repr(nb::handle self) {
  static constexpr const char* kShown[] = {"batch", "heads", "dim", "value_dim", "dtype"};
  return CacheRepr(self, kShown, Copied(nb::cast<const NSAOwner&>(self), &NSACache::lengths));
}

// A property for one of the sizes.
template <int64_t NSACache::Options::* kField>
int64_t Size(const NSAOwner& self) {
  return self.cache.options().*kField;
}

constexpr Said kSaid[] = {
    {"block", "keys that are chosen together"},
    {"stride", "tokens between the beginnings of two windows; None: block"},
    {"count", "blocks that a row attends to; the three that are never left out count"},
    {"length", "tokens of a window that is compressed; None: block"},
    {"window", "last tokens that a row sees, itself included"},
    {"compressed",
     "(k_cmp, v_cmp), [batch, n, heads, dim] and [batch, n, heads, value_dim]: the compressed rows of the n windows "
     "that are "
     "now "
     "complete; None: their means"},
    {"gates", "[batch, T, Hq, 3]: of compressed, selected and windowed, multiplied as they are"},
};

constexpr Said kTrimmed[] = {{"lengths", "[batch]: tokens that each sequence keeps"}};

constexpr char kInPython[] = R"(
Threads of Python may share a cache: calls that change it wait for each other.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 100, 2, 8), np.float32)
  >>> gates = np.ones((1, 100, 2, 3), np.float32)
  >>> cache = heed.NSACache(1, 2, 8, block=8, count=4, window=16)
  >>> for t in range(100):
  ...     cache.append(k[:, t:t + 1], v[:, t:t + 1])
  ...     o = cache.attend(q[:, t:t + 1], gates[:, t:t + 1])
  >>> whole = heed.nsa(q, k, v, gates, block=8, count=4, window=16)
  >>> bool(np.allclose(o[:, 0], whole[:, -1], atol=1e-6))
  True)";

constexpr char kNSAInit[] =
    "def __init__(self, batch: int, heads: int, dim: int, value_dim: int | None = None, *, block: int = 64, stride: "
    "int | None = None, "
    "count: int = 16, window: int = 512, length: int | None = None, capacity: int | None = None, page: int | None = "
    "64, "
    "dtype: FloatName = 'f32') -> None";
constexpr char kNSAAppend[] =
    "def append(self, k: Array, v: Array, lengths: Ints | None = None, *, compressed: tuple[Array, Array] | None = "
    "None) -> None";
constexpr char kNSAAttend[] =
    "def attend(self, q: Array, gates: Array, *, scale: float | None = None, out: OutArray | None = None, threads: int "
    "| None = None) "
    "-> Result";

}  // namespace

void BindNSACache(nb::module_& m);
void BindNSACache(nb::module_& m) {
  nb::class_<NSAOwner>(m, kName, Docstring(doc::kNSACache, kNSAInit, {kSaid, kCacheArguments}, kInPython).c_str())
      .def("__init__", &Init, nb::sig(kNSAInit))
      .def("__repr__", &Repr)
      .def_prop_ro("batch", &Size<&NSACache::Options::batch>, "Sequences.")
      .def_prop_ro("heads", &Size<&NSACache::Options::heads>, "Heads of keys and values.")
      .def_prop_ro("dim", &Size<&NSACache::Options::dim>, "Channels of a key.")
      .def_prop_ro("value_dim", &Size<&NSACache::Options::value_dim>, "Channels of a value.")
      .def_prop_ro(
          "dtype", [](const NSAOwner& self) { return Name(self.cache.options().dtype); },
          "'f64', 'f32', 'bf16' or 'f16': of rows given, and of queries.")
      .def("append", &Append<false>, nb::sig(kNSAAppend),
           Docstring(doc::kNSACacheAppend, kNSAAppend, {kSaid, kCacheArguments}).c_str())
      .def("attend", &Attend, nb::sig(kNSAAttend),
           Docstring(nsa::doc::kAttend, kNSAAttend, {kSaid, kAttendArguments}, "Returns o, a NumPy array.").c_str())
      .def_prop_ro(
          "lengths", [](const NSAOwner& self) { return Array("NSACache.lengths", Copied(self, &NSACache::lengths)); },
          nb::sig(kLengthsSignature), "Tokens of each sequence, i64 [batch]: a copy.")
      .def_prop_ro(
          "appended",
          [](const NSAOwner& self) { return Array("NSACache.appended", Copied(self, &NSACache::appended)); },
          nb::sig(kAppendedSignature), "Tokens of these that the last append added, i64 [batch]: a copy.")
      .def_prop_ro("nbytes", &NumBytes, doc::kNSACacheNbytes)
      .def("trim", &Trim, "lengths"_a.none(), nb::sig(kTrimSignature),
           Docstring(doc::kNSACacheTrim, kTrimSignature, {kTrimmed}).c_str())
      .def("fork", &ForkNSA, nb::sig(kForkSignature), doc::kNSACacheFork)
      .def("__copy__", &ForkNSA)
      .def("__deepcopy__", &DeepCopyNSA)
      .def("_fork_as", &ForkNSAAs);
  m.def("_append_torch", &Append<true>);
  m.def("_attend_torch", &AttendOnTorch);
}

}  // namespace heed::python

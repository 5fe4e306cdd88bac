// heed.KVCacheBase: the common methods of all caches in Python, and heed.load_cache.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "docstrings/kv_cache.h"
#include "docstrings/kv_cache_base.h"
#include "heed/core/error.h"
#include "heed/ops/exact/attention/attend/attend_py.h"
#include "heed/ops/sparse/certified_attention/certified_attention_py.h"
#include "heed/mechanism/check_internal.h"
#include "heed/state/kv_cache.h"
#include "python/caches/kv_cache_py.h"
#include "heed/state/latent_kv_cache.h"
#include "heed/state/ring_kv_cache.h"
#include "python/caches/kv_cache_signature_py.h"
#include "python/numpy_array.h"

namespace heed::python {
namespace {

using namespace nanobind::literals;

constexpr Said kTrimArguments[] = {{"lengths", "[batch]: tokens that each sequence keeps"}};

constexpr int64_t kMostLengths = 8;  // in a repr

nb::object Array(const char* operation, const std::vector<int64_t>& values) {
  const int64_t size = static_cast<int64_t>(values.size());
  NewArray array(operation, DType::kI64, {&size, 1});
  std::copy(values.begin(), values.end(), array.view.as<int64_t>());
  return array.array;
}

std::vector<int64_t> LengthsOf(const CacheOwner& self) {
  return Looking(self, [&] {
    const auto lengths = self.base().lengths();
    return std::vector<int64_t>(lengths.begin(), lengths.end());
  });
}

nb::object Lengths(const CacheOwner& self) { return Array(self.Op("lengths").c_str(), LengthsOf(self)); }

nb::object Appended(const CacheOwner& self) {
  const std::vector<int64_t> appended = Looking(self, [&] {
    const auto values = self.base().appended();
    return std::vector<int64_t>(values.begin(), values.end());
  });
  return Array(self.Op("appended").c_str(), appended);
}

void Trim(CacheOwner& self, nb::handle lengths) {
  const std::string op = self.Op("trim");
  Arrays arrays;
  const auto values = ReadPerSequence(arrays, {op.c_str(), "lengths", lengths}, self.batch);
  Changing(op.c_str(), self, [&] { self.base().Trim(values); });
}

void Reorder(CacheOwner& self, nb::handle indices) {
  const std::string op = self.Op("reorder");
  Arrays arrays;
  const auto values = ReadPerSequence(arrays, {op.c_str(), "indices", indices}, self.batch);
  Changing(op.c_str(), self, [&] { self.base().Reorder(values); });
}

void Save(const CacheOwner& self, nb::handle path) {
  const std::string op = self.Op("save");
  const std::string file = ToPath({op.c_str(), "path", path});
  Compute(op.c_str(), [&] {
    const std::shared_lock lock(self.mutex);
    self.base().Save(file);
  });
}

// An object of the class with this name.
template <class Cache>
nb::object LoadAs(const char* class_name, const std::string& path, int64_t max_bytes) {
  const auto load = [&] {
    const GilReleased released;
    return Cache::Load(path, max_bytes);
  };
  return NewCache(nb::type<Owner<Cache>>(), class_name, load());
}

nb::object LoadCache(nb::handle path, nb::handle max_bytes) {
  constexpr char kOp[] = "load_cache";
  const std::string file = ToPath({kOp, "path", path});
  const int64_t most = max_bytes.is_none() ? -1 : ToInt({kOp, "max_bytes", max_bytes}, 0, INT64_MAX);
  const auto kind = [&] {
    const GilReleased released;
    return KindOfSavedCache(file);
  };
  switch (kind()) {
    case CacheKind::kRing: return LoadAs<RingKVCache>("RingKVCache", file, most);
    case CacheKind::kLatent: return LoadAs<LatentKVCache>("LatentKVCache", file, most);
    default: return LoadAs<KVCache>("KVCache", file, most);
  }
}

[[noreturn]] void RefusePickle(nb::handle self) {
  const std::string type = nb::cast<std::string>(nb::str(nb::type_name(self.type())));
  throw nb::type_error(("cannot pickle '" + type +
                        "' object: save(path) and "
                        "heed.load_cache(path) keep it in a file")
                           .c_str());
}

}  // namespace

std::vector<int64_t> ReadPerSequence(Arrays& arrays, const Argument& argument, int64_t batch) {
  const ConstTensorView view = arrays.ReadPositions(argument);
  if (view.rank() != 1 || view.size(0) != batch) {
    Fail(argument.operation, argument.name, "has shape " + view.ShapeString(),
         "[" + std::to_string(batch) + "], one per sequence");
  }
  if (view.dtype() != DType::kI64) {
    Fail(argument.operation, argument.name, std::string("has dtype ") + Name(view.dtype()), "i32 or i64");
  }
  mechanism::CheckReadable(argument.operation, argument.name, view);
  return {view.as<int64_t>(), view.as<int64_t>() + batch};
}

DType ToFloatDType(const Argument& argument) {
  constexpr char kExpected[] = "'f64', 'f32', 'bf16' or 'f16'";
  const std::string name = ToString(argument, kExpected);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    if (name == Name(dtype)) return dtype;
  }
  Fail(argument, kExpected);
}

std::string ToPath(const Argument& argument) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(argument.value.ptr(), &bytes) == 0) {
    PyErr_Clear();
    Fail(argument, "a path: str, bytes or os.PathLike");
  }
  const nb::object owner = nb::steal(bytes);
  return std::string(PyBytes_AsString(bytes), static_cast<size_t>(PyBytes_Size(bytes)));
}

nb::str CacheRepr(nb::handle self, std::span<const char* const> attributes) {
  return CacheRepr(self, attributes, LengthsOf(nb::cast<const CacheOwner&>(self)));
}

nb::str CacheRepr(nb::handle self, std::span<const char* const> attributes, std::span<const int64_t> lengths) {
  const nb::handle type = self.type();
  std::string text = "<" + nb::cast<std::string>(type.attr("__module__")) + "." +
                     nb::cast<std::string>(type.attr("__qualname__")) + ":";
  for (const char* name : attributes) {
    text += std::string(" ") + name + "=" + nb::cast<std::string>(nb::repr(nb::getattr(self, name))) + ",";
  }
  text += " lengths=[";
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (i != 0) text += ", ";
    if (static_cast<int64_t>(i) == kMostLengths) {
      text += "...";
      break;
    }
    text += std::to_string(lengths[i]);
  }
  return nb::str((text + "]>").c_str());
}

void BindKVCacheBase(nb::module_& m) {
  nb::class_<CacheOwner>(m, "KVCacheBase", doc::kKVCacheBase)
      .def_ro("batch", &CacheOwner::batch, "Sequences.")
      .def_ro("heads", &CacheOwner::heads, "Heads of keys and values.")
      .def_ro("dim", &CacheOwner::dim, "Channels of a key.")
      .def_ro("value_dim", &CacheOwner::value_dim, "Channels of a value.")
      .def_prop_ro(
          "dtype", [](const CacheOwner& self) { return Name(self.dtype); },
          "'f64', 'f32', 'bf16' or 'f16': of rows given, and of queries.")
      .def_prop_ro("lengths", &Lengths, nb::sig(kLengthsSignature),
                   "Tokens of each sequence, i64 [batch]: a copy, which does not change.")
      .def_prop_ro("appended", &Appended, nb::sig(kAppendedSignature),
                   "Tokens of these that the last append added, i64 [batch]: a copy.")
      .def_prop_ro(
          "nbytes", [](const CacheOwner& self) { return Looking(self, [&] { return self.base().nbytes(); }); },
          doc::kKVCacheBaseNbytes)
      .def("trim", &Trim, "lengths"_a.none(), nb::sig(kTrimSignature),
           Docstring(doc::kKVCacheBaseTrim, kTrimSignature, {kTrimArguments}).c_str())
      .def("reorder", &Reorder, "indices"_a.none(), nb::sig(kReorderSignature),
           Docstring(doc::kKVCacheBaseReorder, kReorderSignature, {kCacheArguments}).c_str())
      .def("save", &Save, "path"_a.none(), nb::sig(kSaveSignature),
           Docstring(doc::kKVCacheBaseSave, kSaveSignature, {kCacheArguments}).c_str())
      .def("__reduce__", &RefusePickle, nb::sig("def __reduce__(self) -> typing.NoReturn"));
  m.def("_attend_torch", &certified_attention::AttendOnTorch);
  m.def("load_cache", &LoadCache, "path"_a.none(), nb::kw_only(), "max_bytes"_a = nb::none(), nb::sig(kLoadSignature),
        Docstring(std::string("The cache in a file that save() of any cache has written, as an "
                              "object of its class.\n\n") +
                      doc::kKVCacheLoad,
                  kLoadSignature, {kCacheArguments}, "A FileError is heed.FileError, an OSError.")
            .c_str());
}

}  // namespace heed::python

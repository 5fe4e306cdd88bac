// Caches as Python objects, and the common parts of their bindings.
#ifndef PYTHON_CACHES_KV_CACHE_PY_H_
#define PYTHON_CACHES_KV_CACHE_PY_H_

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/fork_safe_mutex.h"
#include "heed/core/tensor.h"
#include "heed/state/kv_cache_base.h"
#include "heed/state/kv_view.h"
#include "python/arguments.h"
#include "python/positions.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"

namespace heed::python {

// A cache and its lock: a call that changes the cache runs alone, calls that only read it run together. The lock is
// taken without the GIL, and a thread that holds it never waits for the GIL.
class CacheOwner {
 public:
  CacheOwner(const CacheOwner&) = delete;
  CacheOwner& operator=(const CacheOwner&) = delete;
  virtual ~CacheOwner() = default;

  virtual KVCacheBase& base() = 0;
  const KVCacheBase& base() const { return const_cast<CacheOwner*>(this)->base(); }

  // "KVCache.append", for messages.
  std::string Op(const char* method) const { return name + std::string(".") + method; }

  mutable ForkSafeMutex mutex;
  const char* const name;                      // name of the class
  const int64_t batch, heads, dim, value_dim;  // sizes of the view that never change
  const DType dtype;

 protected:
  CacheOwner(const char* class_name, const KVView& view)
      : name(class_name), batch(view.batch), heads(view.heads), dim(view.dim), value_dim(view.value_dim),
        dtype(view.dtype) {}
};

template <class Cache>
class Owner final : public CacheOwner {
 public:
  Owner(const char* class_name, Cache&& given) : CacheOwner(class_name, given.view()), cache(std::move(given)) {}
  KVCacheBase& base() override { return cache; }

  Cache cache;
};

// Runs f() without the GIL while no other thread changes the cache.
template <class F>
auto Looking(const CacheOwner& owner, F&& f) {
  const GilReleased released;
  const std::shared_lock lock(owner.mutex);
  return f();
}

// Runs f() without the GIL while no other thread uses the cache; errors name `operation`.
template <class F>
void Changing(const char* operation, CacheOwner& owner, F&& f) {
  Compute(operation, [&] {
    const std::unique_lock lock(owner.mutex);
    f();
  });
}

// A new object of `type`, a Python class that is Owner<Cache>'s or extends it.
template <class Cache>
nanobind::object NewCache(nanobind::handle type, const char* class_name, Cache&& cache) {
  nanobind::object self = nanobind::inst_alloc(type);
  new (nanobind::inst_ptr<Owner<Cache>>(self)) Owner<Cache>(class_name, std::move(cache));
  nanobind::inst_mark_ready(self);
  return self;
}

// Reads lengths or indices, one per sequence. They are copied, since other threads may write to the array as soon as
// the GIL is released.
std::vector<int64_t> ReadPerSequence(Arrays& arrays, const Argument& argument, int64_t batch);

DType ToFloatDType(const Argument& argument);
std::string ToPath(const Argument& argument);

// "<heed.KVCache: batch=2, dtype='f32', lengths=[3, 5]>" with these attributes.
nanobind::str CacheRepr(nanobind::handle self, std::span<const char* const> attributes);
nanobind::str CacheRepr(nanobind::handle self, std::span<const char* const> attributes,
                        std::span<const int64_t> lengths);

// Common readers of cache options. -1 means that the option was not given.
template <class Options, int64_t Options::* kField>
void ReadSize(Options& options, const Argument& argument) {
  options.*kField = ToInt(argument, 1, INT64_MAX);
}

template <class Options>
void ReadPage(Options& options, const Argument& argument) {
  options.page = argument.value.is_none() ? 0 : ToInt(argument, 1, INT64_MAX);
}

template <class Options>
void ReadDType(Options& options, const Argument& argument) {
  options.dtype = ToFloatDType(argument);
}

// Skips the keyword `rotary`, which is read after the others.
template <class Options>
void LeaveRotary(Options&, const Argument&) {}

template <class Options>
void ReadRotary(const char* operation, const nanobind::kwargs& kwargs, Options& options) {
  if (!kwargs.contains("rotary") || nanobind::object(kwargs["rotary"]).is_none()) return;
  const nanobind::object value = kwargs["rotary"];
  const RotaryChoice choice = ToRotary({operation, "rotary", value}, options.dim);
  options.rotary = CacheRotary{choice.pairs, choice.options};
}

template <class Options>
void CheckPage(const char* class_name, const Options& options) {
  if (options.page != 0 || options.capacity != -1) return;
  Fail(class_name, "page", "is None without a capacity",
       "both, as a contiguous cache cannot grow, or a page of some tokens");
}

// Methods of all caches that make other caches. CheckSubclass throws InvalidArgument unless `type` is the cache's class
// or extends it.
inline void CheckSubclass(const char* class_name, nanobind::handle type, nanobind::handle of) {
  if (!PyType_Check(type.ptr()) ||
      !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()), reinterpret_cast<PyTypeObject*>(of.ptr()))) {
    Fail({class_name, "type", type}, "a subclass of the cache's");
  }
}

template <class Cache>
nanobind::object ForkAs(const Owner<Cache>& self, nanobind::handle type) {
  CheckSubclass(self.name, type, nanobind::type<Owner<Cache>>());
  return NewCache(type, self.name, Looking(self, [&] { return self.cache.Fork(); }));
}

template <class Cache>
nanobind::object Fork(nanobind::handle_t<Owner<Cache>> self) {
  return ForkAs<Cache>(nanobind::cast<const Owner<Cache>&>(self), self.type());
}

template <class Cache>
nanobind::object DeepCopy(nanobind::handle_t<Owner<Cache>> self, nanobind::handle) {
  return Fork<Cache>(self);
}

template <class Cache, class Class>
void BindForks(Class& bound, const char* signature, const char* doc) {
  bound.def("fork", &Fork<Cache>, nanobind::sig(signature), doc)
      .def("__copy__", &Fork<Cache>)
      .def("__deepcopy__", &DeepCopy<Cache>)
      .def("_fork_as", &ForkAs<Cache>);
}

template <class Cache>
nanobind::object Share(nanobind::handle prefix, nanobind::handle batch) {
  const nanobind::handle type = nanobind::type<Owner<Cache>>();
  const std::string name = nanobind::cast<std::string>(type.attr("__name__"));
  const std::string op = name + ".share";
  const Owner<Cache>* owner = nullptr;
  if (!nanobind::try_cast(prefix, owner, false) || owner == nullptr) {
    Fail({op.c_str(), "prefix_cache", prefix}, "a heed." + name);
  }
  const int64_t count = ToInt({op.c_str(), "batch", batch}, 1, INT64_MAX);
  std::optional<Cache> shared;
  Compute(op.c_str(), [&] {
    const std::shared_lock lock(owner->mutex);
    shared = Cache::Share(owner->cache, count);
  });
  return NewCache(prefix.type(), owner->name, std::move(*shared));
}

// The arguments of an append: k and v, or `rows` as k.
struct AppendCall {
  Arrays arrays;
  int64_t batch = 0;
  ConstTensorView k, v, log_decay;
  std::vector<int64_t> lengths;
};

template <ConstTensorView AppendCall::* kField>
void ReadRows(AppendCall& call, const Argument& argument) {
  call.*kField = call.arrays.ReadInPlace(argument, Kind::kFloat);
}

inline void ReadCounts(AppendCall& call, const Argument& argument) {
  call.lengths = ReadPerSequence(call.arrays, argument, call.batch);
}

// append(...): reads these arguments, among which rows are required and log decays are a keyword, and calls f(call)
// while no other thread uses the cache. Tensors from heed.torch are read without a capsule.
template <bool kOfTorch, class F>
void AppendRows(CacheOwner& self, std::span<const Keyword<AppendCall>> keywords, const nanobind::args& args,
                const nanobind::kwargs& kwargs, F&& f) {
  const std::string op = self.Op("append");
  AppendCall call;
  call.batch = self.batch;
  if (kOfTorch) call.arrays.AllowTorch();
  Read<AppendCall>(op.c_str(), keywords, std::min<size_t>(keywords.size(), 3), args.ptr(), kwargs.ptr(), call);
  if (!call.k.present()) FailMissing(op.c_str(), keywords[0].name);
  if (keywords.size() > 2 && !call.v.present()) FailMissing(op.c_str(), keywords[1].name);
  Changing(op.c_str(), self, [&] { f(call); });
}

// None for the number that means none.
inline nanobind::object Unless(int64_t none, int64_t value) {
  return value == none ? nanobind::none() : nanobind::object(nanobind::int_(value));
}

// Each function binds its class; the base class comes first.
void BindKVCacheBase(nanobind::module_& m);
void BindKVCache(nanobind::module_& m);
void BindRingKVCache(nanobind::module_& m);
void BindLatentKVCache(nanobind::module_& m);

}  // namespace heed::python

#endif  // PYTHON_CACHES_KV_CACHE_PY_H_

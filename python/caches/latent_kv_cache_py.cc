// heed.LatentKVCache.
#include "heed/state/latent_kv_cache.h"

#include <nanobind/nanobind.h>

#include <string>

#include "docstrings/kv_cache.h"
#include "docstrings/latent_kv_cache.h"
#include "heed/ops/exact/attention/attend/attend_py.h"
#include "python/caches/kv_cache_py.h"
#include "python/caches/kv_cache_signature_py.h"

namespace heed::python {
namespace {

using namespace nanobind::literals;

constexpr char kName[] = "LatentKVCache";

using Options = LatentKVCache::Options;
constexpr Keyword<Options> kOptions[] = {
    {"batch", false, &ReadSize<Options, &Options::batch>},
    {"latent", false, &ReadSize<Options, &Options::latent>},
    {"rope", false, [](Options& o, const Argument& a) { o.rope = ToInt(a, 0, INT64_MAX); }},
    {"capacity", true, &ReadSize<Options, &Options::capacity>},
    {"page", false, &ReadPage<Options>},
    {"dtype", false, &ReadDType<Options>},
};

void Init(Owner<LatentKVCache>* self, const nb::args& args, const nb::kwargs& kwargs) {
  Options options;
  options.batch = options.latent = options.rope = -1;
  Read<Options>(kName, kOptions, 3, args.ptr(), kwargs.ptr(), options);
  if (options.batch == -1) FailMissing(kName, "batch");
  if (options.latent == -1) FailMissing(kName, "latent");
  if (options.rope == -1) FailMissing(kName, "rope");
  CheckPage(kName, options);
  new (self) Owner<LatentKVCache>(kName, LatentKVCache(options));
}

constexpr Keyword<AppendCall> kRows[] = {
    {"rows", false, &ReadRows<&AppendCall::k>},
    {"lengths", true, &ReadCounts},
};

template <bool kOfTorch>
void Append(Owner<LatentKVCache>& self, const nb::args& args, const nb::kwargs& kwargs) {
  AppendRows<kOfTorch>(self, kRows, args, kwargs,
                       [&](const AppendCall& call) { self.cache.Append(call.k, call.lengths); });
}

nb::str Repr(nb::handle self) {
  static constexpr const char* kShown[] = {"batch", "latent", "rope", "capacity", "page", "dtype"};
  return CacheRepr(self, kShown);
}

}  // namespace

void BindLatentKVCache(nb::module_& m) {
  nb::class_<Owner<LatentKVCache>, CacheOwner> c(
      m, kName,
      Docstring(doc::kLatentKVCache, kLatentInitSignature, {kCacheArguments},
                JoinedText({kCacheInPython, R"(  >>> cache = heed.LatentKVCache(2, 16, 4)
  >>> cache.append(rng.standard_normal((2, 5, 20), np.float32))
  >>> q = rng.standard_normal((2, 5, 3, 20), np.float32)
  >>> cache.attend(q, scale=0.2).shape
  (2, 5, 3, 16))"}))
          .c_str());
  c.def("__init__", &Init, nb::sig(kLatentInitSignature))
      .def("__repr__", &Repr)
      .def("append", &Append<false>, nb::sig(kLatentAppendSignature),
           Docstring(doc::kLatentKVCacheAppend, kLatentAppendSignature, {kCacheArguments}).c_str())
      .def_prop_ro(
          "latent", [](const Owner<LatentKVCache>& self) { return self.cache.options().latent; },
          "Elements of a row that are the token's value too.")
      .def_prop_ro(
          "rope", [](const Owner<LatentKVCache>& self) { return self.cache.options().rope; },
          "Elements of a row that only its key has.")
      .def_prop_ro(
          "capacity", [](const Owner<LatentKVCache>& self) { return Unless(-1, self.cache.options().capacity); },
          nb::sig("def capacity(self) -> int | None"), kCapacityDoc)
      .def_prop_ro(
          "page", [](const Owner<LatentKVCache>& self) { return Unless(0, self.cache.options().page); },
          nb::sig("def page(self) -> int | None"), kPageDoc)
      .def_prop_ro(
          "shared_prefix",
          [](const Owner<LatentKVCache>& self) { return Looking(self, [&] { return self.cache.shared_prefix(); }); },
          doc::kKVCacheSharedPrefix)
      .def_static("share", &Share<LatentKVCache>, "prefix_cache"_a.none(), "batch"_a.none(),
                  nb::sig(kLatentShareSignature),
                  Docstring(doc::kKVCacheShare, kLatentShareSignature, {kCacheArguments}).c_str());
  attention::DefineAttend(c, kLatentAttendSignature, kLatentAttendLseSignature);
  m.def("_append_torch", &Append<true>);
  BindForks<LatentKVCache>(c, kForkSignature, doc::kKVCacheFork);
}

}  // namespace heed::python

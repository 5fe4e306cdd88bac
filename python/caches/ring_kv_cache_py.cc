// heed.RingKVCache.
#include "heed/state/ring_kv_cache.h"

#include <nanobind/nanobind.h>

#include <string>

#include "docstrings/ring_kv_cache.h"
#include "heed/ops/exact/attention/attend/attend_py.h"
#include "python/caches/kv_cache_py.h"
#include "python/caches/kv_cache_signature_py.h"

namespace heed::python {
namespace {

constexpr char kName[] = "RingKVCache";

using Options = RingKVCache::Options;
void ReadPositions(Options& options, const Argument& a) {
  constexpr char kExpected[] = "'absolute' or 'cache'";
  const std::string name = ToString(a, kExpected);
  if (name != "absolute" && name != "cache") Fail(a, kExpected);
  options.positions = name == "cache" ? RingPositions::kCache : RingPositions::kAbsolute;
}

constexpr Keyword<Options> kOptions[] = {
    {"batch", false, &ReadSize<Options, &Options::batch>},
    {"heads", false, &ReadSize<Options, &Options::heads>},
    {"dim", false, &ReadSize<Options, &Options::dim>},
    {"value_dim", true, &ReadSize<Options, &Options::value_dim>},
    {"window", false, &ReadSize<Options, &Options::window>},
    {"sink_tokens", false, [](Options& o, const Argument& a) { o.sink_tokens = ToInt(a, 0, INT64_MAX); }},
    {"dtype", false, &ReadDType<Options>},
    {"rotary", true, &LeaveRotary<Options>},
    {"positions", false, &ReadPositions},
};

void Init(Owner<RingKVCache>* self, const nb::args& args, const nb::kwargs& kwargs) {
  Options options;
  options.batch = options.heads = options.dim = options.window = -1;
  Read<Options>(kName, kOptions, 4, args.ptr(), kwargs.ptr(), options);
  if (options.batch == -1) FailMissing(kName, "batch");
  if (options.heads == -1) FailMissing(kName, "heads");
  if (options.dim == -1) FailMissing(kName, "dim");
  if (options.window == -1) FailMissing(kName, "window");
  ReadRotary(kName, kwargs, options);
  new (self) Owner<RingKVCache>(kName, RingKVCache(options));
}

constexpr Keyword<AppendCall> kRows[] = {
    {"k", false, &ReadRows<&AppendCall::k>},
    {"v", false, &ReadRows<&AppendCall::v>},
    {"lengths", true, &ReadCounts},
};

template <bool kOfTorch>
void Append(Owner<RingKVCache>& self, const nb::args& args, const nb::kwargs& kwargs) {
  AppendRows<kOfTorch>(self, kRows, args, kwargs,
                       [&](const AppendCall& call) { self.cache.Append(call.k, call.v, call.lengths); });
}

nb::str Repr(nb::handle self) {
  static constexpr const char* kShown[] = {"batch",       "heads", "dim",    "value_dim", "window",
                                           "sink_tokens", "dtype", "rotary", "positions"};
  const auto& cache = nb::cast<const Owner<RingKVCache>&>(self).cache;
  return CacheRepr(self, std::span(kShown).first(cache.options().rotary ? 9 : 7));
}

}  // namespace

void BindRingKVCache(nb::module_& m) {
  nb::class_<Owner<RingKVCache>, CacheOwner> c(
      m, kName,
      Docstring(doc::kRingKVCache, kRingInitSignature, {kCacheArguments},
                JoinedText({kCacheInPython, "  >>> cache = heed.RingKVCache(2, 4, 16, window=3)\n", kRowsOfExample}))
          .c_str());
  c.def("__init__", &Init, nb::sig(kRingInitSignature))
      .def("__repr__", &Repr)
      .def("append", &Append<false>, nb::sig(kRingAppendSignature),
           Docstring(doc::kRingKVCacheAppend, kRingAppendSignature, {kCacheArguments}).c_str())
      .def_prop_ro(
          "window", [](const Owner<RingKVCache>& self) { return self.cache.options().window; },
          "Tokens that a row sees, itself included.")
      .def_prop_ro(
          "sink_tokens", [](const Owner<RingKVCache>& self) { return self.cache.options().sink_tokens; },
          "First tokens, which are always kept.")
      .def_prop_ro(
          "rotary", [](const Owner<RingKVCache>& self) { return self.cache.options().rotary.has_value(); }, kRotaryDoc)
      .def_prop_ro(
          "positions",
          [](const Owner<RingKVCache>& self) {
            const bool own = self.cache.options().positions == RingPositions::kCache;
            return own ? "cache" : "absolute";
          },
          "Positions for the rotation of rows: 'absolute' or 'cache'.");
  attention::DefineAttend(c, kAttendSignature, kAttendLseSignature);
  m.def("_append_torch", &Append<true>);
  BindForks<RingKVCache>(c, kForkSignature, doc::kRingKVCacheFork);
}

}  // namespace heed::python

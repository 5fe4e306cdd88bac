// heed.KVCache.
#include "heed/state/kv_cache.h"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "docstrings/kv_cache.h"
#include "heed/ops/exact/attention/attend/attend_py.h"
#include "heed/ops/sparse/certified_attention/certified_attention_py.h"
#include "python/caches/kv_cache_py.h"
#include "python/caches/kv_cache_signature_py.h"

namespace heed::python {
namespace {

using namespace nanobind::literals;

constexpr char kName[] = "KVCache";
constexpr char kImportOp[] = "KVCache.import_pages";
constexpr Said kPools[] = {
    {"k_pool", "[pages, tokens, heads, dim]: pages of keys, any strides"},
    {"v_pool", "[pages, tokens, heads, value_dim]: pages of values"},
    {"indptr",
     "[batch + 1]: where the pages of each sequence begin in indices; from 0 on, not "
     "decreasing"},
    {"indices", "[indptr[batch] or more]: pages of the pools"},
    {"last_page_len", "[batch]: tokens of each sequence's last page, at least 1"},
    {"heads_first", "whether the pools are [pages, heads, tokens, dim]"},
};

void ReadQuantize(KVCache::Options& options, const Argument& a) {
  constexpr char kExpected[] = "None or 'int8'";
  if (ToString(a, kExpected) != "int8") Fail(a, kExpected);
  options.quantize = Quantize::kInt8;
}

void ReadSketch(KVCache::Options& options, const Argument& a) {
  constexpr char kExpected[] = "None or 'int8'";
  if (ToString(a, kExpected) != "int8") Fail(a, kExpected);
  options.sketch = Sketch::kInt8;
}

using Options = KVCache::Options;
constexpr Keyword<Options> kOptions[] = {
    {"batch", false, &ReadSize<Options, &Options::batch>},
    {"heads", false, &ReadSize<Options, &Options::heads>},
    {"dim", false, &ReadSize<Options, &Options::dim>},
    {"value_dim", true, &ReadSize<Options, &Options::value_dim>},
    {"capacity", true, &ReadSize<Options, &Options::capacity>},
    {"page", false, &ReadPage<Options>},
    {"dtype", false, &ReadDType<Options>},
    {"quantize", true, &ReadQuantize},
    {"rotary", true, &LeaveRotary<Options>},
    {"log_decay_heads", true, &ReadSize<Options, &Options::log_decay_heads>},
    {"sketch", true, &ReadSketch},
};

void Init(Owner<KVCache>* self, const nb::args& args, const nb::kwargs& kwargs) {
  Options options;
  options.batch = options.heads = options.dim = -1;
  Read<Options>(kName, kOptions, 4, args.ptr(), kwargs.ptr(), options);
  if (options.batch == -1) FailMissing(kName, "batch");
  if (options.heads == -1) FailMissing(kName, "heads");
  if (options.dim == -1) FailMissing(kName, "dim");
  CheckPage(kName, options);
  ReadRotary(kName, kwargs, options);
  new (self) Owner<KVCache>(kName, KVCache(options));
}

constexpr Keyword<AppendCall> kRows[] = {
    {"k", false, &ReadRows<&AppendCall::k>},
    {"v", false, &ReadRows<&AppendCall::v>},
    {"lengths", true, &ReadCounts},
    {"log_decay", true, &ReadRows<&AppendCall::log_decay>},
};

template <bool kOfTorch>
void Append(Owner<KVCache>& self, const nb::args& args, const nb::kwargs& kwargs) {
  AppendRows<kOfTorch>(self, kRows, args, kwargs, [&](const AppendCall& call) {
    self.cache.Append(call.k, call.v, call.lengths, call.log_decay);
  });
}

// The arguments of import_pages.
struct ImportCall {
  Arrays arrays;
  KVCache::BlockTables tables;
  Options options;
};

template <ConstTensorView KVCache::BlockTables::* kField>
void ReadPool(ImportCall& call, const Argument& a) {
  call.tables.*kField = call.arrays.ReadInPlace(a, Kind::kFloat);
}

template <ConstTensorView KVCache::BlockTables::* kField>
void ReadTable(ImportCall& call, const Argument& a) {
  call.tables.*kField = call.arrays.ReadList(a, Kind::kInt);
}

using Tables = KVCache::BlockTables;
constexpr Keyword<ImportCall> kImport[] = {
    {"k_pool", false, &ReadPool<&Tables::k_pool>},
    {"v_pool", false, &ReadPool<&Tables::v_pool>},
    {"indptr", false, &ReadTable<&Tables::indptr>},
    {"indices", false, &ReadTable<&Tables::indices>},
    {"last_page_len", false, &ReadTable<&Tables::last_page_len>},
    {"heads_first", false, [](ImportCall& c, const Argument& a) { c.tables.heads_first = ToBool(a); }},
    {"capacity", true, [](ImportCall& c, const Argument& a) { ReadSize<Options, &Options::capacity>(c.options, a); }},
    {"page", false, [](ImportCall& c, const Argument& a) { ReadPage(c.options, a); }},
    {"quantize", true, [](ImportCall& c, const Argument& a) { ReadQuantize(c.options, a); }},
    {"sketch", true, [](ImportCall& c, const Argument& a) { ReadSketch(c.options, a); }},
    {"rotary", true, &LeaveRotary<ImportCall>},
};

// The sizes of the cache follow from those of the arrays.
nb::object ImportPages(const nb::args& args, const nb::kwargs& kwargs) {
  ImportCall call;
  Read<ImportCall>(kImportOp, kImport, 5, args.ptr(), kwargs.ptr(), call);
  const Tables& tables = call.tables;
  const auto required = [](const char* name, const ConstTensorView& view) {
    if (!view.present()) FailMissing(kImportOp, name);
  };
  required("k_pool", tables.k_pool);
  required("v_pool", tables.v_pool);
  required("indptr", tables.indptr);
  required("indices", tables.indices);
  required("last_page_len", tables.last_page_len);
  for (const auto& [name, pool] : {std::pair{"k_pool", tables.k_pool}, std::pair{"v_pool", tables.v_pool}}) {
    if (pool.rank() != 4) {
      Fail(kImportOp, name, "has shape " + pool.ShapeString(),
           tables.heads_first ? "[pages, H, tokens, D]" : "[pages, tokens, H, D]");
    }
    if (!IsFloat(pool.dtype())) {
      Fail(kImportOp, name, std::string("has dtype ") + Name(pool.dtype()), "f64, f32, bf16 or f16");
    }
  }
  if (tables.indptr.rank() != 1 || tables.indptr.size(0) < 2) {
    Fail(kImportOp, "indptr", "has shape " + tables.indptr.ShapeString(), "[B + 1]");
  }
  Options& options = call.options;
  options.batch = tables.indptr.size(0) - 1;
  options.heads = tables.k_pool.size(tables.heads_first ? 1 : 2);
  options.dim = tables.k_pool.size(3);
  options.value_dim = tables.v_pool.size(3);
  options.dtype = tables.k_pool.dtype();
  CheckPage(kImportOp, options);
  ReadRotary(kImportOp, kwargs, options);
  std::optional<KVCache> cache;
  Compute(kImportOp, [&] { cache = KVCache::Import(options, tables); });
  return NewCache(nb::type<Owner<KVCache>>(), kName, std::move(*cache));
}

nb::str Repr(nb::handle self) {
  std::vector<const char*> shown = {"batch", "heads", "dim", "value_dim", "capacity", "page", "dtype", "quantize"};
  const Options options = nb::cast<const Owner<KVCache>&>(self).cache.options();
  if (options.rotary) shown.push_back("rotary");
  if (options.log_decay_heads > 0) shown.push_back("log_decay_heads");
  if (options.sketch != Sketch::kNone) shown.push_back("sketch");
  return CacheRepr(self, shown);
}

}  // namespace

void BindKVCache(nb::module_& m) {
  nb::class_<Owner<KVCache>, CacheOwner> c(
      m, kName,
      Docstring(
          doc::kKVCache, kInitSignature, {kCacheArguments},
          JoinedText({kCacheInPython, "  >>> cache = heed.KVCache(2, 4, 16, quantize=\"int8\")\n", kRowsOfExample}))
          .c_str());
  c.def("__init__", &Init, nb::sig(kInitSignature))
      .def("__repr__", &Repr)
      .def("append", &Append<false>, nb::sig(kAppendSignature),
           Docstring(doc::kKVCacheAppend, kAppendSignature, {kCacheArguments}).c_str())
      .def_prop_ro(
          "capacity", [](const Owner<KVCache>& self) { return Unless(-1, self.cache.options().capacity); },
          nb::sig("def capacity(self) -> int | None"), kCapacityDoc)
      .def_prop_ro(
          "page", [](const Owner<KVCache>& self) { return Unless(0, self.cache.options().page); },
          nb::sig("def page(self) -> int | None"), kPageDoc)
      .def_prop_ro(
          "quantize",
          [](const Owner<KVCache>& self) {
            const bool none = self.cache.options().quantize == Quantize::kNone;
            return none ? nb::none() : nb::object(nb::str("int8"));
          },
          nb::sig("def quantize(self) -> str | None"), "None or 'int8'.")
      .def_prop_ro(
          "rotary", [](const Owner<KVCache>& self) { return self.cache.options().rotary.has_value(); }, kRotaryDoc)
      .def_prop_ro(
          "log_decay_heads", [](const Owner<KVCache>& self) { return Unless(0, self.cache.options().log_decay_heads); },
          nb::sig("def log_decay_heads(self) -> int | None"), kLogDecayHeadsDoc)
      .def_prop_ro(
          "sketch",
          [](const Owner<KVCache>& self) {
            const bool none = self.cache.options().sketch == Sketch::kNone;
            return none ? nb::none() : nb::object(nb::str("int8"));
          },
          nb::sig("def sketch(self) -> str | None"), kSketchDoc)
      .def_prop_ro(
          "shared_prefix",
          [](const Owner<KVCache>& self) { return Looking(self, [&] { return self.cache.shared_prefix(); }); },
          doc::kKVCacheSharedPrefix)
      .def(
          "quantization_bound", &attention::BoundOn, nb::sig(attention::SpelledForCache(kBoundSignature)),
          Docstring(attention::doc::kQuantizationBound, kBoundSignature, {kAttendArguments}, "Returns (logit, output).")
              .c_str())
      .def_static("share", &Share<KVCache>, "prefix_cache"_a.none(), "batch"_a.none(), nb::sig(kShareSignature),
                  Docstring(doc::kKVCacheShare, kShareSignature, {kCacheArguments}).c_str())
      .def_static("import_pages", &ImportPages, nb::sig(kImportSignature),
                  Docstring(doc::kKVCacheImport, kImportSignature, {kPools, kCacheArguments},
                            "Tables may be lists. The new cache's sizes and dtype are those of the "
                            "arrays.")
                      .c_str());
  certified_attention::DefineAttend(c);
  m.def("_append_torch", &Append<true>);
  BindForks<KVCache>(c, kForkSignature, doc::kKVCacheFork);
}

}  // namespace heed::python

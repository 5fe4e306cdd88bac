// The functions behind heed.select.
#include "heed/ops/sparse/select/select.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <shared_mutex>
#include <string>

#include "python/arguments.h"
#include "python/caches/kv_cache_py.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::select {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

// Reads the arguments of one call, in the order of heed.select's functions, and computes it on PyTorch's threads if the
// tensors are PyTorch's.
class Reader {
 public:
  Reader(const char* op, const nb::args& args) : op_(op), args_(args) { arrays_.AllowTorch(); }

  ConstTensorView Array(const char* name) { return Read(Next(name)); }

  // Reads the keys, or a cache that has them.
  void ReadKeys() {
    const Argument a = Next("k");
    if (!nb::try_cast(a.value, cache_) || cache_ == nullptr) keys_ = Read(a);
  }
  int64_t Int(const char* name) { return ToInt(Next(name), INT64_MIN, INT64_MAX); }
  std::optional<int64_t> OptionalInt(const char* name) {
    const Argument a = Next(name);
    return a.value.is_none() ? std::nullopt : std::optional(ToInt(a, INT64_MIN, INT64_MAX));
  }
  double Number(const char* name) { return ToFinite(Next(name)); }
  bool Bool(const char* name) { return ToBool(Next(name)); }
  bool IsSecond(const char* name, const char* first, const char* second) {
    return ToChoice(Next(name), {first, second}) == second;
  }

  void ReadBlocks(BlockOptions& o) {
    o.block = Int("block");
    o.causal = Bool("causal");
    o.sinks = Int("sinks");
    o.local = Int("local");
    o.share = IsSecond("share", "group", "head") ? Share::kHead : Share::kGroup;
    ReadAlign(o);
    o.key_lengths = Ints("key_lengths");
    o.key_starts = Ints("key_starts");
  }

  // Reads the last argument and calls f(context, keys), where keys are a tensor or the view of a cache.
  template <class F>
  Pattern RunOnKeys(const F& f) {
    return Run([&](Context& ctx) {
      if (cache_ == nullptr) return f(ctx, keys_);
      const std::shared_lock lock(cache_->mutex);
      return f(ctx, cache_->base().view());
    });
  }

  // Reads the last argument and calls f(context).
  template <class F>
  Pattern Run(const F& f) {
    const Argument a = Next("threads");
    const int threads = a.value.is_none() ? 0 : static_cast<int>(ToInt(a, 1, kMaxThreads));
    Context& ctx = of_torch_ ? TorchContext(threads) : ThreadContext(threads);
    Pattern pattern;
    Compute(op_, [&] { pattern = f(ctx); });
    return pattern;
  }

 private:
  ConstTensorView Read(const Argument& a) {
    ArrayLayout layout;
    of_torch_ = of_torch_ || ImportTorch(a, layout);
    return arrays_.Read(a, Kind::kFloat);
  }

  Argument Next(const char* name) { return {op_, name, args_[at_++]}; }

  ConstTensorView Ints(const char* name) {
    const Argument a = Next(name);
    return a.value.is_none() ? ConstTensorView() : arrays_.ReadList(a, Kind::kInt);
  }

  void ReadAlign(BlockOptions& o) {
    constexpr char kExpected[] = "'bottom_right', 'top_left' or an int array [B]";
    const Argument a = Next("align");
    if (!PyUnicode_Check(a.value.ptr())) {
      if (PyLong_Check(a.value.ptr()) || a.value.is_none()) Fail(a, kExpected);
      o.query_starts = arrays_.ReadPositions(a);
      return;
    }
    const std::string where = ToString(a, kExpected);
    if (where != "bottom_right" && where != "top_left") Fail(a, kExpected);
    o.align = where == "top_left" ? attention::Align::kTopLeft : attention::Align::kBottomRight;
  }

  const char* op_;
  const nb::args& args_;
  size_t at_ = 0;
  Arrays arrays_;
  ConstTensorView keys_;
  const CacheOwner* cache_ = nullptr;
  bool of_torch_ = false;
};

Pattern SelectTopBlocks(const nb::args& args) {
  Reader reader("top_blocks", args);
  TopBlocksOptions options;
  const ConstTensorView q = reader.Array("q");
  reader.ReadKeys();
  options.count = reader.Int("count");
  options.score = reader.IsSecond("score", "mean", "box") ? Score::kBox : Score::kMean;
  reader.ReadBlocks(options);
  return reader.RunOnKeys([&](Context& ctx, const auto& keys) { return TopBlocks(ctx, q, keys, options); });
}

Pattern SelectCumulative(const nb::args& args) {
  Reader reader("cumulative", args);
  CumulativeOptions options;
  const ConstTensorView q = reader.Array("q");
  reader.ReadKeys();
  options.mass = reader.Number("mass");
  reader.ReadBlocks(options);
  return reader.RunOnKeys([&](Context& ctx, const auto& keys) { return Cumulative(ctx, q, keys, options); });
}

Pattern SelectVerticalSlash(const nb::args& args) {
  Reader reader("vertical_slash", args);
  VerticalSlashOptions options;
  const ConstTensorView q = reader.Array("q"), k = reader.Array("k");
  options.verticals = reader.Int("verticals");
  options.slashes = reader.Int("slashes");
  options.last = reader.Int("last");
  options.sinks = reader.Int("sinks");
  options.local = reader.Int("local");
  return reader.Run([&](Context& ctx) { return VerticalSlash(ctx, q, k, options); });
}

Pattern SelectIndexer(const nb::args& args) {
  Reader reader("indexer", args);
  IndexerOptions options;
  const ConstTensorView q = reader.Array("q_index"), k = reader.Array("k_index"), weights = reader.Array("weights");
  options.count = reader.Int("count");
  options.causal = reader.Bool("causal");
  options.ratio = reader.Int("ratio");
  options.start = reader.OptionalInt("start");
  return reader.Run([&](Context& ctx) { return Indexer(ctx, q, k, weights, options); });
}

}  // namespace

void Bind(nb::module_& m) {
  m.def("_top_blocks", &SelectTopBlocks);
  m.def("_cumulative", &SelectCumulative);
  m.def("_vertical_slash", &SelectVerticalSlash);
  m.def("_indexer", &SelectIndexer);
}

}  // namespace heed::select

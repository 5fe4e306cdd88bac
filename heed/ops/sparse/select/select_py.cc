// The functions behind heed.select.
#include "heed/ops/sparse/select/select.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "python/arguments.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::select {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

constexpr Renamed kRenamed[] = {{"query_starts", "align"}};
constexpr Renamed kIndexerRenamed[] = {{"q", "q_index"}, {"k", "k_index"}};

// Reads the arguments of one call, in the order of the functions of heed.select, and computes on PyTorch's threads where its
// tensors are.
class Reader {
 public:
  Reader(const char* op, const nb::args& args) : op_(op), args_(args) { arrays_.AllowTorch(); }

  ConstTensorView Array(const char* name) {
    const Argument a = Next(name);
    ArrayLayout layout;
    of_torch_ = of_torch_ || ImportTorch(a, layout);
    return arrays_.Read(a, Kind::kFloat);
  }
  int64_t Int(const char* name) { return ToInt(Next(name), INT64_MIN, INT64_MAX); }
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

  // Reads the last argument, and calls f(context).
  template <class F>
  Pattern Run(const F& f, std::span<const Renamed> names = kRenamed) {
    const Argument a = Next("threads");
    const int threads = a.value.is_none() ? 0 : static_cast<int>(ToInt(a, 1, kMaxThreads));
    Context& ctx = of_torch_ ? TorchContext(threads) : ThreadContext(threads);
    Pattern pattern;
    Compute(op_, names, [&] { pattern = f(ctx); });
    return pattern;
  }

 private:
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
  bool of_torch_ = false;
};

Pattern SelectTopBlocks(const nb::args& args) {
  Reader reader("top_blocks", args);
  TopBlocksOptions options;
  const ConstTensorView q = reader.Array("q"), k = reader.Array("k");
  options.count = reader.Int("count");
  options.score = reader.IsSecond("score", "mean", "box") ? Score::kBox : Score::kMean;
  reader.ReadBlocks(options);
  return reader.Run([&](Context& ctx) { return TopBlocks(ctx, q, k, options); });
}

Pattern SelectCumulative(const nb::args& args) {
  Reader reader("cumulative", args);
  CumulativeOptions options;
  const ConstTensorView q = reader.Array("q"), k = reader.Array("k");
  options.mass = reader.Number("mass");
  reader.ReadBlocks(options);
  return reader.Run([&](Context& ctx) { return Cumulative(ctx, q, k, options); });
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
  return reader.Run([&](Context& ctx) { return Indexer(ctx, q, k, weights, options); }, kIndexerRenamed);
}

}  // namespace

void Bind(nb::module_& m) {
  m.def("_top_blocks", &SelectTopBlocks);
  m.def("_cumulative", &SelectCumulative);
  m.def("_vertical_slash", &SelectVerticalSlash);
  m.def("_indexer", &SelectIndexer);
}

}  // namespace heed::select

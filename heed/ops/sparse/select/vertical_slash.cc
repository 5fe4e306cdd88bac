// The selector of columns and diagonals: sums of the probabilities of the last queries, and the largest for each head.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/os.h"
#include "heed/engines/softmax/weights/weights.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/mechanism/check_internal.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/patterns/top_blocks_internal.h"
#include "heed/ops/sparse/select/select_internal.h"

namespace heed::select {
namespace {

using patterns::Table;

// Writes the best `count` of sums [0, n) to `to`, including the first `forced`, preceded by -1 for missing ones. `sums`
// are overwritten.
template <class T>
void Choose(const patterns::TopBlocks& top, T* sums, int64_t n, int64_t count, int64_t forced, std::span<int64_t> first,
            int32_t* chosen, std::span<int64_t> to) {
  const int64_t kept = std::min(forced, n);
  std::iota(first.begin(), first.begin() + kept, 0);
  int64_t found;
  if constexpr (sizeof(T) == sizeof(double)) {
    found = top.f64(sums, n, count - kept, first.first(static_cast<size_t>(kept)), chosen);
  } else {
    found = top.f32(sums, n, count - kept, first.first(static_cast<size_t>(kept)), chosen);
  }
  const auto absent = to.size() - static_cast<size_t>(found);
  std::fill_n(to.begin(), absent, -1);
  std::copy_n(chosen, found, to.begin() + static_cast<std::ptrdiff_t>(absent));
}

template <class T>
Pattern Chosen(Context& ctx, const softmax::Problem& p, const VerticalSlashOptions& options) {
  const int64_t Tq = p.sequences.empty() ? 0 : p.sequences[0].num_queries;
  const int64_t Tk = p.sequences.empty() ? 0 : p.sequences[0].num_keys;
  const int64_t B = std::ssize(p.sequences), H = p.query_heads, last = std::min(options.last, Tq);
  // Rows of sums are padded for vectors, and those of distances have margins. At least one row is allocated, so that it
  // has an address.
  const int64_t stride = patterns::ScoreRoom(Tk) + 2 * softmax::kSumsMargin;
  std::vector<T> keys(static_cast<size_t>(std::max<int64_t>(B * H, 1) * stride)), distances(keys.size());
  softmax::SumWeights(ctx, p, Tq - last, last, {keys.data(), distances.data() + softmax::kSumsMargin, stride});

  const auto table = [&](int64_t wanted, int64_t forced) {
    const int64_t width = std::min(std::max(wanted, forced), Tk);
    Table t = {{B, H, width}, {}};
    t.values.resize(static_cast<size_t>(B * H * width));
    return t;
  };
  Table columns = table(options.verticals, options.sinks), slashes = table(options.slashes, options.local);
  struct Scratch {
    int64_t* first;
    int32_t* chosen;
    int64_t bytes;
    Scratch(int64_t n, void* memory) {
      Carver carver(memory);
      carver.Next(first, n);
      carver.Next(chosen, patterns::ScoreRoom(n));
      bytes = carver.bytes();
    }
  };
  ctx.ReserveScratch(Scratch(Tk, nullptr).bytes);
  const patterns::TopBlocks top = patterns::TopBlocksFor(ctx);
  ctx.ParallelFor(2 * B * H, [&](int64_t task, int worker) {
    const Scratch scratch(Tk, ctx.Scratch(worker));
    const bool of_keys = task % 2 == 0;
    Table& to = of_keys ? columns : slashes;
    const auto width = static_cast<size_t>(to.size(2));
    T* sums = (of_keys ? keys.data() : distances.data() + softmax::kSumsMargin) + task / 2 * stride;
    Choose(top, sums, Tk, of_keys ? options.verticals : options.slashes, of_keys ? options.sinks : options.local,
           std::span(scratch.first, static_cast<size_t>(Tk)), scratch.chosen,
           std::span(to.values).subspan(static_cast<size_t>(task / 2) * width, width));
  });
  return patterns::VerticalSlash(std::move(columns), std::move(slashes));
}

}  // namespace

softmax::Problem Checked(const char* op, const ConstTensorView& q, const ConstTensorView& k,
                         const VerticalSlashOptions& options) {
  const struct {
    const char* name;
    int64_t size, least;
  } sizes[] = {{"verticals", options.verticals, 0},
               {"slashes", options.slashes, 0},
               {"last", options.last, 1},
               {"sinks", options.sinks, 0},
               {"local", options.local, 0}};
  for (const auto& [name, size, least] : sizes) {
    if (size < least) mechanism::Fail(op, name, "is " + std::to_string(size), std::to_string(least) + " or more");
  }
  attention::Options causal;
  causal.causal = true;
  softmax::Problem p = attention::CheckedProblem(op, {q, k, k}, causal, {}, attention::Use::kInputs);
  p.value_depth = 0;  // only the softmax weights are needed
  return p;
}

Pattern VerticalSlash(Context& ctx, const ConstTensorView& q, const ConstTensorView& k,
                      const VerticalSlashOptions& options) {
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  const softmax::Problem p = Checked("select::VerticalSlash", q, k, options);
  return p.dtype == DType::kF64 ? Chosen<double>(ctx, p, options) : Chosen<float>(ctx, p, options);
}

}  // namespace heed::select

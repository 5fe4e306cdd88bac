// nsa over a cache: attends to its windows as tensors, and to its tokens in place.
#include "heed/ops/sparse/nsa/nsa_attend.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/ops/sparse/nsa/nsa_internal.h"

namespace heed::nsa {
namespace {

using mechanism::Fail;

// Checks all arguments and returns the sizes for the selection. Throws InvalidArgument.
Shape CheckedShape(const char* op, const NSAView& cache, const ConstTensorView& q, const ConstTensorView& gates,
                   const Options& options, const TensorView& o) {
  CheckOptions(op, options);
  for (const auto& [name, given, own] :
       {std::tuple{"length", options.length, cache.length}, {"stride", options.stride, cache.stride}}) {
    if (given != 0 && given != own)
      Fail(op, name, "is " + std::to_string(given), std::to_string(own) + " as in the cache");
  }
  if (options.scale && !std::isfinite(*options.scale))
    Fail(op, "scale", "is " + mechanism::Text(*options.scale), "a finite number");
  const KVView& tokens = cache.tokens;
  const bool fits =
      q.rank() == 4 && q.size(0) == tokens.batch && q.size(2) % tokens.heads == 0 && q.size(3) == tokens.dim;
  const std::string expected = std::string("[") + std::to_string(tokens.batch) + ",T,H," + std::to_string(tokens.dim) +
                               "] with H a multiple of " + std::to_string(tokens.heads);
  if (!fits) Fail(op, "q", q.present() ? "has shape " + q.ShapeString() : "is absent", expected);
  mechanism::CheckTensor(op, "q", q, q.sizes(), tokens.dtype, true);
  Shape s;
  s.B = q.size(0);
  s.Tq = q.size(1);
  s.Hq = q.size(2);
  s.Hkv = tokens.heads;
  s.D = tokens.dim;
  s.Dv = tokens.value_dim;
  mechanism::CheckTensor(op, "gates", gates, {s.B, s.Tq, s.Hq, kBranches}, tokens.dtype, true);
  for (const auto& [name, view] : {std::pair{"q", q}, {"gates", gates}}) mechanism::CheckContiguousRows(op, name, view);
  mechanism::Apart apart;
  apart.Reads("q", q);
  apart.Reads("gates", gates);
  apart.Writes(op, "o", o, {s.B, s.Tq, s.Hq, s.Dv}, tokens.dtype);
  mechanism::CheckContiguousRows(op, "o", o);
  int64_t most = 0;
  for (int64_t b = 0; b < s.B; ++b) {
    const auto at = static_cast<size_t>(b);
    s.Tk = std::max(s.Tk, tokens.lengths[at]);
    most = std::max(most, tokens.appended[at]);
    s.starts.push_back(tokens.lengths[at] - tokens.appended[at]);
    s.rows.push_back(std::min(s.Tq, tokens.appended[at]));
  }
  if (s.Tq > most)
    Fail(op, "q", "has " + std::to_string(s.Tq) + " tokens",
         "at most the " + std::to_string(most) + " that were appended");
  s.length = cache.length;
  s.stride = cache.stride;
  s.block = std::min(options.block, std::max<int64_t>(s.Tk, 1));
  s.columns = Columns(options, s.Tk);
  s.windows = cache.k_cmp.size(1);
  return s;
}

}  // namespace

void Attend(Context& ctx, const NSAView& cache, const ConstTensorView& q, const ConstTensorView& gates,
            const Options& options, const TensorView& o) {
  const Shape s = CheckedShape("nsa::Attend", cache, q, gates, options, o);
  const DType dtype = q.dtype();
  TensorView branches, lse, blocks;
  Memory memory;
  memory.Want(&branches, dtype, {kBranches, s.B, s.Tq, s.Hq, s.Dv});
  memory.Want(&lse, mechanism::StateDType(dtype), {kBranches, s.B, s.Hq, s.Tq});
  memory.Want(&blocks, DType::kI32, {s.B, s.Tq, s.Hkv, s.columns});
  memory.Allocate();

  attention::Options causal, compressed;
  causal.scale = compressed.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(s.D)));
  causal.causal = true;
  compressed.query_starts = ConstTensorView(s.starts.data(), DType::kI64, {s.B});
  compressed.query_lengths = ConstTensorView(s.rows.data(), DType::kI64, {s.B});
  compressed.pattern = patterns::CompleteWindows(s.length, s.stride);
  attention::Forward(ctx, {q, cache.k_cmp, cache.v_cmp}, compressed, {Of(branches, kCompressed), Of(lse, kCompressed)});
  ChooseBlocks(ctx, s, *compressed.scale, q, cache.k_cmp, Of(lse, kCompressed), blocks);

  attention::Options selected = causal, windowed = causal;
  selected.pattern = Selected(s, blocks);
  windowed.window = {std::min(options.window - 1, s.Tk), 0};
  attention::Attend(ctx, cache.tokens, q, selected, {Of(branches, kSelected), Of(lse, kSelected)});
  attention::Attend(ctx, cache.tokens, q, windowed, {Of(branches, kWindowed), Of(lse, kWindowed)});
  AddGated(ctx, branches, gates, o);
}

}  // namespace heed::nsa

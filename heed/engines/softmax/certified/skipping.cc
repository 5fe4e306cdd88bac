// Chooses the kernel for attention that skips values, like the choice among all kernels but from a shorter list.
#include "heed/engines/softmax/certified/skipping.h"

#include <algorithm>
#include <string>

#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/certified/skipping_internal.h"

namespace heed::softmax {
namespace {

struct Chosen {
  const char* name;
  std::string (*target)(const Context& ctx);
  SkippingPasses passes;
  KeyGrid grid;
};

Chosen Choose(const Context& ctx, const Problem& p) {
  int64_t rows = 0;
  for (const Sequence& s : p.sequences) rows = std::max(rows, s.num_queries * p.group());
  const SkippingPasses pairs = SkippingDecodePairs(ctx);
  const bool by_pairs = p.dtype == DType::kBF16 && pairs.forward != nullptr;
  const SkippingPasses decode = by_pairs ? pairs : SkippingDecodeF32(ctx);
  const KeyGrid grid = by_pairs ? kPairGrid : KeyGrid();
  const auto target = by_pairs ? &PairTarget : &engine::SimdTarget;
  const char* const few = by_pairs ? "skipping_decode_pairs_bf16" : "skipping_decode_f32";
  if (rows <= decode.lanes(p)) return {few, target, decode, grid};
  if (by_pairs) return {"skipping_pairs_bf16", target, SkippingPairs(ctx), grid};
  return {"skipping_lanes_f32", target, SkippingF32(ctx), grid};
}

}  // namespace

void ForwardSkipping(Context& ctx, const Problem& p, const Skips& skips) {
  Choose(ctx, p).passes.forward(ctx, p, skips);
}

SkippingPlan PlanSkipping(const Context& ctx, const Problem& p) {
  const Chosen chosen = Choose(ctx, p);
  const SkippingPasses& passes = chosen.passes;
  return {chosen.name, chosen.target(ctx), passes.workspace(p) * ctx.num_threads(), passes.lanes(p), chosen.grid};
}

}  // namespace heed::softmax

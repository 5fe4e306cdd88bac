// Attention probabilities, by the passes for the problem's dtype.
#include "heed/engines/softmax/weights/weights.h"

#include "heed/engines/softmax/weights/weights_internal.h"

namespace heed::softmax {
namespace {

WeightsPasses PassesFor(const Context& ctx, const Problem& problem) {
  return problem.dtype == DType::kF64 ? WeightsF64(ctx) : WeightsF32(ctx);
}

}  // namespace

void RowWeights(Context& ctx, const Problem& problem, const GivenLse& lse, std::span<const int64_t> queries,
                std::span<const int64_t> heads, const WeightsOut& out) {
  PassesFor(ctx, problem).rows(ctx, problem, lse, queries, heads, out);
}

void PooledWeights(Context& ctx, const Problem& problem, const GivenLse& lse, const Pool& pool, const WeightsOut& out) {
  PassesFor(ctx, problem).pooled(ctx, problem, lse, pool, out);
}

void SumWeights(Context& ctx, const Problem& problem, int64_t first_query, int64_t num_queries, const SumsOut& out) {
  PassesFor(ctx, problem).sums(ctx, problem, first_query, num_queries, out);
}

int64_t RowWeightsScratch(const Context& ctx, const Problem& problem) {
  return PassesFor(ctx, problem).scratch(problem, nullptr);
}

int64_t PooledWeightsScratch(const Context& ctx, const Problem& problem, const Pool& pool) {
  return PassesFor(ctx, problem).scratch(problem, &pool);
}

}  // namespace heed::softmax

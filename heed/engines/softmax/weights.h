// Attention weights themselves, of chosen rows or pooled into a picture.
//
// They are recomputed from queries and keys, tile by tile: nothing of the size of
// queries x keys is kept unless the caller asked for it.
#ifndef HEED_ENGINES_SOFTMAX_WEIGHTS_H_
#define HEED_ENGINES_SOFTMAX_WEIGHTS_H_

#include <cstdint>
#include <span>

#include "heed/core/context.h"
#include "heed/engines/softmax/problem.h"

namespace heed::softmax {

// A tensor [batch, head, row, key] that is written, rows contiguous: f64 for
// problems in f64, else f32.
struct WeightsOut {
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

// The log-sum-exp over the keys alone, or none: then it is computed.
struct GivenLse {
  Rows rows;
  DType dtype = DType::kF32;
};

// P = exp(S - lse) of these queries and query heads, in the order given, 0 where a
// pair is not kept. A learned sink counts in lse. `values` and `o` of the problem
// are not used.
void RowWeights(Context& ctx, const Problem& problem, const GivenLse& lse, std::span<const int64_t> queries,
                std::span<const int64_t> heads, const WeightsOut& out);

// Mean or maximum of P over bins: query i falls into row i * rows / Tq, key j into
// column j * columns / Tk. All query heads.
struct Pool {
  int64_t rows = 0, columns = 0;  // at most Tq and Tk
  bool maximum = false;           // else the mean over all pairs of the bin
};
void PooledWeights(Context& ctx, const Problem& problem, const GivenLse& lse, const Pool& pool, const WeightsOut& out);

// Sums of P over some queries that follow one another, for each query head: by key, and by how far before its query a
// key is, which a causal problem never has below 0. Elements stand apart by 1, heads by `stride`, batch entries by Hq
// heads; f64 for problems in f64, else f32. kSumsMargin distances before the first and behind the largest are written
// too.
inline constexpr int64_t kSumsMargin = 64;
struct SumsOut {
  void *by_key = nullptr, *by_distance = nullptr;
  int64_t stride = 0;
};
void SumWeights(Context& ctx, const Problem& problem, int64_t first_query, int64_t num_queries, const SumsOut& out);

// Bytes of scratch that they reserve per thread.
int64_t RowWeightsScratch(const Context& ctx, const Problem& problem);
int64_t PooledWeightsScratch(const Context& ctx, const Problem& problem, const Pool& pool);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_WEIGHTS_H_

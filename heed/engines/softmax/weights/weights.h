// Attention probabilities themselves, of chosen rows or pooled into a picture.
//
// They are recomputed from queries and keys, tile by tile. Nothing of size queries x keys is stored unless the caller
// asks for it.
#ifndef HEED_ENGINES_SOFTMAX_WEIGHTS_WEIGHTS_H_
#define HEED_ENGINES_SOFTMAX_WEIGHTS_WEIGHTS_H_

#include <cstdint>
#include <span>

#include "heed/core/context.h"
#include "heed/engines/softmax/problem.h"

namespace heed::softmax {

// An output tensor [batch, head, row, key] with contiguous rows: f64 for problems in f64, else f32.
struct WeightsOut {
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
  int64_t first_key = 0, end_key = kUnlimited;  // keys that are written, at most those of the sequence
  bool dropout = false;                         // P Z / (1 - dropout) instead of P
};

// The log-sum-exp over the keys alone. Without data it is computed.
struct GivenLse {
  Rows rows;
  DType dtype = DType::kF32;
};

// Computes P = exp(S - lse) for these queries and query heads, in the given order, and 0 where a pair is not kept or
// dropout applies and drops it. A learned sink counts in lse. `values` and `o` of the problem are not used.
void RowWeights(Context& ctx, const Problem& problem, const GivenLse& lse, std::span<const int64_t> queries,
                std::span<const int64_t> heads, const WeightsOut& out);

// Pools P over bins, for all query heads: query i is in row i * rows / Tq, key j in column j * columns / Tk.
struct Pool {
  int64_t rows = 0, columns = 0;  // at most Tq and Tk
  bool maximum = false;           // false: the mean over all pairs of the bin
};
void PooledWeights(Context& ctx, const Problem& problem, const GivenLse& lse, const Pool& pool, const WeightsOut& out);

// Sums of P over consecutive queries, for each query head: by key, and by the distance from key to query, which a
// causal problem never has below 0. Elements are 1 apart, heads `stride`, and batch entries Hq heads. They are f64 for
// problems in f64, else f32. kSumsMargin distances before the first and behind the largest are written too.
inline constexpr int64_t kSumsMargin = 64;
struct SumsOut {
  void *by_key = nullptr, *by_distance = nullptr;
  int64_t stride = 0;
};
void SumWeights(Context& ctx, const Problem& problem, int64_t first_query, int64_t num_queries, const SumsOut& out);

// Return the bytes of scratch that these functions reserve per thread.
int64_t RowWeightsScratch(const Context& ctx, const Problem& problem);
int64_t PooledWeightsScratch(const Context& ctx, const Problem& problem, const Pool& pool);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_WEIGHTS_WEIGHTS_H_

// Attention probabilities pooled into a grid, without the N x N array.
#ifndef CLI_POOLED_MAP_H_
#define CLI_POOLED_MAP_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::cli {

// [1, Hq, rows, columns] in f32.
struct PooledMaps {
  Buffer mean, max;
};

// Mean and maximum of exp(s_ij - lse_i) over the pairs of each bin, masked ones
// counting as 0. q [1, Tq, Hq, D] and k [1, Tk, Hkv, D] are f32 or f64; lse is
// [1, Hq, Tq], theirs. Query i is in row i rows / Tq rounded down, keys
// likewise; rows <= Tq, columns <= Tk. Of `options`, scale, causal, window and
// softcap count.
PooledMaps PoolAttention(Context& ctx, const ConstTensorView& q,
                         const ConstTensorView& k, const ConstTensorView& lse,
                         const attention::Options& options, int64_t rows,
                         int64_t columns);

// The first member of a bin: the least i with i bins / total >= bin.
inline int64_t BinBegin(int64_t bin, int64_t bins, int64_t total) {
  return (bin * total + bins - 1) / bins;
}

}  // namespace heed::cli

#endif  // CLI_POOLED_MAP_H_

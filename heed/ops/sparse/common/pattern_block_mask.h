// Block masks as FlexAttention lists them: blocks that are kept whole, and blocks of which some pairs are.
#ifndef HEED_OPS_SPARSE_COMMON_PATTERN_BLOCK_MASK_H_
#define HEED_OPS_SPARSE_COMMON_PATTERN_BLOCK_MASK_H_

#include <cstdint>

#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/sparse/common/pattern.h"

namespace heed::patterns {

// Block i of rows keeps of the blocks of keys [row_ptr[b, h, i], row_ptr[b, h, i + 1]) of `columns`.
struct BlockMaskInputs {
  ConstTensorView row_ptr;     // [B, Hp, nq + 1]: B is 1 or the batch entries, Hp is 1 or the query heads
  ConstTensorView columns;     // [n], ascending in each row
  ConstTensorView parts;       // [n]: which of `bits` a block keeps; -1: all of its pairs
  ConstTensorView bits;        // i64 [m, rows, ceil(keys / 64)]: of each row a bit per key, the lowest first
  int64_t rows = 1, keys = 1;  // of a block
  int64_t Tq = 0, Tk = 0;      // of the calls that it is for
};

// The pairs of a row of the call, not of a position, and a key. No expression says such a pattern, and it is
// equal to itself alone. Memory is that of the blocks: of those in part a bit per pair. Tables are copied; throws
// InvalidArgument naming the one that does not fit.
HEED_API Pattern BlockMask(const BlockMaskInputs& in);

}  // namespace heed::patterns

#endif  // HEED_OPS_SPARSE_COMMON_PATTERN_BLOCK_MASK_H_

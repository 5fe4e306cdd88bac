// Block masks as in FlexAttention: lists of full blocks and of partial blocks.
#ifndef HEED_PATTERNS_PATTERN_BLOCK_MASK_H_
#define HEED_PATTERNS_PATTERN_BLOCK_MASK_H_

#include <cstdint>

#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/patterns/pattern.h"

namespace heed::patterns {

// Block i of rows keeps pairs in the blocks of keys [row_ptr[b, h, i], row_ptr[b, h, i + 1]) of `columns`.
struct BlockMaskInputs {
  ConstTensorView row_ptr;     // [B, Hp, nq + 1]: B is 1 or the batch entries, Hp is 1 or the query heads
  ConstTensorView columns;     // [n], ascending in each row
  ConstTensorView parts;       // [n]: index into `bits` of a partial block; -1: a full block
  ConstTensorView bits;        // i64 [m, rows, ceil(keys / 64)]: for each row a bit per key, the lowest first
  int64_t rows = 1, keys = 1;  // sizes of a block
  int64_t Tq = 0, Tk = 0;      // sizes of the calls that it fits
};

// Pairs of a row of the call, not of a position, and a key. No expression describes such a pattern, and it is equal
// only to itself. Memory is that of the blocks: a bit per pair for partial ones. Tables are copied; throws
// InvalidArgument with the name of an invalid one.
HEED_API Pattern BlockMask(const BlockMaskInputs& in);

}  // namespace heed::patterns

#endif  // HEED_PATTERNS_PATTERN_BLOCK_MASK_H_

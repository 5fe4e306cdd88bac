// The block tables of another library, after their checks.
#ifndef HEED_STATE_BLOCK_TABLES_INTERNAL_H_
#define HEED_STATE_BLOCK_TABLES_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/core/tensor.h"
#include "heed/state/kv_cache.h"

namespace heed {

// The expected form of tables, and the device of their pools. The lists are on the CPU.
struct ExpectedTables {
  DType dtype;
  int64_t batch, heads, dim, value_dim;
  Device device = {};
};

struct CheckedTables {
  ConstTensorView k, v;          // pools, viewed as [pages, tokens, H, D]
  std::vector<int64_t> begins;   // [B + 1], the first entry of each sequence in `pages`
  std::vector<int64_t> pages;    // page numbers in the pools
  std::vector<int64_t> lengths;  // [B], tokens

  int64_t page_tokens() const { return k.size(1); }
};

// Throws InvalidArgument, "op: ...", for tables of another form and for an entry outside its range. No row is read.
CheckedTables CheckTables(const char* op, const KVCache::BlockTables& tables, const ExpectedTables& expected);

}  // namespace heed

#endif  // HEED_STATE_BLOCK_TABLES_INTERNAL_H_

// Checks of the block tables of another library.
#include <string>

#include "heed/core/error.h"
#include "heed/mechanism/check_internal.h"
#include "heed/state/block_tables_internal.h"

namespace heed {
namespace {

class Checks {
 public:
  Checks(const char* op, const ExpectedTables& expected) : op_(op), expected_(expected) {}

  [[noreturn]] void Fail(const std::string& what) const { throw InvalidArgument(std::string(op_) + ": " + what); }

  // A pool, viewed as [pages, tokens, H, D].
  ConstTensorView Pool(const char* name, const ConstTensorView& pool, bool heads_first, int64_t dim) const {
    const std::string what = name;
    if (!pool.present()) Fail(what + " is absent, expected a tensor");
    if (pool.dtype() != expected_.dtype) {
      Fail(what + " has dtype " + Name(pool.dtype()) + ", expected " + Name(expected_.dtype));
    }
    const int heads = heads_first ? 1 : 2;
    if (pool.rank() != 4 || pool.size(heads) != expected_.heads || pool.size(3) != dim || pool.size(3 - heads) < 1) {
      const std::string H = std::to_string(expected_.heads);
      Fail(what + " has shape " + pool.ShapeString() + ", expected [pages," +
           (heads_first ? H + ",tokens" : "tokens," + H) + "," + std::to_string(dim) + "] with at least one token");
    }
    mechanism::CheckReadable(op_, name, pool, expected_.device);
    return ConstTensorView(pool.data(), pool.dtype(),
                           {pool.size(0), pool.size(3 - heads), pool.size(heads), pool.size(3)},
                           {pool.stride(0), pool.stride(3 - heads), pool.stride(heads), pool.stride(3)}, pool.device());
  }

  void List(const char* name, const ConstTensorView& list, int64_t least, bool exact) const {
    const std::string what = name;
    if (!list.present()) Fail(what + " is absent, expected a tensor");
    if (list.dtype() != DType::kI32 && list.dtype() != DType::kI64) {
      Fail(what + " has dtype " + Name(list.dtype()) + ", expected i32 or i64");
    }
    if (list.rank() != 1 || list.size(0) < least || (exact && list.size(0) != least)) {
      Fail(what + " has shape " + list.ShapeString() + ", expected [" + std::to_string(least) + "]" +
           (exact ? "" : " or longer"));
    }
    mechanism::CheckReadable(op_, name, list);
  }

  // Entry i of a list. Throws unless it is between `least` and `most`.
  int64_t Entry(const char* name, const ConstTensorView& list, int64_t i, int64_t least, int64_t most) const {
    const int64_t value = LoadAsInt64(list.dtype(), list.data(), i * list.stride(0));
    if (value < least || value > most) {
      Fail(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(value) + ", expected " +
           std::to_string(least) + " to " + std::to_string(most));
    }
    return value;
  }

 private:
  const char* const op_;
  const ExpectedTables& expected_;
};

}  // namespace

CheckedTables CheckTables(const char* op, const KVCache::BlockTables& tables, const ExpectedTables& expected) {
  const Checks check(op, expected);
  CheckedTables checked;
  const ConstTensorView& k = checked.k = check.Pool("k_pool", tables.k_pool, tables.heads_first, expected.dim);
  const ConstTensorView& v = checked.v = check.Pool("v_pool", tables.v_pool, tables.heads_first, expected.value_dim);
  if (v.size(0) != k.size(0) || v.size(1) != k.size(1)) {
    check.Fail("v_pool has shape " + tables.v_pool.ShapeString() + ", expected " + std::to_string(k.size(0)) +
               " pages of " + std::to_string(k.size(1)) + " tokens as in k_pool");
  }
  const int64_t batch = expected.batch, tokens = k.size(1);
  check.List("indptr", tables.indptr, batch + 1, true);
  check.List("indices", tables.indices, 0, false);
  check.List("last_page_len", tables.last_page_len, batch, true);
  const int64_t num_indices = tables.indices.size(0);
  checked.begins.push_back(check.Entry("indptr", tables.indptr, 0, 0, 0));
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t begin = checked.begins.back();
    const int64_t end = check.Entry("indptr", tables.indptr, b + 1, begin, num_indices);
    checked.begins.push_back(end);
    for (int64_t i = begin; i < end; ++i) {
      checked.pages.push_back(check.Entry("indices", tables.indices, i, 0, k.size(0) - 1));
    }
    checked.lengths.push_back(0);
    if (end == begin) continue;
    const int64_t last = check.Entry("last_page_len", tables.last_page_len, b, 1, tokens);
    if (__builtin_mul_overflow(end - begin - 1, tokens, &checked.lengths.back()) ||
        __builtin_add_overflow(checked.lengths.back(), last, &checked.lengths.back())) {
      check.Fail("sequence " + std::to_string(b) + " would have 2^63 tokens, expected fewer");
    }
  }
  return checked;
}

}  // namespace heed

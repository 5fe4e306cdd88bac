// AttendPages(): attention over another library's pages. It builds the problem of Forward() with keys and values in
// pages.
#include "heed/ops/exact/attention/attend/attend_pages.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "heed/core/os.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/ops/exact/attention/attend/attend_internal.h"
#include "heed/ops/exact/attention/attention_check_internal.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/state/block_tables_internal.h"

namespace heed::attention {
namespace {

constexpr char kOp[] = "attention::AttendPages";

// Checks the page tables of a call against the number of sequences and channels of q.
CheckedTables TablesOf(const Check& check, const KVCache::BlockTables& tables, const ConstTensorView& q,
                       const Options& options, Device device) {
  check.Present("q", q);
  const bool packed = options.cu_seqlens_q.present();
  if (q.rank() != 4 && !(packed && q.rank() == 3)) {
    check.Fail("q", "has shape " + q.ShapeString(), packed ? "[T, H, D] or [1, T, H, D]" : "[B, T, H, D]");
  }
  for (const auto& [name, pool] : {std::pair{"k_pool", &tables.k_pool}, {"v_pool", &tables.v_pool}}) {
    check.Present(name, *pool);
    if (pool->rank() != 4) check.Fail(name, "has shape " + pool->ShapeString(), "rank 4");
  }
  ExpectedTables expected = {.dtype = q.dtype(),
                             .batch = q.size(0),
                             .heads = std::max<int64_t>(1, tables.k_pool.size(tables.heads_first ? 1 : 2)),
                             .dim = q.size(q.rank() - 1),
                             .value_dim = tables.v_pool.size(3),
                             .device = device};
  if (packed) {
    const ConstTensorView& boundaries = options.cu_seqlens_q;
    if (boundaries.rank() != 1 || boundaries.size(0) < 1)
      check.Fail("cu_seqlens_q", "has shape " + boundaries.ShapeString(), "[B + 1]");
    expected.batch = boundaries.size(0) - 1;
  }
  CheckedTables checked = CheckTables(kOp, tables, expected);
  for (const auto& [name, pool] : {std::pair{"k_pool", &checked.k}, {"v_pool", &checked.v}})
    check.ContiguousRows(name, *pool);
  if (checked.v.size(3) < 1) check.Fail("v_pool", "has shape " + checked.v.ShapeString(), "Dv >= 1");
  if (checked.k.size(0) > 1 && checked.k.stride(0) != checked.v.stride(0)) {
    check.Fail("v_pool", "has pages " + Text(checked.v.stride(0)) + " elements apart",
               Text(checked.k.stride(0)) + " as k_pool");
  }
  return checked;
}

// Positions and lengths of the queries, in arrays that options refer to.
struct Places {
  std::vector<int64_t> starts, key_boundaries;
};

// Returns the options with which Forward() would compute the same call.
Options WholeOptions(const Check& check, const Options& options, const std::vector<int64_t>& lengths, int64_t queries,
                     Places* places) {
  Options whole = options;
  whole.pattern = {};  // refers to the keys in the pages
  const auto batch = static_cast<int64_t>(lengths.size());
  if (options.cu_seqlens_q.present()) {
    places->key_boundaries = {0};
    for (const int64_t length : lengths) places->key_boundaries.push_back(places->key_boundaries.back() + length);
    whole.cu_seqlens_k = ConstTensorView(places->key_boundaries.data(), DType::kI64, {batch + 1});
    return whole;
  }
  places->starts = lengths;
  const std::vector<int64_t> given = check.Integers("query_lengths", options.query_lengths, {batch});
  for (size_t b = 0; b < lengths.size(); ++b) {
    const int64_t count = given.empty() ? queries : given[b];
    if (count < 0 || count > queries) check.Fail("query_lengths", "contains " + Text(count), "0 to " + Text(queries));
    places->starts[b] -= count;
  }
  whole.query_starts = ConstTensorView(places->starts.data(), DType::kI64, {batch});
  whole.key_lengths = ConstTensorView(lengths.data(), DType::kI64, {batch});
  return whole;
}

// Describes the rows of a pool, `offset` bytes after the beginning of a page.
softmax::Rows InPages(const ConstTensorView& pool, int64_t offset) {
  return {.token_stride = pool.stride(1), .head_stride = pool.stride(2), .page_offset = offset};
}

}  // namespace

void AttendPages(Context& ctx, const KVCache::BlockTables& tables, const ConstTensorView& q, const Options& options,
                 const Outputs& out) {
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  const Device device = DeviceOf(q);
  const Check check(kOp, Use::kForward, device);
  CheckCacheOptions(check, options, {"query_lengths", "cu_seqlens_q"});
  const CheckedTables checked = TablesOf(check, tables, q, options, device);
  check.NoOverlap("o", out.o, "k_pool", tables.k_pool);
  check.NoOverlap("o", out.o, "v_pool", tables.v_pool);
  check.NoOverlap("lse", out.lse, "k_pool", tables.k_pool);
  check.NoOverlap("lse", out.lse, "v_pool", tables.v_pool);

  // Everything else is checked as in Forward().
  const bool packed = options.cu_seqlens_q.present();
  int64_t tokens = 0;
  for (const int64_t length : checked.lengths) tokens = packed ? tokens + length : std::max(tokens, length);
  Places places;
  const Options whole = WholeOptions(check, options, checked.lengths, q.size(q.rank() - 3), &places);
  softmax::Problem p =
      CheckedQueries(kOp, q, {tokens, checked.k.size(2), checked.v.size(3)}, whole, out, Use::kForward, device);
  p.invariant = true;  // between prefill and decode

  const auto element = static_cast<int64_t>(SizeOf(q.dtype()));
  const auto* const k = static_cast<const std::byte*>(checked.k.data());
  p.page_tokens = checked.page_tokens();
  p.k = InPages(checked.k, 0);
  p.v = InPages(checked.v,
                static_cast<int64_t>(reinterpret_cast<intptr_t>(checked.v.data()) - reinterpret_cast<intptr_t>(k)));
  std::vector<const std::byte*> pages;
  for (const int64_t page : checked.pages) pages.push_back(k + page * checked.k.stride(0) * element);
  pages.push_back(nullptr);  // gives a sequence without pages a table too
  for (softmax::Sequence& s : p.sequences) s.pages = pages.data() + checked.begins[static_cast<size_t>(s.batch)];

  if (device.type != DeviceType::kCpu) {
    return ForDevice(kOp, ctx, options, q, tokens, /*to_lengths=*/true, &p).forward(ctx, p);
  }
  RefuseSlowPairs(kOp, ctx, p);
  PlacePattern(kOp, options.pattern, /*to_lengths=*/true, &p);
  softmax::Choose(kOp, ctx, p).forward(ctx, p);
  if (packed) FillSurplusRows(p, q, out);
}

}  // namespace heed::attention

// Operations on rows of a call, distributed to threads.
#include <algorithm>
#include <cstdint>

#include "heed/layers/rows_internal.h"
#include "heed/layers/rows_kernels_internal.h"

namespace heed::layers {
namespace {

// A task has enough rows to be worth a task.
template <class Call>
void ByRows(Context& ctx, void (*kernel)(const Call&, size_t, size_t), const Call& call, size_t size) {
  constexpr size_t kElements = 16384;
  const size_t rows = std::max<size_t>(1, kElements / std::max<size_t>(1, size));
  ctx.ParallelFor(static_cast<int64_t>((call.rows + rows - 1) / rows), [&](int64_t task, int) {
    const size_t begin = static_cast<size_t>(task) * rows;
    kernel(call, begin, std::min(call.rows, begin + rows));
  });
}

}  // namespace

void Run(Context& ctx, const ScaleRows& call) { ByRows(ctx, RowKernelsFor(ctx).scale, call, call.heads * call.size); }
void Run(Context& ctx, const ActivateRows& call) { ByRows(ctx, RowKernelsFor(ctx).activate, call, call.size); }
void Run(Context& ctx, const AddRows& call) { ByRows(ctx, RowKernelsFor(ctx).add, call, call.size); }
void Run(Context& ctx, const MixRows& call) { ByRows(ctx, RowKernelsFor(ctx).mix, call, call.size); }
void Run(Context& ctx, const DecayRows& call) { ByRows(ctx, RowKernelsFor(ctx).decay, call, call.size); }

}  // namespace heed::layers

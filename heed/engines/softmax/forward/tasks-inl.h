// Tasks of a forward pass: which blocks of rows, and which of their keys, one thread computes.
//
// Compiled once per SIMD target and dtype.
#if defined(HEED_ENGINES_SOFTMAX_FORWARD_TASKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_FORWARD_TASKS_INL_H_
#undef HEED_ENGINES_SOFTMAX_FORWARD_TASKS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_FORWARD_TASKS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/context.h"
#include "heed/engines/softmax/forward/forward-inl.h"
#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/forward/gathered-inl.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/forward/segments-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

// True for operands with a query per lane, keys in place and products in vectors. Such rows can be gathered, and their
// prefetches are issued between register tiles.
template <class O>
inline constexpr bool kRowsInLanes = !O::kUsesAmx && !O::kKeysInLanes && !O::kQuantized;

// Computes a shared prefix: each segment of its keys once, for the queries of all sequences that share it.
template <class O, int C, class Outputs>
void RunShared(Context& ctx, const Problem& p, const Plan& plan, const BlockQueue& queue,
               const SegmentStates<O>& states, const SharedKeys& shared) {
  const Sequence* const members = &p.sequences[static_cast<size_t>(shared.first)];
  Sequence joined = *members;
  joined.num_queries *= shared.count;
  joined.key_end = shared.end;
  const BlockGrid grid(p, joined, plan.rows), own_grid(p, *members, plan.rows);
  const int64_t blocks = p.key_heads * grid.blocks;
  if (blocks == 0) return;  // no queries, or no heads
  const int64_t segments = (shared.end - members->key_begin) / O::kGrid.segment;
  for (int64_t i = 0; i < shared.count * p.key_heads * own_grid.blocks; ++i) {
    const int64_t block = i % own_grid.blocks, rest = i / own_grid.blocks;
    const int64_t own = queue.IndexOf({shared.first + rest / p.key_heads, rest % p.key_heads, block});
    for (int64_t segment = 0; segment < segments; ++segment) states.Expect(own, segment);
  }
  const int64_t num_splits = std::clamp<int64_t>(kTasksPerThread * ctx.num_threads() / blocks, 1, segments);
  ctx.ParallelFor(blocks * num_splits, [&](int64_t index, int worker) HWY_ATTR {
    const int64_t split = index % num_splits, block = index / num_splits % grid.blocks;
    const int64_t key_head = index / num_splits / grid.blocks;
    Workspace<O>& w = WorkspaceOf<O>(ctx, worker);
    [[maybe_unused]] const SessionOf<O> session;
    const Head<O> head = HeadOf(p, plan, shared.first, key_head, w);
    ForwardBlock<O, C, Outputs> joint(p, joined, grid, key_head, block, w, head);
    joint.Join(members, members->num_queries);
    joint.ComputeShared(states, segments * split / num_splits, segments * (split + 1) / num_splits,
                        [&](const Sequence& sequence, const BlockGrid::Row& row) {
                          const BlockGrid::Place place = own_grid.Find(row);
                          return Owner{queue.IndexOf({&sequence - p.sequences.data(), key_head, place.block}),
                                       static_cast<size_t>(place.lane)};
                        });
  });
}

// Groups of consecutive blocks that take the same keys one after the other, while these are in L2.
template <class O>
struct BlockGroups {
  static constexpr int64_t kMostBlocks = 32, kFewestBlocks = 4;
  static constexpr int64_t kMostBytes = int64_t{16} << 20;  // of segment states

  BlockGroups(const Problem& p, const Plan& plan, int64_t num_blocks, int num_threads) : blocks(kFewestBlocks) {
    if constexpr (O::kUsesAmx) {
      per_split.count = O::KeysInL2(p) / O::kGrid.segment;
      const int64_t bytes = SegmentStates<O>(p, plan, 1, per_split).Bytes();
      blocks = std::min({kMostBlocks, kMostBytes / bytes, num_blocks / (kTasksPerThread * num_threads)});
      blocks = std::max(blocks, kFewestBlocks);
      const bool copied = plan.keys_at == Place::kHead && plan.values_at == Place::kHead;
      const bool sees_few = p.windowed() || p.chunk > 0 || p.has_pattern;
      wanted = copied && !sees_few && SegmentStates<O>(p, plan, 1, per_split).num_splits() > 1;
    }
  }
  SegmentStates<O> States(const Problem& p, const Plan& plan) const { return {p, plan, blocks, per_split}; }
  int64_t Bytes(const Problem& p, const Plan& plan) const { return wanted ? States(p, plan).Bytes() : 0; }

  int64_t blocks;
  SegmentsPerSplit per_split = {1};
  bool wanted = false;
};

// Computes heads whose K and V exceed L2: a part of the keys that fits is taken by all blocks of a group, then the next
// part.
template <class O, int C, class Outputs>
void RunGroups(Context& ctx, const Problem& p, const Plan& plan, const BlockQueue& queue,
               const BlockGroups<O>& groups) {
  const int64_t tasks = (queue.size() + groups.blocks - 1) / groups.blocks;
  ctx.ParallelFor(tasks, [&](int64_t group, int worker) HWY_ATTR {
    Workspace<O>& w = WorkspaceOf<O>(ctx, worker);
    [[maybe_unused]] const SessionOf<O> session;
    SegmentStates<O> states = groups.States(p, plan);
    int64_t index = group * groups.blocks;
    const int64_t last = std::min(index + groups.blocks, queue.size());
    while (index < last) {  // one turn per head, of which a group may contain several
      const BlockQueue::Task head_of = queue.At(index);
      int64_t end = index + 1;
      while (end < last && queue.At(end).sequence == head_of.sequence && queue.At(end).key_head == head_of.key_head) {
        ++end;
      }
      states.Begin(reinterpret_cast<char*>(&w) + Workspace<O>::Bytes(plan));
      const Sequence& s = p.sequences[static_cast<size_t>(head_of.sequence)];
      const Head<O> head = HeadOf(p, plan, head_of.sequence, head_of.key_head, w);
      const BlockGrid grid(p, s, plan.rows);
      for (int64_t split = 0; split < states.num_splits(); ++split) {
        for (int64_t i = index; i < end; ++i) {
          ForwardBlock<O, C, Outputs> block(p, s, grid, head_of.key_head, queue.At(i).block, w, head);
          block.ComputeSplit(states, i - index, split);
        }
      }
      index = end;
    }
  });
}

// Returns the number of consecutive blocks of one task. If heads have few blocks, a task takes all blocks of a head, so
// that its keys are copied once and the next block is known.
inline int64_t BlocksPerTask(const BlockQueue& queue, int num_threads) {
  constexpr int64_t kMostBlocks = 4;
  const int64_t blocks = queue.most_blocks();
  const bool few = 0 < blocks && blocks <= kMostBlocks;
  return few && queue.size() >= blocks * kTasksPerThread * num_threads ? blocks : 1;
}

// Collects the prefetches to issue while block `index` is computed: its outputs, the queries of block `next`, and a
// share of the keys and values of the next head, whose block `of_next_head` is.
template <class O>
void PrefetchNext(const Problem& p, const Plan& plan, const BlockQueue& queue, int64_t index, int64_t next,
                  int64_t of_next_head, RowPrefetch& ahead) {
  constexpr int64_t kMostBytes = int64_t{512} << 10;  // keys and values have to stay in L2
  ahead.Clear();
  const auto grid_of = [&](const BlockQueue::Task& task) {
    return BlockGrid(p, p.sequences[static_cast<size_t>(task.sequence)], plan.rows);
  };
  const auto add_block = [&](int64_t block, const Rows& rows, DType dtype, int64_t depth) {
    const BlockQueue::Task task = queue.At(block);
    ahead.Add(rows, dtype, depth, p.sequences[static_cast<size_t>(task.sequence)], task.key_head, grid_of(task),
              task.block);
  };
  add_block(index, p.o, p.wide_outputs ? DTypeOf<typename O::Compute>::value : p.dtype, p.value_depth);
  if (next < queue.size()) add_block(next, p.q, p.dtype, p.depth);
  if (of_next_head >= queue.size() || p.page_tokens > 0) return;
  const BlockQueue::Task task = queue.At(index), then = queue.At(of_next_head);
  const Sequence& s = p.sequences[static_cast<size_t>(then.sequence)];
  const int64_t keys = s.key_end - s.key_begin, blocks = grid_of(task).blocks;
  if (s.tail != nullptr || keys * (p.depth + p.value_depth) * static_cast<int64_t>(SizeOf(p.dtype)) > kMostBytes)
    return;
  const Interval share = {s.key_begin + keys * task.block / blocks, s.key_begin + keys * (task.block + 1) / blocks};
  ahead.Add(p.k, p.dtype, p.depth, s, s.first_k, then.key_head, share);
  ahead.Add(p.v, p.dtype, p.value_depth, s, s.first_k, then.key_head, share);
}

template <class O, int C, class Outputs = LaneOutputs<O, C>>
void RunBlocks(Context& ctx, const Problem& p, const Plan& plan) {
  const BlockQueue queue(p, plan.rows);
  SegmentStates<O> states(p, plan, queue.size(), ctx.num_threads());
  if constexpr (O::kUsesAmx) {
    const BlockGroups<O> groups(p, plan, queue.size(), ctx.num_threads());
    if (groups.wanted && !states.kept()) return RunGroups<O, C, Outputs>(ctx, p, plan, queue, groups);
  }
  ctx.ReserveShared(states.Bytes());
  states.Begin(ctx.Shared());
  if constexpr (!O::kUsesAmx) {  // only caches share keys, and they never take AMX tiles
    for (const SharedKeys& shared : p.shared) {
      RunShared<O, C, Outputs>(ctx, p, plan, queue, states, shared);
    }
  }
  const int64_t num_splits = states.num_splits();
  const auto with_block = [&](int64_t index, Workspace<O>& w, const auto& use) HWY_ATTR {
    const BlockQueue::Task task = queue.At(index);
    const Sequence& s = p.sequences[static_cast<size_t>(task.sequence)];
    const Head<O> head = HeadOf(p, plan, task.sequence, task.key_head, w);
    const BlockGrid grid(p, s, plan.rows);
    ForwardBlock<O, C, Outputs> block(p, s, grid, task.key_head, task.block, w, head);
    use(block, grid.blocks);
  };
  if (states.kept()) {
    return ctx.ParallelFor(queue.size() * num_splits, [&](int64_t index, int worker) HWY_ATTR {
      [[maybe_unused]] const SessionOf<O> session;
      with_block(index / num_splits, WorkspaceOf<O>(ctx, worker), [&](auto& block, int64_t) HWY_ATTR {
        block.ComputeSplit(states, index / num_splits, index % num_splits);
      });
    });
  }
  const int64_t per_task = BlocksPerTask(queue, ctx.num_threads());
  ctx.ParallelFor((queue.size() + per_task - 1) / per_task, [&](int64_t task, int worker) HWY_ATTR {
    [[maybe_unused]] const SessionOf<O> session;
    Workspace<O>& w = WorkspaceOf<O>(ctx, worker);
    const int64_t end = std::min((task + 1) * per_task, queue.size());
    for (int64_t index = task * per_task; index < end; ++index) {
      with_block(index, w, [&](auto& block, int64_t blocks_of_head) HWY_ATTR {
        if constexpr (kRowsInLanes<O>) {                               // other operands prefetch by themselves
          const int64_t skipped = per_task * (ctx.num_threads() - 1);  // blocks that other threads take
          const int64_t next = index + 1 < end ? index + 1 : index + 1 + skipped;
          const int64_t of_next_head = index + blocks_of_head + (per_task > 1 ? skipped : 0);
          PrefetchNext<O>(p, plan, queue, index, next, of_next_head, w.ahead);
        }
        block.Compute();
      });
    }
  });
}

// Returns the bytes of scratch per thread, including its share of the states that threads share.
template <class O>
int64_t ScratchBytes(const Problem& p, const Plan& plan, int num_threads) {
  const BlockQueue queue(p, plan.rows);
  const SegmentStates<O> states(p, plan, queue.size(), num_threads);
  return Workspace<O>::Bytes(plan) + (states.Bytes() + num_threads - 1) / num_threads +
         BlockGroups<O>(p, plan, queue.size(), num_threads).Bytes(p, plan);
}

template <class O>
void Forward(Context& ctx, const Problem& p) {
  if constexpr (kRowsInLanes<O>) {
    if (p.gathers()) return RunGathered<O>(ctx, p);
  }
  const Plan plan = MakePlan<O>(p);
  const int64_t num_blocks = O::kUsesAmx ? BlockQueue(p, plan.rows).size() : 0;
  const BlockGroups<O> groups(p, plan, num_blocks, ctx.num_threads());
  ReserveWorkspaces<O>(ctx, plan, groups.Bytes(p, plan));
  if constexpr (kFewestVectors<O> == 1) {
    if (plan.vectors == 1) return RunBlocks<O, 1>(ctx, p, plan);
  }
  if constexpr (kFewestVectors<O> <= 2 && O::kMostVectors > 2) {
    if (plan.vectors == 2) return RunBlocks<O, 2>(ctx, p, plan);
  }
  RunBlocks<O, O::kMostVectors>(ctx, p, plan);
}

template <class O>
int64_t ForwardWorkspace(const Context& ctx, const Problem& p) {
  if constexpr (kRowsInLanes<O>) {
    if (p.gathers()) {
      const GatheredPlan<O> cut(p, ctx.num_threads());
      return Workspace<O>::Bytes(cut.plan) + cut.Bytes(p);
    }
  }
  return ScratchBytes<O>(p, MakePlan<O>(p), ctx.num_threads());
}

template <class O>
int64_t NumLanes(const Problem& p) {
  return MakePlan<O>(p).lanes;
}

template <class O>
Passes ForwardPasses() {
  return {.forward = &Forward<O>, .workspace = &ForwardWorkspace<O>, .lanes = &NumLanes<O>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_FORWARD_TASKS_INL_H_

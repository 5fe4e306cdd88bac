// Tasks of a backward pass: groups of keys, and the query rows that see each group.
//
// Compiled once per SIMD target and dtype.
#if defined(HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_TASKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_TASKS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_TASKS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_TASKS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "heed/core/context.h"
#include "heed/engines/softmax/backward/backward-inl.h"
#include "heed/engines/softmax/backward/backward.h"
#include "heed/engines/softmax/backward/gathered_gradients-inl.h"
#include "heed/engines/softmax/backward/gradient_buffers-inl.h"
#include "heed/engines/softmax/backward/gradient_rows-inl.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/problem.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Computes the gradients of one group of keys of one head; sweep(group, head) adds the contributions of its rows.
template <class P, class F, class O = typename P::Operands>
HWY_INLINE void GroupGradients(const Problem& p, const Gradients& g, const SharedGradients<typename O::Compute>& shared,
                               int64_t sequence, int64_t key_head, int64_t index,
                               const std::optional<GroupQueue::Task>& next, GradientBuffers<P>& b, const F& sweep) {
  using T = typename O::Compute;
  const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
  const Interval keys = KeysOfGroup<P>(s, index);
  const auto rows = [&](const Rows& of, DType dtype) { return SourceOf(of, dtype, s.batch, s.first_k, key_head); };
  Group<P> group = {keys, index, sequence, P(p, shared.wants, keys, rows(p.k, p.dtype), rows(p.v, p.dtype), b.products),
                    next};
  if (shared.terms_by_group) {
    for (int64_t head = key_head * p.group(); head < (key_head + 1) * p.group(); ++head) {
      for (int64_t i = 0; i < s.num_queries; ++i) shared.BeginRow(p, g, sequence, head, i);
    }
  }
  Head<O> head;
  head.key_source = rows(p.k, p.dtype);
  head.keys_at = head.values_at = Place::kHead;
  head.keys = group.products.Keys();
  if constexpr (O::kUsesAmx) b.block.keys_finite = group.products.KeysAreFinite();
  sweep(group, head);
  group.products.EndGroup();
  const auto store = [&](const Rows& to, const T* from, int64_t depth, double factor) HWY_ATTR {
    if (to.data == nullptr) return;
    StoreTokens<T>(rows(to, SharedGradients<T>::StoredAs(p, g)), keys, depth, static_cast<T>(factor), from,
                   P::Row(depth));
  };
  store(g.dk, b.products.dk, p.depth, p.scale);
  store(g.dv, b.products.dv, p.value_depth, 1);
}

// Passes over all blocks of rows that see a group, from the last to the first.
template <class P, class O = typename P::Operands>
HWY_INLINE void SweepBlocks(const Problem& p, const Gradients& g, const Plan& plan,
                            const SharedGradients<typename O::Compute>& shared, int64_t key_head, const Head<O>& head,
                            Group<P>& group, GradientBuffers<P>& b) {
  const Sequence& s = p.sequences[static_cast<size_t>(group.sequence)];
  const BlockGrid grid(p, s, plan.lanes, P::kFuseHeads);
  for (int64_t block = grid.blocks; block-- > 0;) {
    BackwardBlock<P>(p, s, grid, key_head, block, head, g, shared, group, b).Compute();
  }
}

template <class P>
Plan BackwardPlan(const Problem& p) {
  Plan plan = MakePlan<typename P::Operands>(p, P::kVectors);
  plan.outputs = plan.spare = plan.weights = plan.keys = plan.values = 0;
  return plan;
}

// Replaces GatheredSweep where rows are not gathered.
struct NoSweep {
  NoSweep(const Problem&, const Plan&, int) {}
  int64_t Bytes(const Problem&) const { return 0; }
};
template <class P>
using GatheredSweepOf = std::conditional_t<P::Operands::kUsesAmx, NoSweep, GatheredSweep<P>>;

template <class P>
BackwardBytes BackwardWorkspace(const Context& ctx, const Problem& p, const Gradients& g) {
  using T = typename P::Operands::Compute;
  const Plan plan = BackwardPlan<P>(p);
  const RowIndex index(p, plan.lanes, P::kFuseHeads);
  SharedGradients<T> shared(p, g, index);
  const GatheredSweepOf<P> gathered(p, plan, ctx.num_threads());
  return {GradientBuffers<P>::Bytes(p, plan) + gathered.Bytes(p), shared.LayOut(p, g, nullptr)};
}

template <class P>
void Backward(Context& ctx, const Problem& p, const Gradients& g) {
  using O = typename P::Operands;
  using T = typename O::Compute;
  const Plan plan = BackwardPlan<P>(p);
  const RowIndex index(p, plan.lanes, P::kFuseHeads);
  SharedGradients<T> shared(p, g, index);
  ctx.ReserveShared(shared.LayOut(p, g, nullptr));
  shared.LayOut(p, g, ctx.Shared());
  const GatheredSweepOf<P> gathered(p, plan, ctx.num_threads());
  const int64_t bytes = GradientBuffers<P>::Bytes(p, plan);
  ctx.ReserveScratch(bytes + gathered.Bytes(p));
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    static_cast<GradientBuffers<P>*>(ctx.Scratch(worker))->Init(p, plan);
  }
  shared.terms_by_group = shared.wants.any && !p.gathers() &&
                          std::all_of(p.sequences.begin(), p.sequences.end(),
                                      [](const Sequence& s) { return NumGroups(s, P::kGroupKeys) == 1; });
  shared.Begin(ctx, p, g);
  if (!shared.wants.any) return shared.Finish(ctx, p, g);
  const GroupQueue queue(p, g, P::kGroupKeys);
  const auto sequences = static_cast<int64_t>(p.sequences.size());
  std::vector<int64_t> first_group = {0};  // of each sequence
  for (const Sequence& s : p.sequences) first_group.push_back(first_group.back() + NumGroups(s, P::kGroupKeys));
  // The index that a task names, or all of them.
  const auto range = [](int64_t one, int64_t count) {
    return one == GroupQueue::kAll ? Interval{0, count} : Interval{one, std::min(one + 1, count)};
  };
  ctx.ParallelFor(queue.size(), [&](int64_t task_index, int worker) HWY_ATTR {
    [[maybe_unused]] const SessionOf<O> session;
    auto& buffers = *static_cast<GradientBuffers<P>*>(ctx.Scratch(worker));
    const GroupQueue::Task task = queue.At(task_index);
    std::optional<GroupQueue::Task> next;
    if (task_index + ctx.num_threads() < queue.size()) next = queue.At(task_index + ctx.num_threads());
    const Interval some = range(task.sequence, sequences);
    for (int64_t s = some.begin; s < some.end; ++s) {
      const Interval heads = range(task.key_head, p.key_heads);
      const Interval groups = range(task.group, NumGroups(p.sequences[static_cast<size_t>(s)], P::kGroupKeys));
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        for (int64_t group = groups.begin; group < groups.end; ++group) {
          if (shared.wants.relative) std::fill_n(buffers.relative, GradientBuffers<P>::RelativeSize(p), T{0});
          GroupGradients<P>(p, g, shared, s, h, group, next, buffers,
                            [&](Group<P>& keys, const Head<O>& head) HWY_ATTR {
                              if constexpr (!O::kUsesAmx) {
                                if (p.gathers()) {
                                  return gathered(p, g, plan, shared, h, head, keys, buffers,
                                                  reinterpret_cast<char*>(&buffers) + bytes);
                                }
                              }
                              SweepBlocks<P>(p, g, plan, shared, h, head, keys, buffers);
                            });
          if (shared.wants.relative) {
            shared.AddRelative(p, h, first_group[static_cast<size_t>(s)] + group, buffers.relative);
          }
        }
      }
    }
  });
  shared.Finish(ctx, p, g);
}

template <class P>
Passes BackwardPasses() {
  return {.backward = &Backward<P>, .backward_workspace = &BackwardWorkspace<P>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_BACKWARD_TASKS_INL_H_

// The backward pass over gathered rows: rows that are computed together because they keep the same tile, wherever they
// are in the sequence.
//
// Compiled once per SIMD target and dtype. A key takes its rows, and a row its keys, in the order of backward-inl.h, so
// the bits are the same. gathered-inl.h says what a panel is.
#if defined(HEED_ENGINES_SOFTMAX_BACKWARD_GATHERED_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BACKWARD_GATHERED_GRADIENTS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BACKWARD_GATHERED_GRADIENTS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BACKWARD_GATHERED_GRADIENTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/ticket.h"
#include "heed/engines/softmax/backward/backward-inl.h"
#include "heed/engines/softmax/backward/backward.h"
#include "heed/engines/softmax/forward/gathered.h"
#include "heed/engines/softmax/backward/gradient_buffers-inl.h"
#include "heed/engines/softmax/backward/gradient_rows-inl.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Passes over the panels from the last to the first and, tile by tile, over the rows that keep a tile of the group. The
// ordered reduction of dq has one ticket per panel, which every group of the head takes in turn.
template <class P>
struct GatheredSweep {
  using O = typename P::Operands;
  using T = typename O::Compute;
  static constexpr size_t kWords = O::kGrid.tile / BlockSparseMask::kKeys;
  // Rows that share a word of the products are gathered together, so that no sum depends on which rows keep a tile.
  static constexpr int64_t kTogether = static_cast<int64_t>(P::kStep);

  std::vector<Panel> panels;
  int64_t most_rows = 0;

  struct Buffers {
    GatheredRow<kWords>* rows;
    T* dq;  // [slot]
    bool* touched;

    int64_t LayOut(const Problem& p, int64_t most, void* base) {
      Carver carver(base);
      carver.Next(rows, most);
      carver.Next(dq, most * P::Row(p.depth));
      carver.Next(touched, most);
      return carver.bytes();
    }
  };

  GatheredSweep(const Problem& p, const Plan& plan, int num_threads) {
    if (!p.gathers()) return;
    const int64_t bytes = p.depth * static_cast<int64_t>(sizeof(T));
    panels = PanelsOf(p, plan.lanes, P::kFuseHeads, WantedRows(p, num_threads, bytes));
    most_rows = MostRows(panels, plan.lanes);
  }

  // Returns the bytes that a thread needs besides its GradientBuffers.
  int64_t Bytes(const Problem& p) const { return most_rows == 0 ? 0 : Buffers().LayOut(p, most_rows, nullptr); }

  // Adds the contributions of the rows of a key head to the gradients of a group. `memory` holds this thread's Buffers.
  HWY_INLINE void operator()(const Problem& p, const Gradients& g, const Plan& plan, const SharedGradients<T>& shared,
                             int64_t key_head, const Head<O>& head, Group<P>& group, GradientBuffers<P>& b,
                             void* memory) const {
    Buffers own;
    own.LayOut(p, most_rows, memory);
    const Sequence& s = p.sequences[static_cast<size_t>(group.sequence)];
    const BlockGrid grid(p, s, plan.lanes, P::kFuseHeads);
    const auto of_head =
        std::ranges::equal_range(panels, std::pair(group.sequence, key_head), {},
                                 [](const Panel& panel) { return std::pair(panel.sequence, panel.key_head); });
    for (auto panel = of_head.end(); panel != of_head.begin();) {
      --panel;
      const int64_t slots = (panel->end - panel->first) * grid.lanes;
      std::fill_n(own.touched, slots, false);
      for (int64_t begin = group.keys.begin; begin < group.keys.end; begin += O::kGrid.tile) {
        const size_t count = Gather<kWords, kTogether>(p, grid, *panel, begin, own.rows);
        Tiles(p, s, g, shared, key_head, head, group, b, own, begin, {own.rows, count});
      }
      if (!shared.wants.any_row_sum) continue;
      TicketCounter& ticket = shared.tickets[shared.index->first_ticket[static_cast<size_t>(group.sequence)] +
                                             key_head * grid.blocks + panel->first];
      WaitForTicket(ticket, group.index);
      for (int64_t slot = 0; slot < slots; ++slot) {
        if (!own.touched[slot]) continue;
        const BlockGrid::Row row = grid.At(panel->first + slot / grid.lanes, slot % grid.lanes);
        AddScaledRow(static_cast<T>(p.scale), own.dq + slot * P::Row(p.depth), p.depth,
                     shared.DqRow(p, g, group.sequence, key_head * grid.heads + row.head, row.query));
      }
      ReleaseTicket(ticket);
    }
  }

 private:
  // Computes one tile, in blocks of the rows that keep it, from the last block to the first.
  HWY_INLINE void Tiles(const Problem& p, const Sequence& s, const Gradients& g, const SharedGradients<T>& shared,
                        int64_t key_head, const Head<O>& head, Group<P>& group, GradientBuffers<P>& b,
                        const Buffers& own, int64_t begin, std::span<const GatheredRow<kWords>> rows) const {
    constexpr size_t W = P::kVectors * hn::MaxLanes(hn::ScalableTag<T>());
    while (!rows.empty()) {
      const size_t first = FirstOfLastBlock<kTogether>(rows, W);
      const auto some = rows.subspan(first);
      BlockGrid::Row chosen[W];
      uint64_t words[W][kWords];
      T* dq[W];
      for (size_t lane = 0; lane < some.size(); ++lane) {
        const GatheredRow<kWords>& row = some[lane];
        chosen[lane] = row.row;
        std::copy_n(row.words, kWords, words[lane]);
        dq[lane] = own.dq + row.slot * P::Row(p.depth);
        if (!own.touched[row.slot]) std::fill_n(dq[lane], P::Row(p.depth), T{0});
        own.touched[row.slot] = true;
      }
      const BlockGrid grid(p, {chosen, some.size()});
      BackwardBlock<P>(p, s, grid, key_head, 0, head, g, shared, group, b).ComputeTile(begin, words, dq);
      rows = rows.first(first);
    }
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_GATHERED_GRADIENTS_INL_H_

// Attention forward for patterns in which neighbouring rows keep different tiles (block-sparse attention with a tile
// list per row). A panel is a range of consecutive rows. Tile by tile, the rows of the panel that keep the tile are
// gathered into full blocks, and the softmax state of each row stays in memory between its tiles.
//
// Compiled once per SIMD target and dtype. Each row takes its own tiles in the order and with the arithmetic of
// forward-inl.h, whose blocks would process the other tiles as no-ops for this row, so the bits are the same. The cost
// beside the products is moving states between rows and lanes, 4 Dv numbers per row and tile, and packing the queries
// again for each tile.
#if defined(HEED_ENGINES_SOFTMAX_FORWARD_GATHERED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_FORWARD_GATHERED_INL_H_
#undef HEED_ENGINES_SOFTMAX_FORWARD_GATHERED_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_FORWARD_GATHERED_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/softmax/block/exponentials-inl.h"
#include "heed/engines/softmax/forward/forward-inl.h"
#include "heed/engines/softmax/forward/gathered.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/block/rows-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The softmax states of a panel's rows: of the segment that each row is in, and of the segments before it.
template <class O>
struct PanelStates {
  using T = typename O::Compute;
  static constexpr size_t kWords = O::kGrid.tile / BlockSparseMask::kKeys;
  enum Part { kSegment, kTotal };
  struct Row {
    KeyRuns runs;      // the keys that the row sees
    T max[2], sum[2];  // of each part
    int32_t segment;   // the segment that the row is in; -1: none yet
    bool has_total;
    bool swapped;  // the outputs of the two parts have changed places
  };
  Row* rows;       // [slot]
  T* outputs[2];   // [place][slot][stride]
  int64_t stride;  // of a row of outputs, in elements
  GatheredRow<kWords>* gathered;

  static int64_t BytesOfRow(const Problem& p) {
    return 2 * p.value_depth * static_cast<int64_t>(sizeof(T)) + static_cast<int64_t>(sizeof(Row));
  }

  T* Outputs(Part part, int64_t slot) const {
    return outputs[(part == kTotal) != rows[slot].swapped ? 1 : 0] + slot * stride;
  }

  void Clear(Part part, int64_t slot, T max) const {
    rows[slot].max[part] = max;
    rows[slot].sum[part] = 0;
    std::fill_n(Outputs(part, slot), stride, T{0});
  }

  int64_t LayOut(const Problem& p, int64_t num_rows, void* base) {
    constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
    stride = (p.value_depth + N - 1) / N * N;
    Carver carver(base);
    carver.Next(rows, num_rows);
    carver.Next(outputs[kSegment], num_rows * stride);
    carver.Next(outputs[kTotal], num_rows * stride);
    carver.Next(gathered, num_rows);
    return carver.bytes();
  }
};

// Rows that keep one tile; at the end of a panel, a block of the grid whose outputs are stored.
template <class O, int C>
class GatheredBlock : ForwardBlock<O, C> {
  using Base = ForwardBlock<O, C>;
  using States = PanelStates<O>;
  using typename Base::T;
  using typename Base::V;
  using Base::d_, Base::N, Base::W, Base::num_rows_, Base::layout_, Base::outputs_, Base::totals_, Base::max_,
      Base::sum_, Base::p_;

 public:
  using Base::Base;

  // Adds one tile to the states of rows in these slots.
  template <bool kFlagMasked>
  HWY_ATTR void Add(const States& states, const GatheredRow<States::kWords>* rows, int64_t begin) {
    uint64_t words[W][States::kWords];
    int64_t slots[W];
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      slots[lane] = rows[lane].slot;
      std::copy_n(rows[lane].words, States::kWords, words[lane]);
      this->rows_[lane] = rows[lane].row;
      this->of_[lane] = &this->s_;
      this->runs_[lane] = states.rows[slots[lane]].runs;
    }
    this->Prepare();
    this->ForTile(begin, words, [&](const Tile& tile) HWY_ATTR {
      BeginSegment(states, slots, static_cast<int32_t>(tile.segment));
      V m[C], l[C];
      Load(states, States::kSegment, slots, outputs_);
      for (int c = 0; c < C; ++c) {
        m[c] = hn::Load(d_, max_ + static_cast<size_t>(c) * N);
        l[c] = hn::Load(d_, sum_ + static_cast<size_t>(c) * N);
      }
      this->template RescaledTile<kFlagMasked>(tile, /*first=*/false, m, l);
      this->Store(m, l, max_, sum_);
      T* to[W];
      for (size_t lane = 0; lane < num_rows_; ++lane) {
        states.rows[slots[lane]].max[States::kSegment] = max_[lane];
        states.rows[slots[lane]].sum[States::kSegment] = sum_[lane];
        to[lane] = states.Outputs(States::kSegment, slots[lane]);
      }
      LanesToWholeRows(d_, outputs_, W, static_cast<size_t>(p_.value_depth), to, num_rows_);
    });
  }

  // Stores the outputs of consecutive slots. Returns false and stores nothing if a masked value has leaked into an
  // output.
  template <bool kFlagMasked>
  HWY_ATTR bool Write(const States& states, int64_t first_slot) {
    int64_t slots[W];
    for (size_t lane = 0; lane < num_rows_; ++lane) slots[lane] = first_slot + static_cast<int64_t>(lane);
    BeginSegment(states, slots, /*segment=*/-1);
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      if (!states.rows[slots[lane]].has_total) states.Clear(States::kTotal, slots[lane], T{0});
    }
    Load(states, States::kTotal, slots, totals_);
    if (!kFlagMasked && this->MaskedLeaked()) return false;
    this->Finish();
    return true;
  }

 private:
  HWY_INLINE void Load(const States& states, typename States::Part part, const int64_t* slots, T* outputs) {
    std::fill(max_, max_ + W, -std::numeric_limits<T>::infinity());
    std::fill(sum_, sum_ + W, T{0});
    const T* from[W];
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      max_[lane] = states.rows[slots[lane]].max[part];
      sum_[lane] = states.rows[slots[lane]].sum[part];
      from[lane] = states.Outputs(part, slots[lane]);
    }
    RowsToLanes(d_, from, num_rows_, static_cast<size_t>(p_.value_depth), T{1}, W, outputs);
  }

  // Merges the segment of each row that is in another one into the row's total, and begins this segment.
  HWY_INLINE void BeginSegment(const States& states, const int64_t* slots, int32_t segment) {
    int64_t ended[W];
    size_t count = 0;
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      const int64_t slot = slots[lane];
      const auto& row = states.rows[slot];
      if (row.segment == segment || row.segment < 0) continue;
      if (row.has_total) {
        ended[count++] = slot;
      } else {
        MoveToTotal(states, slot);
      }
    }
    if (count > 0) MergeIntoTotals(states, ended, count);
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      const int64_t slot = slots[lane];
      if (states.rows[slot].segment == segment) continue;
      states.rows[slot].segment = segment;
      states.Clear(States::kSegment, slot, -std::numeric_limits<T>::infinity());
    }
  }

  HWY_INLINE void MoveToTotal(const States& states, int64_t slot) {
    auto& row = states.rows[slot];
    row.max[States::kTotal] = row.max[States::kSegment];
    row.sum[States::kTotal] = row.sum[States::kSegment];
    row.swapped = !row.swapped;
    row.has_total = true;
  }

  // Merges like ForwardBlock::Merge.
  HWY_NOINLINE void MergeIntoTotals(const States& states, const int64_t* slots, size_t count) {
    HWY_ALIGN T max[2][W] = {}, sum[2][W] = {};
    for (size_t i = 0; i < count; ++i) {
      for (const int part : {0, 1}) {
        max[part][i] = states.rows[slots[i]].max[part];
        sum[part][i] = states.rows[slots[i]].sum[part];
      }
    }
    for (size_t i = 0; i < count; i += N) {
      const V old = hn::Load(d_, max[States::kTotal] + i), own = hn::Load(d_, max[States::kSegment] + i);
      const V merged = hn::Max(old, own), shift = this->Shift(merged);
      const V keep = Weight(d_, hn::Sub(old, shift)), add = Weight(d_, hn::Sub(own, shift));
      const V sums = hn::MulAdd(hn::Load(d_, sum[States::kSegment] + i), add,
                                hn::Mul(hn::Load(d_, sum[States::kTotal] + i), keep));
      HWY_ALIGN T of_total[2][N];
      hn::Store(merged, d_, of_total[0]);
      hn::Store(sums, d_, of_total[1]);
      for (size_t j = 0; j < std::min(N, count - i); ++j) {
        states.rows[slots[i + j]].max[States::kTotal] = of_total[0][j];
        states.rows[slots[i + j]].sum[States::kTotal] = of_total[1][j];
      }
      hn::Store(keep, d_, max[States::kTotal] + i);
      hn::Store(add, d_, max[States::kSegment] + i);
    }
    for (size_t i = 0; i < count; ++i) {
      const V keep = hn::Set(d_, max[States::kTotal][i]), add = hn::Set(d_, max[States::kSegment][i]);
      T* total = states.Outputs(States::kTotal, slots[i]);
      const T* own = states.Outputs(States::kSegment, slots[i]);
      for (int64_t e = 0; e < states.stride; e += int64_t{N}) {
        hn::Store(hn::MulAdd(hn::Load(d_, own + e), add, hn::Mul(hn::Load(d_, total + e), keep)), d_, total + e);
      }
    }
  }
};

// Computes the rows of a panel. Returns false, with some rows possibly not stored, if a masked value has leaked into an
// output.
template <class O, int C, bool kFlagMasked>
HWY_NOINLINE bool RunPanel(const Problem& p, const Plan& plan, const Panel& panel, Workspace<O>& w, const Head<O>& head,
                           const PanelStates<O>& states) {
  constexpr int64_t kTile = O::kGrid.tile;
  const Sequence& s = p.sequences[static_cast<size_t>(panel.sequence)];
  const BlockGrid grid(p, s, plan.rows);
  for (int64_t block = panel.first; block < panel.end; ++block) {
    auto* row = states.rows + (block - panel.first) * grid.lanes;
    for (int64_t lane = 0; lane < grid.NumRows(block); ++lane, ++row) {
      row->runs = VisibleKeys(p, s, grid.At(block, lane).query);
      row->segment = -1;
      row->has_total = row->swapped = false;
    }
  }
  for (int64_t begin = s.key_begin; begin < s.key_end; begin += kTile) {
    const auto count = static_cast<int64_t>(Gather(p, grid, panel, begin, states.gathered));
    for (int64_t first = 0; first < count; first += plan.rows) {
      const int64_t some = std::min(plan.rows, count - first);
      BlockGrid::Row rows[C * hn::MaxLanes(hn::ScalableTag<typename O::Compute>())];
      for (int64_t i = 0; i < some; ++i) rows[i] = states.gathered[first + i].row;
      const BlockGrid chosen(p, {rows, static_cast<size_t>(some)});
      GatheredBlock<O, C>(p, s, chosen, panel.key_head, 0, w, head)
          .template Add<kFlagMasked>(states, states.gathered + first, begin);
    }
  }
  for (int64_t block = panel.first; block < panel.end; ++block) {
    GatheredBlock<O, C> rows(p, s, grid, panel.key_head, block, w, head);
    if (!rows.template Write<kFlagMasked>(states, (block - panel.first) * grid.lanes)) return false;
  }
  return true;
}

// The division of a problem into panels, and the memory that a thread needs besides its workspace.
template <class O>
struct GatheredPlan {
  Plan plan;
  std::vector<Panel> panels;
  int64_t most_rows;

  GatheredPlan(const Problem& p, int num_threads)
      : plan(MakePlan<O>(p, O::kMostVectors)),
        panels(PanelsOf(p, plan.rows, /*fuse_heads=*/true, WantedRows(p, num_threads, PanelStates<O>::BytesOfRow(p)))),
        most_rows(MostRows(panels, plan.rows)) {}

  int64_t Bytes(const Problem& p) const { return PanelStates<O>().LayOut(p, most_rows, nullptr); }
};

template <class O>
void RunGathered(Context& ctx, const Problem& p) {
  constexpr int C = O::kMostVectors;
  const GatheredPlan<O> cut(p, ctx.num_threads());
  ReserveWorkspaces<O>(ctx, cut.plan, cut.Bytes(p));
  ctx.ParallelFor(std::ssize(cut.panels), [&](int64_t index, int worker) HWY_ATTR {
    const Panel& panel = cut.panels[static_cast<size_t>(index)];
    Workspace<O>& w = WorkspaceOf<O>(ctx, worker);
    PanelStates<O> states;
    states.LayOut(p, cut.most_rows, reinterpret_cast<char*>(&w) + Workspace<O>::Bytes(cut.plan));
    const Head<O> head = HeadOf(p, cut.plan, panel.sequence, panel.key_head, w);
    if (RunPanel<O, C, /*kFlagMasked=*/false>(p, cut.plan, panel, w, head, states)) return;
    RunPanel<O, C, /*kFlagMasked=*/true>(p, cut.plan, panel, w, head, states);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_FORWARD_GATHERED_INL_H_

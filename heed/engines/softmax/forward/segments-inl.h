// Split-KV: blocks of rows whose keys are divided among tasks. A split is a number of whole segments; the states of all
// segments are kept until the last task of the block merges them in ascending order. Where several sequences share
// their first keys, the states of these segments come from blocks of the queries of all of them.
//
// Compiled once per SIMD target. A segment's state and the order of merging depend neither on the splits nor on which
// task computed it, so the bits do not either.
#if defined(HEED_ENGINES_SOFTMAX_FORWARD_SEGMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_FORWARD_SEGMENTS_INL_H_
#undef HEED_ENGINES_SOFTMAX_FORWARD_SEGMENTS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_FORWARD_SEGMENTS_INL_H_
#endif

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>

#include "heed/core/carver.h"
#include "heed/core/context.h"
#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int64_t kTasksPerThread = 4;

struct SegmentsPerSplit {
  int64_t count;
};

// The states (m, l, O) of all segments of all blocks, in memory that threads share.
template <class O>
class SegmentStates {
  using T = typename O::Compute;
  static constexpr int64_t kSegment = O::kGrid.segment;

 public:
  // Chooses the number of splits per block: one where there are enough blocks for the threads.
  SegmentStates(const Problem& p, const Plan& plan, int64_t num_blocks, int num_threads)
      : lanes_(plan.lanes), outputs_(plan.outputs), num_blocks_(num_blocks) {
    for (const Sequence& s : p.sequences) {
      segments_ = std::max(segments_, (s.key_end - s.key_begin + kSegment - 1) / kSegment);
    }
    const int64_t wanted = kTasksPerThread * num_threads;
    if (num_threads > 1 && num_blocks > 0 && num_blocks < wanted) {
      num_splits_ = std::clamp<int64_t>(wanted / num_blocks, 1, std::max<int64_t>(segments_, 1));
    }
    kept_ = num_splits_ > 1 || !p.shared.empty();
  }

  // The states of `num_blocks` blocks whose splits have per_split segments each, counted from the first key.
  SegmentStates(const Problem& p, const Plan& plan, int64_t num_blocks, SegmentsPerSplit per_split)
      : SegmentStates(p, plan, num_blocks, /*num_threads=*/1) {
    segments_per_split_ = per_split.count;
    num_splits_ = (segments_ + per_split.count - 1) / per_split.count;
    kept_ = true;
  }

  int64_t num_splits() const { return num_splits_; }
  // Returns 0 if not fixed: the splits then divide the visible segments evenly.
  int64_t segments_per_split() const { return segments_per_split_; }
  bool kept() const { return kept_; }

  // Returns the bytes of the states, 0 if none are kept. Begin() lays them out and marks all of them empty.
  int64_t Bytes() const { return kept_ ? SegmentStates(*this).LayOut(nullptr) : 0; }
  void Begin(void* memory) {
    if (!kept_) return;
    LayOut(memory);
    std::fill(visited_, visited_ + num_blocks_ * segments_, uint8_t{0});
    for (int64_t i = 0; i < num_blocks_; ++i) new (missing_ + i) std::atomic<int64_t>(num_splits_);
  }

  struct State {
    uint8_t* visited;
    T *max, *sum, *outputs;
  };
  int64_t segments() const { return segments_; }
  State At(int64_t block, int64_t segment) const {
    const int64_t i = block * segments_ + segment;
    T* at = states_ + i * (2 * lanes_ + outputs_);
    return {visited_ + i, at, at + lanes_, at + 2 * lanes_};
  }

  // Prepares a state whose rows will be filled one by one from other blocks.
  void Expect(int64_t block, int64_t segment) const {
    const State state = At(block, segment);
    *state.visited = 1;
    std::fill(state.max, state.max + lanes_, -std::numeric_limits<T>::infinity());
    std::fill(state.sum, state.sum + lanes_, T{0});
  }

  // Returns true for the last split of a block to finish, which sees everything that the others wrote.
  bool IsLast(int64_t block) const { return missing_[block].fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  int64_t LayOut(void* memory) {
    Carver carver(memory);
    carver.Next(missing_, num_blocks_);
    carver.Next(visited_, num_blocks_ * segments_);
    carver.Next(states_, num_blocks_ * segments_ * (2 * lanes_ + outputs_));
    return carver.bytes();
  }

  int64_t lanes_, outputs_, num_blocks_, segments_ = 0, num_splits_ = 1, segments_per_split_ = 0;
  bool kept_ = false;
  std::atomic<int64_t>* missing_ = nullptr;
  uint8_t* visited_ = nullptr;
  T* states_ = nullptr;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_FORWARD_SEGMENTS_INL_H_

// Combines the splits of split-KV: a block merges the softmax states and outputs of a row's segments in order.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_COMBINE_BLOCK_H_
#define HEED_ENGINES_SOFTMAX_CUDA_COMBINE_BLOCK_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/cuda/row_states.h"
#include "heed/engines/softmax/key_runs.h"

namespace heed::softmax::cuda {

inline constexpr int kCombineThreads = 128;

// Combines query block(0) of head block(1) of sequence block(2). Each thread owns some channels and merges all states.
template <class M>
class CombineBlock {
 public:
  HEED_DEVICE CombineBlock(M& m, const ForwardParams& p)
      : m_(m), p_(p), s_(p.sequences[m.block(2)]), unit_(IsGeneral(p) ? 1 : p.scale) {}

  HEED_DEVICE void Run() {
    const int query = m_.block(0), head = m_.block(1);
    const int64_t segments = SegmentsOf(s_);
    if (query >= s_.num_queries || segments <= 1) return;  // the forward block has finished these rows
    const int64_t first_split = s_.splits + (static_cast<int64_t>(head) * s_.num_queries + query) * segments;
    const KeyRuns runs = KeyRunsOf(p_, s_, query);
    for (int channel = m_.thread(); channel < p_.value_depth; channel += m_.num_threads()) {
      SoftmaxState terms = {-INFINITY, 0};
      float x = 0;
      int64_t next = 0;
      for (const Interval& keys : {runs.first, runs.second}) {
        if (keys.empty()) continue;
        const int64_t begin = SegmentOf(keys.begin);
        for (next = next < begin ? begin : next; next <= SegmentOf(keys.end - 1); ++next) {
          const int64_t split = first_split + next;
          const SoftmaxState since = p_.split_states[split];
          const MergedStates<M> both(terms, since, unit_);
          x = both.Sum(x, p_.split_outputs[split * p_.split_channels + channel]);
          terms = {both.max(), both.Sum(terms.sum, since.sum)};
        }
      }
      const RowEnd end = EndOf<M>(p_, p_.dtype, terms, unit_, head);
      const int64_t o = s_.o + query * p_.o_strides.token + head * p_.o_strides.head;
      heed::cuda::StoreFloat<M>(p_.o, p_.dtype, o + channel, x * end.factor);
      if (channel == 0 && p_.lse != nullptr) {
        p_.lse[s_.lse + query * p_.lse_strides.token + head * p_.lse_strides.head] = end.lse;
      }
    }
  }

 private:
  HEED_DEVICE int64_t SegmentOf(int64_t key) const { return (key - s_.key_begin) / kSegmentKeys; }

  M& m_;
  const ForwardParams& p_;
  const DeviceSequence& s_;
  const float unit_;
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_COMBINE_BLOCK_H_

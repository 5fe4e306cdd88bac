// Logits of pairs beyond scaled products, masks and dropout, for all passes on a GPU.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_PAIR_LOGITS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_PAIR_LOGITS_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/core/philox.h"
#include "heed/cuda/machine.h"
#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/key_runs.h"

namespace heed::softmax::cuda {

// A row of a sequence: query and head.
struct Row {
  int query, head;
};

HEED_DEVICE bool Sees(const KeyRuns& runs, int64_t key) {
  return (runs.first.begin <= key && key < runs.first.end) || (runs.second.begin <= key && key < runs.second.end);
}

// The keys that rows [first, last] of a sequence see: some row sees keys [begin, end) except `gap`, all rows see
// `common`. Intervals move up with the query.
struct BlockKeys {
  int64_t begin = 0, end = 0;
  Interval gap, common;

  HEED_DEVICE bool Skips(const Interval& keys) const {
    return keys.end <= begin || keys.begin >= end || gap.Contains(keys);
  }
};

HEED_DEVICE BlockKeys KeysOf(const ForwardParams& p, const DeviceSequence& s, int first, int last) {
  BlockKeys keys;
  if (first >= s.query_end) return keys;
  const bool all_see = last < s.query_end;
  if (!all_see) last = static_cast<int>(s.query_end) - 1;
  const KeyRuns of_first = KeyRunsOf(p, s, first), of_last = KeyRunsOf(p, s, last);
  const auto begin_of = [](const KeyRuns& x) { return x.first.empty() ? x.second.begin : x.first.begin; };
  const auto end_of = [](const KeyRuns& x) { return x.second.empty() ? x.first.end : x.second.end; };
  // A row between the first and the last may see keys even if these two see none.
  keys.begin = of_first.size() == 0 || of_last.size() == 0
                   ? s.key_begin
                   : (begin_of(of_first) < begin_of(of_last) ? begin_of(of_first) : begin_of(of_last));
  keys.end = of_last.size() == 0 ? s.key_end : end_of(of_last);
  if (of_first.size() != 0 && end_of(of_first) > keys.end) keys.end = end_of(of_first);
  if (!of_first.first.empty() && !of_first.second.empty() && !of_last.first.empty()) {
    keys.gap = {of_last.first.end, of_first.second.begin};
  }
  if (all_see) keys.common = Intersect(of_first.second, of_last.second);
  if (keys.common.empty()) keys.common = {};
  return keys;
}

template <class M>
HEED_DEVICE float NumberOf(const DeviceNumbers& numbers, int64_t first, int head) {
  return heed::cuda::LoadFloat<M>(numbers.data, numbers.dtype, first + head * numbers.head_stride);
}

// Logits of general problems: those with more than scale > 0 times a product, or with dropout.
template <class M>
class PairLogits {
 public:
  HEED_DEVICE PairLogits(const ForwardParams& p, const DeviceSequence& s) : p_(p), s_(s) {}

  // True if a bias or mask differs by pair, so that every tile is masked.
  HEED_DEVICE bool ByPair() const { return p_.bias.data != nullptr || p_.mask.data != nullptr; }

  HEED_DEVICE float SlopeOf(const Row& at) const {
    return p_.slopes.data != nullptr ? NumberOf<M>(p_.slopes, s_.slopes, at.head) : 0;
  }
  HEED_DEVICE float DistanceOf(const Row& at, int64_t key) const {
    return fabsf(static_cast<float>(s_.start + at.query - key));
  }

  // Returns the scaled and soft-capped logit with ALiBi. `capped` is the capped logit over the cap.
  HEED_DEVICE float OfProduct(float x, const Row& at, int64_t key, float slope, float* capped = nullptr) const {
    x = fmaf(x, p_.scale, 0.0f);  // rounded before anything is added, so that all kernels have the same logit
    if (p_.softcap > 0) {
      const float t = tanhf(x / p_.softcap);
      if (capped != nullptr) *capped = t;
      x = p_.softcap * t;
    }
    if (p_.slopes.data != nullptr) x = fmaf(-slope, DistanceOf(at, key), x);
    return x;
  }

  // Returns the logit with the pair's bias and mask.
  HEED_DEVICE float WithPair(float x, const Row& at, int64_t key) const {
    const auto of_pair = [&](const DevicePairs& pairs, int64_t first) {
      return first + at.head * pairs.head_stride + at.query * pairs.query_stride + key * pairs.key_stride;
    };
    if (p_.bias.data != nullptr) {
      const int64_t pair = of_pair(p_.bias, s_.bias);
      const float bias = heed::cuda::LoadFloat<M>(p_.bias.data, p_.bias.dtype, pair);
      x = bias == -INFINITY ? bias : x + bias;  // -inf masks, whatever the logit
    }
    const bool kept =
        p_.mask.data == nullptr || static_cast<const uint8_t*>(p_.mask.data)[of_pair(p_.mask, s_.mask)] != 0;
    return kept ? x : -INFINITY;
  }

  // True if dropout keeps a pair. Four keys share a Philox counter.
  HEED_DEVICE bool Keeps(const Row& at, int64_t key) const {
    const auto words = Philox({static_cast<uint32_t>(key >> 2), static_cast<uint32_t>(s_.start + at.query),
                               s_.first_head + static_cast<uint32_t>(at.head), p_.dropout_offset},
                              {p_.key_low, p_.key_high});
    return words[static_cast<size_t>(key & 3)] < p_.keep_below;
  }

 private:
  const ForwardParams& p_;
  const DeviceSequence& s_;
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_PAIR_LOGITS_H_

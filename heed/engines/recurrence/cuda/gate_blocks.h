// Exponential gates (mLSTM), relative to their running maximum: log decays, and factors of values.
//
//   m_t = max(log sigmoid(f_t) + m_{t-1}, i_t)
//   log_decay_t = log sigmoid(f_t) + m_{t-1} - m_t,  factor_t = exp(i_t - m_t),  floor_t = exp(-m_t)
//
// m is a double-float sum, so that log decays near 0 keep their bits. At ends of blocks of tokens it is one float,
// because a call that continues there has it so; it is rounded up, so that no decay exceeds 1.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_GATE_BLOCKS_H_
#define HEED_ENGINES_RECURRENCE_CUDA_GATE_BLOCKS_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/numbers.h"
#include "heed/engines/recurrence/cuda/gradient_blocks.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

struct GateParams {
  DeviceRows input_gate, forget_gate;  // at the sequence's q and k offsets
  DeviceRows log_decay, factors;       // written, at the sequence's `to` offset
  float* floors = nullptr;             // written, [token][value head]
  const float* initial = nullptr;      // m; null: 0
  float* final = nullptr;              // null: not wanted
  int64_t initial_stride = 0, initial_head_stride = 0, final_stride = 0, final_head_stride = 0;
  int32_t value_heads = 1;
  GradientSequence sequences[kMostSequences] = {};
};
inline constexpr int kGateThreads = heed::cuda::kWarp;

// Scans all tokens of a value head, 32 at a time.
template <class M>
class GateBlock {
 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE GateBlock(M& m, const GateParams& p) : m_(m), p_(p), s_(p.sequences[m.block(2)]), head_(m.block(1)) {}

  HEED_DEVICE void Run() const {
    const int lane = m_.thread();
    Sum max = {p_.initial == nullptr ? 0 : p_.initial[s_.state * p_.initial_stride + head_ * p_.initial_head_stride],
               0};
    for (int64_t first = 0; first < s_.tokens; first += heed::cuda::kWarp) {
      const int64_t t = first + lane;
      const bool exists = t < s_.tokens;
      const float f = exists ? NumberOf<M>(p_.forget_gate, s_.k, t, head_, 0) : 0;
      // Missing tokens neither decay nor write.
      Step step = {{exists ? -heed::cuda::Softplus<M>(-f) : 0, 0},
                   {exists ? NumberOf<M>(p_.input_gate, s_.q, t, head_, 0) : -INFINITY, 0}};
      const Sum own = step.log_decay, arriving = step.max;
      HEED_DEVICE_UNROLL
      for (int distance = 1; distance < heed::cuda::kWarp; distance *= 2) {
        const Step before = {ShuffleSum(step.log_decay, lane - distance), ShuffleSum(step.max, lane - distance)};
        if (lane >= distance) step = Then(before, step);
      }
      Sum reached = Larger(Added(max, step.log_decay), step.max);
      if (!(reached.high >= -kLargest) && reached.high == reached.high) reached = {-kLargest, 0};
      if (exists && (t % kBlock == kBlock - 1 || t == s_.tokens - 1)) reached = RoundedUp(reached);
      const Sum previous = ShuffleSum(reached, lane - 1), kept = Added(lane == 0 ? max : previous, own);
      if (exists) {
        const int64_t of_head = s_.to + t * p_.log_decay.token_stride + head_ * p_.log_decay.head_stride;
        const float log_decay = Less(kept, reached).high;
        StoreFloat<M>(p_.log_decay, of_head, log_decay);
        StoreFloat<M>(p_.factors, of_head, Exp<M>(Less(arriving, reached)));
        p_.floors[(s_.first_token + t) * p_.value_heads + head_] =
            reached.high < -88 ? INFINITY : Exp<M>(Sum{-reached.high, -reached.low});
      }
      const int64_t left = s_.tokens - first;
      max = ShuffleSum(reached, left < heed::cuda::kWarp ? static_cast<int>(left) - 1 : heed::cuda::kWarp - 1);
    }
    if (lane == 0 && p_.final != nullptr)
      p_.final[s_.state * p_.final_stride + head_ * p_.final_head_stride] = max.high;
  }

 private:
  static constexpr float kLargest = 3.4028234e38f;

  // The effect of a run of tokens on the maximum: m becomes max(m + log_decay, max).
  struct Step {
    Sum log_decay, max;
  };
  static HEED_DEVICE Step Then(const Step& a, const Step& b) {
    return {Added(a.log_decay, b.log_decay), Larger(Added(a.max, b.log_decay), b.max)};
  }
  // The sum with `high` rounded to nearest; infinities do not make `low` NaN.
  static HEED_DEVICE Sum Added(Sum a, Sum b) {
    const Sum sum = a + b;
    const float high = sum.high + sum.low;
    return fabsf(high) <= kLargest ? Sum{high, (sum.high - high) + sum.low} : Sum{a.high + b.high, 0};
  }
  static HEED_DEVICE Sum Less(Sum a, Sum b) { return Added(a, {-b.high, -b.low}); }
  static HEED_DEVICE Sum Larger(Sum a, Sum b) {
    if (a.high != a.high) return a;  // NaN propagates
    return a.high > b.high || (a.high == b.high && a.low > b.low) ? a : b;
  }
  // Rounds a double-float sum up to one float.
  static HEED_DEVICE Sum RoundedUp(Sum x) { return {x.low > 0 ? nextafterf(x.high, INFINITY) : x.high, 0}; }
  HEED_DEVICE Sum ShuffleSum(Sum sum, int lane) const {
    lane &= heed::cuda::kWarp - 1;
    return {m_.Shuffle(sum.high, lane), m_.Shuffle(sum.low, lane)};
  }

  M& m_;
  const GateParams& p_;
  const GradientSequence& s_;
  const int head_;
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_GATE_BLOCKS_H_

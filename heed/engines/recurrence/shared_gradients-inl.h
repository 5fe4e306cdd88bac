// Gradients that are sums over tasks: of decays per head, of u, and of the projection of random features.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_RECURRENCE_SHARED_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_SHARED_GRADIENTS_INL_H_
#undef HEED_ENGINES_RECURRENCE_SHARED_GRADIENTS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_SHARED_GRADIENTS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "heed/core/ticket.h"
#include "heed/engines/recurrence/backward_buffers-inl.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/random_features-inl.h"
#include "heed/engines/recurrence/tasks.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// The derivative of a token's log decay with respect to its forget gate, 1 - sigmoid(f); 1 if there is none.
template <class T>
T ForgetGateSlope(const Problem& p, const Sequence& s, int64_t head, int64_t token) {
  if (!p.exp_gates) return 1;
  const Rows& gates = p.forget_gate;
  const auto f = static_cast<T>(LoadAsDouble(gates.dtype, gates.data, NumberAt(gates, s, head, token)));
  return 1 / (1 + std::exp(f));
}

// Computes the gradient of one head's scalar decays in all sequences from DecayParts().
template <class T>
HWY_NOINLINE HWY_ATTR void SumDecayGradients(const Problem& p, const Gradients& g, const SharedBuffers<T>& shared,
                                             int64_t head) {
  double total = 0;
  for (size_t i = 0; i < p.sequences.size(); ++i) {
    const Sequence& s = p.sequences[i];
    const double* parts = shared.DecayParts(p, static_cast<int64_t>(i), head);
    for (int64_t block = NumBlocks(s.count) - 1; block >= 0; --block) {
      const int64_t begin = block * kBlockTokens;
      double later = 0;
      for (int64_t t = std::min(begin + kBlockTokens, s.count) - 1; t >= begin; --t) {
        double sum = 0;
        for (int64_t unit = 0; unit < shared.units; ++unit) {
          sum += parts[unit * s.count + t];
        }
        later += sum;
        if (p.constant_decay) {
          total += later;
        } else {
          const T slope = ForgetGateSlope<T>(p, s, head, t);
          StoreNumber(g.d_log_decay, s, head, t, later * static_cast<double>(slope));
        }
      }
    }
  }
  if (p.constant_decay) {
    StoreDouble(g.d_log_decay.dtype, const_cast<void*>(g.d_log_decay.data), head * g.d_log_decay.head_stride, total);
  }
}

// Adds a key head's part of the gradient of the projection, in the order of tasks. The last value head of the key head
// has it.
template <class T>
HWY_NOINLINE HWY_ATTR void AddToProjection(const Problem& p, const Task& task, const BackwardBuffers<T>& b,
                                           const SharedBuffers<T>& shared) {
  if ((task.head + 1) % p.group() != 0) return;
  WaitForTicket(*shared.projection_counter, task.place * p.key_heads + task.head / p.group());
  ForStateElements(hn::ScalableTag<T>(), ProjectionShape<T>(p), [&](size_t i, size_t r, size_t c) HWY_ATTR {
    shared.d_projection[r * static_cast<size_t>(p.key_size) + c] += static_cast<double>(b.d_projection[i]);
  });
  ReleaseTicket(*shared.projection_counter);
}

inline void StoreProjectionGradient(const Problem& p, const Gradients& g, const double* sums) {
  for (int64_t r = 0; r < p.projection_rows; ++r) {
    for (int64_t c = 0; c < p.key_size; ++c) {
      StoreDouble(g.d_projection.dtype, const_cast<void*>(g.d_projection.data), r * g.d_projection.token_stride + c,
                  sums[r * p.key_size + c]);
    }
  }
}

// Stores the gradient of constants per value head, which is a sum over sequences.
template <class T>
void StoreConstants(const Problem& p, const SharedBuffers<T>& shared, double* sums, const Rows& to) {
  for (int64_t head = 0; to.data != nullptr && head < p.value_heads; ++head) {
    for (int64_t i = 0; i < p.key_size; ++i) {
      double total = 0;
      for (size_t s = 0; s < p.sequences.size(); ++s) {
        total += shared.ConstantsOf(sums, p, static_cast<int64_t>(s), head)[i];
      }
      StoreDouble(to.dtype, const_cast<void*>(to.data), head * to.head_stride + i, total);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_SHARED_GRADIENTS_INL_H_

// One channel of RG-LRU in double, with all intermediate values.
#ifndef HEED_OPS_GATED_RG_LRU_RG_LRU_REFERENCE_INTERNAL_H_
#define HEED_OPS_GATED_RG_LRU_RG_LRU_REFERENCE_INTERNAL_H_

#include <cstddef>
#include <functional>

#include "heed/ops/gated/rg_lru/rg_lru.h"
#include "heed/mechanism/reference/scanning_reference_internal.h"

namespace heed::rg_lru {

using scanning::Doubles;

struct ReferenceChannel {
  scanning::ReferencePlace place;
  double c = 0, lambda = 0, rate = 0;  // rate: -c softplus(lambda)
  bool begins = false;                 // no initial state: the first root is 1
  Doubles x, input, recurrence;        // [T]: gates after their sigmoids
  Doubles raw_input, raw_recurrence;   // gates before their sigmoids
  Doubles log_a, a, root, written;     // [T]
  Doubles h;                           // [T + 1]: states before and after tokens

  size_t T() const { return x.size(); }
  bool is_first(size_t t) const { return begins && t == 0; }
};
void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f);

struct ReferenceGradients {
  Doubles p, q;                             // gradient of h: p [T + 1] before the contribution of o_t, with p[T] given;
                                            // q [T] after it
  Doubles slope;                            // [T]: a^2 / root, the derivative of the root, at most 1000
  Doubles dx, dinput, drecurrence, dlog_a;  // [T]
};
ReferenceGradients GradientsOf(const BackwardInputs& in, const ReferenceChannel& c);

}  // namespace heed::rg_lru

#endif  // HEED_OPS_GATED_RG_LRU_RG_LRU_REFERENCE_INTERNAL_H_

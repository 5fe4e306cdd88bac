// One channel of HGRN in double, with all intermediate values.
#ifndef HEED_OPS_GATED_HGRN_HGRN_REFERENCE_INTERNAL_H_
#define HEED_OPS_GATED_HGRN_HGRN_REFERENCE_INTERNAL_H_

#include <cstddef>
#include <functional>

#include "heed/ops/gated/hgrn/hgrn.h"
#include "heed/mechanism/reference/scanning_reference_internal.h"

namespace heed::hgrn {

using scanning::Doubles;

struct ReferenceChannel {
  scanning::ReferencePlace place;
  Doubles x, g, a;  // [T]: g clamped to at most 0, a = e^g
  Doubles h;        // [T + 1]: states before and after tokens

  size_t T() const { return x.size(); }
};
void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f);

struct ReferenceGradients {
  Doubles p, q;  // gradient of h: p [T + 1] before the contribution of o_t, with p[T] given; q [T] after it
};
ReferenceGradients GradientsOf(const BackwardInputs& in, const ReferenceChannel& c);

}  // namespace heed::hgrn

#endif  // HEED_OPS_GATED_HGRN_HGRN_REFERENCE_INTERNAL_H_

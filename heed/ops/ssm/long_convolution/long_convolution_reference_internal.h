// One channel of a long convolution in double, with all intermediate values.
#ifndef HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_REFERENCE_INTERNAL_H_
#define HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_REFERENCE_INTERNAL_H_

#include <cstddef>
#include <functional>

#include "heed/mechanism/reference/scanning_reference_internal.h"
#include "heed/ops/ssm/long_convolution/long_convolution.h"

namespace heed::long_convolution {

using scanning::Doubles;

struct ReferenceChannel {
  scanning::ReferencePlace place;
  Doubles u;     // [T]
  Doubles taps;  // [min(L, T)]
  double D;      // 0 if absent

  size_t T() const { return u.size(); }
};
void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f);

// sum_s taps[s] x[t - s] for the first `count` tokens t.
Doubles Convolved(const Doubles& taps, const Doubles& x, size_t count);
// The gradient of o, in the order of tokens.
Doubles IncomingOf(const BackwardInputs& in, const ReferenceChannel& c);
Doubles FromItsEnd(const Doubles& x);

}  // namespace heed::long_convolution

#endif  // HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_REFERENCE_INTERNAL_H_

// One channel of S4D in double, every number of it kept.
#ifndef HEED_OPS_SSM_S4D_S4D_REFERENCE_INTERNAL_H_
#define HEED_OPS_SSM_S4D_S4D_REFERENCE_INTERNAL_H_

#include <complex>
#include <cstddef>
#include <functional>
#include <vector>

#include "heed/ops/parts/scanning_reference_internal.h"
#include "heed/ops/ssm/s4d/s4d.h"

namespace heed::s4d {

using scanning::Doubles;
using Complex = std::complex<double>;

struct ReferenceMode {
  Complex z, a, b, C;
  Complex a_slope, b_slope;  // derivatives by z, of b with dt held
};

struct ReferenceChannel {
  scanning::ReferencePlace place;
  double dt, D;
  std::vector<ReferenceMode> modes;
  Doubles u;                            // [T]
  std::vector<std::vector<Complex>> h;  // [T + 1][N]: states before and after tokens

  size_t T() const { return u.size(); }
  size_t N() const { return modes.size(); }
};
ReferenceChannel ChannelOf(const Inputs& in, const Options& options, int64_t channel);  // without tokens
void ForEachChannel(const Inputs& in, const Options& options,
                    const std::function<void(const ReferenceChannel&)>& f);

Doubles IncomingOf(const BackwardInputs& in, const ReferenceChannel& c);
// l of the tokens, [T + 1][N]: l[t] is that of the state after token t, l[T] what is given.
std::vector<std::vector<Complex>> GradientsOf(const BackwardInputs& in, const ReferenceChannel& c,
                                              const Doubles& dy);

}  // namespace heed::s4d

#endif  // HEED_OPS_SSM_S4D_S4D_REFERENCE_INTERNAL_H_

// One channel of a selective scan in double, with all intermediate values.
#ifndef HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_REFERENCE_INTERNAL_H_
#define HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_REFERENCE_INTERNAL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "heed/mechanism/reference/scanning_reference_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan.h"

namespace heed::selective_scan {

using scanning::Doubles;

struct ReferenceChannel {
  scanning::ReferencePlace place;
  int64_t N = 0, group = 0;
  bool gated = false, softplus = false;
  double D = 0;
  Doubles A;                  // [N]
  Doubles u, z, raw, s;       // [T]; raw: delta + delta_bias
  std::vector<Doubles> B, C;  // [T][N]
  std::vector<Doubles> a, h;  // [T][N] decays, [T + 1][N] states before and after tokens
  Doubles y, o;               // [T]

  int64_t T() const { return static_cast<int64_t>(u.size()); }
};
void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f);

// The contribution of a channel to the gradients.
struct ReferenceGradients {
  std::vector<Doubles> p;                         // [T + 1][N]: gradient of h before the contribution of y_t; p[T] is
                                                  // given
  std::vector<Doubles> q;                         // [T][N]: gradient of h after it
  Doubles d_o, dy, of_input, du, ds, ddelta, dz;  // [T]; of_input: <p, B>
};
ReferenceGradients GradientsOf(const BackwardInputs& in, const ReferenceChannel& c);

// Index of an element of B or C, or of their gradients, at a token.
struct WeightPlace {
  std::array<int64_t, 4> axes;
  size_t rank;

  operator std::span<const int64_t>() const { return {axes.data(), rank}; }  // NOLINT: it is an index
};
WeightPlace WeightIndex(const ConstTensorView& weights, const ReferenceChannel& c, int64_t t, int64_t n);

}  // namespace heed::selective_scan

#endif  // HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_REFERENCE_INTERNAL_H_

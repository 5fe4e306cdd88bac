// One channel of one sequence in double, for the reference and its tolerances.
#ifndef HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_REFERENCE_INTERNAL_H_
#define HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_REFERENCE_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"

namespace heed::causal_conv1d {

using Doubles = std::vector<double>;

struct ReferenceChannel {
  int64_t sequence, batch, channel;
  std::vector<int64_t> tokens;  // their indices, in the order of processing
  Doubles inputs;               // [W - 1 + tokens], the state first
  Doubles weight;               // [W]
  double bias = 0;
  bool silu = false;

  int64_t W() const { return static_cast<int64_t>(weight.size()); }
  int64_t T() const { return static_cast<int64_t>(tokens.size()); }
  double Input(int64_t t) const { return inputs[static_cast<size_t>(t + W() - 1)]; }  // t >= 1 - W
  double Preactivation(int64_t t) const;
};

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f);

// d_o of the channel's tokens, and d_final [W - 1], zeros if absent.
Doubles GradientsOfO(const BackwardInputs& in, const ReferenceChannel& c);
Doubles GradientsOfFinal(const BackwardInputs& in, const ReferenceChannel& c);

double Silu(double p);
double SiluSlope(double p);

}  // namespace heed::causal_conv1d

#endif  // HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_REFERENCE_INTERNAL_H_

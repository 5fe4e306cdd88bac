// The rows of a call of S4D in double.
#ifndef HEED_OPS_SSM_S4D_S4D_REFERENCE_INTERNAL_H_
#define HEED_OPS_SSM_S4D_S4D_REFERENCE_INTERNAL_H_

#include <functional>

#include "heed/mechanism/reference/modes_reference_internal.h"
#include "heed/ops/ssm/s4d/s4d.h"

namespace heed::s4d {

using scanning::Doubles;

inline bool IsBilinear(const Options& options) { return options.discretization == Discretization::kBilinear; }

struct ReferenceChannel : scanning::ReferenceRow {
  scanning::ReferencePlace place;
};
void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f);

Doubles IncomingOf(const BackwardInputs& in, const ReferenceChannel& c);
scanning::Complexes FinalGradientsOf(const BackwardInputs& in, const ReferenceChannel& c);

}  // namespace heed::s4d

#endif  // HEED_OPS_SSM_S4D_S4D_REFERENCE_INTERNAL_H_

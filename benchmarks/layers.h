// C++ layers, compared with the operators and matrix products that they consist of.
#ifndef BENCHMARKS_LAYERS_H_
#define BENCHMARKS_LAYERS_H_

#include <string>
#include <vector>

#include "benchmarks/gates.h"

namespace heed::bench {

// The time of each layer divided by that of its parts called one after the other. The remainder is norms, gates and
// activations. Throws std::runtime_error if a result is wrong.
std::vector<GateResult> MeasureLayers(const Rows& rows);

}  // namespace heed::bench

#endif  // BENCHMARKS_LAYERS_H_

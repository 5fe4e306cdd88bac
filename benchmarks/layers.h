// Layers of C++ beside the operators and matrix products that they are made of.
#ifndef BENCHMARKS_LAYERS_H_
#define BENCHMARKS_LAYERS_H_

#include <string>
#include <vector>

#include "benchmarks/gates.h"

namespace heed::bench {

// The time of each layer over that of its parts called one after the other: what is left are norms, gates and
// activations. Throws std::runtime_error if a result is wrong.
std::vector<GateResult> MeasureLayers(void (*progress)(const std::string&));

}  // namespace heed::bench

#endif  // BENCHMARKS_LAYERS_H_

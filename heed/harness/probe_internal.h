// What probe.cc takes from a file that is compiled for other SIMD targets.
#ifndef HEED_HARNESS_PROBE_INTERNAL_H_
#define HEED_HARNESS_PROBE_INTERNAL_H_

#include <cstdint>

namespace heed::probe {

// Chains of x <- x a + b, by pairs of bf16; stores the flops. Null if this build
// has no such instructions.
using Chains = double (*)(int64_t iterations, double x, double y, double* flops);
Chains PairChains();

}  // namespace heed::probe

#endif  // HEED_HARNESS_PROBE_INTERNAL_H_

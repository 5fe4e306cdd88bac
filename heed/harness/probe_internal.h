// The part of the probes that is compiled for other SIMD targets than probe.cc.
#ifndef HEED_HARNESS_PROBE_INTERNAL_H_
#define HEED_HARNESS_PROBE_INTERNAL_H_

#include <cstdint>

namespace heed::probe {

// Chains of x <- x a + b, by the bf16 dot product; stores the flops. Null if this build lacks the instruction.
using Chains = double (*)(int64_t iterations, double x, double y, double* flops);
Chains PairChains();

}  // namespace heed::probe

#endif  // HEED_HARNESS_PROBE_INTERNAL_H_

// Probes: measured limits of this machine, on the calling thread.
//
// A figure of speed is the ratio of a sample to a probe taken beside it in the same process: clocks, neighbours and
// thermals then cancel.
#ifndef HEED_HARNESS_PROBE_H_
#define HEED_HARNESS_PROBE_H_

#include <cstddef>
#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#include "heed/core/dtype.h"

namespace heed::probe {

// The roof of every kernel of matrix products: FMAs in registers, two flops each, in f64 or f32, on the best target
// that the mask allows. For bf16 it is the bf16 dot product if kernels use that, else f32's, as for f16. Best of
// `repeats` runs of a few milliseconds, in CPU time of this thread.
double PeakFlopsPerSecond(DType dtype, int64_t targets = kAllTargets, int repeats = 3);

// The rate of bf16 products in AMX tiles, on random numbers and after a run-in, in CPU time of this thread; 0 on CPUs
// without AMX.
double AmxFlopsPerSecond(int repeats = 3);

// The second roof of softmax: exp2 with max subtracted, summed and stored, over a block that stays in L1. Arguments and
// clock are those of PeakFlopsPerSecond.
double Exp2PerSecond(DType dtype, int64_t targets = kAllTargets, int repeats = 3);

// Reads `num_bytes` in address order with all threads of `ctx`, wall time; best of `repeats`. If they are more than
// twice the last cache, it is the roof of decoding.
double ReadBytesPerSecond(Context& ctx, const void* data, size_t num_bytes, int repeats = 5);

// Seconds, in CPU time of this thread, to read and write `num_bytes` in place in address order; best of `repeats`. It
// is the roof of state updates.
double UpdateSeconds(void* data, size_t num_bytes, int64_t targets = kAllTargets, int repeats = 5);

// ReadBytesPerSecond on 256 MiB that it allocates.
double DramBytesPerSecond(int threads = 1);

}  // namespace heed::probe

#endif  // HEED_HARNESS_PROBE_H_

// Decoding from caches, compared with a raw read of the same bytes.
#ifndef BENCHMARKS_DECODE_H_
#define BENCHMARKS_DECODE_H_

#include <string>
#include <vector>

#include "benchmarks/gates.h"

namespace heed::bench {

// One new token against caches of 256 MiB: fractions of the speed of a raw read, costs of pages and of query heads, and
// the time of a fork. Throws std::runtime_error if a result is wrong.
std::vector<GateResult> MeasureDecode(const Rows& rows);

}  // namespace heed::bench

#endif  // BENCHMARKS_DECODE_H_

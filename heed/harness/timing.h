// Timing on a machine with neighbours: clocks, and what to keep of the samples.
#ifndef HEED_HARNESS_TIMING_H_
#define HEED_HARNESS_TIMING_H_

#include <functional>
#include <vector>

namespace heed {

// One call. `clean` is false if other processes took the CPU meanwhile.
struct Sample {
  double seconds = 0;
  bool clean = true;
};

// One thread: CPU time of the calling thread, which waiting does not touch.
// More: wall time, clean if nothing was descheduled against its will.
Sample TimeOnce(int threads, const std::function<void()>& f);

// Until a sample is clean, at most `tries` times with a pause between: the
// clean one, or the fastest of the others.
Sample TimeClean(int threads, const std::function<void()>& f, int tries = 12);

struct Quartiles {
  double q1 = 0, median = 0, q3 = 0;
};

// NaN for no values; between two values where the count asks for it.
Quartiles Summarize(std::vector<double> values);

}  // namespace heed

#endif  // HEED_HARNESS_TIMING_H_

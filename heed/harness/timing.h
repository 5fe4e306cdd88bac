// Timing on a machine with neighbours: clocks, and the choice of samples.
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

// For one thread, CPU time of the calling thread, in which waiting does not count. For more, wall time, clean if no
// involuntary context switch occurred.
Sample TimeOnce(int threads, const std::function<void()>& f);

// Repeats until a sample is clean, at most `tries` times with pauses: returns the clean sample, or the fastest of the
// others.
Sample TimeClean(int threads, const std::function<void()>& f, int tries = 12);

struct Quartiles {
  double q1 = 0, median = 0, q3 = 0;
};

// NaN for no values. A quartile between two values is interpolated.
Quartiles Summarize(std::vector<double> values);

}  // namespace heed

#endif  // HEED_HARNESS_TIMING_H_

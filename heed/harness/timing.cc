// Timing: thread CPU time for one thread, wall time with a check for preemption for more.
#include "heed/harness/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <thread>

#include "heed/core/os.h"

namespace heed {
namespace {

constexpr auto kPause = std::chrono::milliseconds(30);

double WallSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Sample TimeOnce(int threads, const std::function<void()>& f) {
  if (threads == 1) {
    const double start = os::ThreadCpuSeconds();
    f();
    return {os::ThreadCpuSeconds() - start, true};
  }
  const int64_t switches = os::InvoluntaryContextSwitches();
  const double start = WallSeconds();
  f();
  const double seconds = WallSeconds() - start;
  return {seconds, os::InvoluntaryContextSwitches() == switches};
}

Sample TimeClean(int threads, const std::function<void()>& f, int tries) {
  Sample best{std::numeric_limits<double>::infinity(), false};
  for (int i = 0; i < tries; ++i) {
    if (i > 0) std::this_thread::sleep_for(kPause);
    const Sample sample = TimeOnce(threads, f);
    if (sample.clean) return sample;
    best.seconds = std::min(best.seconds, sample.seconds);
  }
  return best;
}

Quartiles Summarize(std::vector<double> values) {
  if (values.empty()) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    return {nan, nan, nan};
  }
  std::sort(values.begin(), values.end());
  const auto at = [&](double fraction) {
    const double x = fraction * static_cast<double>(values.size() - 1);
    const size_t i = static_cast<size_t>(x);
    const size_t j = std::min(i + 1, values.size() - 1);
    return std::lerp(values[i], values[j], x - static_cast<double>(i));
  };
  return {at(0.25), at(0.5), at(0.75)};
}

}  // namespace heed

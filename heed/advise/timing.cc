// StageTimes.
#include <algorithm>
#include <chrono>
#include <limits>

#include "heed/advise/timing_internal.h"
#include "heed/harness/timing.h"

namespace heed::advise {
namespace {

constexpr int kMostRuns = 50;           // for calls of microseconds; more runs do not help
constexpr double kBriefSeconds = 1e-3;  // shorter than a scheduler time slice
constexpr int kLeastOfBrief = 10;

}  // namespace

void StageTimes::Run(Context& ctx, const Call& call, int least, double seconds) {
  best_.resize(call.stages.size(), std::numeric_limits<double>::infinity());
  const auto start = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const auto is_enough = [&](int runs) {
    const int wanted = total() < kBriefSeconds ? std::max(least, kLeastOfBrief) : least;
    return runs >= wanted && (runs >= kMostRuns || passed() >= seconds);
  };
  for (int run = 0; !is_enough(run); ++run) {
    for (size_t i = 0; i < call.stages.size(); ++i) {
      best_[i] = std::min(best_[i], TimeOnce(ctx.num_threads(), [&] { call.stages[i](ctx); }).seconds);
    }
  }
}

double StageTimes::total() const {
  double sum = 0;
  for (const double seconds : best_) sum += seconds;
  return sum;
}

}  // namespace heed::advise

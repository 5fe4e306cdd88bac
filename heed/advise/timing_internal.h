// Timing of calls on a shared machine: the best of several runs.
#ifndef HEED_ADVISE_TIMING_INTERNAL_H_
#define HEED_ADVISE_TIMING_INTERNAL_H_

#include <vector>

#include "heed/advise/candidate.h"

namespace heed::advise {

// The shortest time of each stage of a call: other processes make a run longer, never shorter.
class StageTimes {
 public:
  // Runs all stages repeatedly: at least `least` times, short ones more often, and until `seconds` have passed.
  void Run(Context& ctx, const Call& call, int least, double seconds);

  const std::vector<double>& best() const { return best_; }
  double total() const;  // of all stages; infinite before the first run of one

 private:
  std::vector<double> best_;
};

}  // namespace heed::advise

#endif  // HEED_ADVISE_TIMING_INTERNAL_H_

// Timing of calls for people with neighbours: the best of several runs.
#ifndef HEED_ADVISE_TIMING_INTERNAL_H_
#define HEED_ADVISE_TIMING_INTERNAL_H_

#include <vector>

#include "heed/advise/candidate.h"

namespace heed::advise {

// The shortest time of each stage of a call: whoever takes a CPU meanwhile makes a run longer, never shorter.
class StageTimes {
 public:
  // Runs all stages again and again: `least` times at least, brief ones more often, and until that took `seconds`.
  void Run(Context& ctx, const Call& call, int least, double seconds);

  const std::vector<double>& best() const { return best_; }
  double total() const;  // of all stages; infinite before the first run of one

 private:
  std::vector<double> best_;
};

}  // namespace heed::advise

#endif  // HEED_ADVISE_TIMING_INTERNAL_H_

// CostModel: the time of calls on this machine as a function of their work.
//
//   seconds = c_call + sum over units u of c_u amount_u
//
// with coefficients of 0 or more for each kind of work, dtype and number of threads. Units are quantities of work,
// "pair", "flop", "byte"; a coefficient is the seconds per unit. They are fitted to measured calls (calibrate.h).
#ifndef HEED_ADVISE_COST_MODEL_H_
#define HEED_ADVISE_COST_MODEL_H_

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "heed/core/dtype.h"

namespace heed::advise {

// The work of one call: amounts of 0 or more, by the names of units.
using Load = std::map<std::string, double>;

// The subject of a fit: "attention prefill", bf16, two threads.
struct Work {
  std::string name;
  DType dtype = DType::kF32;
  int threads = 1;
  friend auto operator<=>(const Work&, const Work&) = default;
};

// Seconds per unit by its name; "call" is a unit of which every call has one.
using Coefficients = std::map<std::string, double>;

struct Observation {
  Load load;
  double seconds = 0;  // above 0
};

// The coefficients of 0 or more that minimise the sum of squares of (predicted - seconds) / seconds.
Coefficients Fit(const std::vector<Observation>& observations);

// A unit without a coefficient costs nothing.
double Predict(const Coefficients& coefficients, const Load& load);

// Prediction errors: |predicted - measured| / measured of held-out calls.
struct PredictionErrors {
  static constexpr double kGoal = 0.2;  // goal for nine of ten errors
  int64_t count = 0;
  double median = 0, nine_of_ten = 0, share_within_goal = 0;  // NaN without errors
};
PredictionErrors Summarized(std::vector<double> errors);

struct CostModel {
  // The machine and version of the measurements: predictions are for these only.
  std::string cpu, version, target;
  int threads = 1;
  double seconds = 0;  // duration of the measurements
  std::map<Work, Coefficients> fits;
  std::vector<double> errors;  // of held-out calls

  // Nothing if there is no such fit.
  std::optional<double> Predict(const Work& work, const Load& load) const;
};

}  // namespace heed::advise

#endif  // HEED_ADVISE_COST_MODEL_H_

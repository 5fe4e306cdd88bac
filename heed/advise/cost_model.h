// CostModel: what calls cost on this machine, from what they have to do.
//
//   seconds = c_call + sum over units u of c_u amount_u
//
// with coefficients of 0 or more for each kind of work, dtype and number of threads. Units are what a kind of work is
// made of, "pair", "flop", "byte"; a coefficient is the seconds of one. They are fitted to measured calls
// (calibrate.h).
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

// What one call has to do: amounts, 0 or more, by the names of units.
using Load = std::map<std::string, double>;

// What a fit is of: "attention prefill", bf16, two threads.
struct Work {
  std::string name;
  DType dtype = DType::kF32;
  int threads = 1;
  friend auto operator<=>(const Work&, const Work&) = default;
};

// Seconds of a unit by its name; "call" is the unit of which every call has one.
using Coefficients = std::map<std::string, double>;

struct Observation {
  Load load;
  double seconds = 0;  // above 0
};

// The coefficients of 0 or more with the least sum of squares of (predicted - seconds) / seconds.
Coefficients Fit(const std::vector<Observation>& observations);

// A unit without a coefficient costs nothing.
double Predict(const Coefficients& coefficients, const Load& load);

// How far predictions are off: |predicted - measured| / measured of calls that were not fitted.
struct PredictionErrors {
  static constexpr double kGoal = 0.2;  // that nine of ten should not exceed
  int64_t count = 0;
  double median = 0, nine_of_ten = 0, share_within_goal = 0;  // NaN of none
};
PredictionErrors Summarized(std::vector<double> errors);

struct CostModel {
  // Where it was measured, and by what: predictions are of this alone.
  std::string cpu, version, target;
  int threads = 1;
  double seconds = 0;  // that measuring took
  std::map<Work, Coefficients> fits;
  std::vector<double> errors;  // of calls that were not fitted

  // Nothing where there is no such fit.
  std::optional<double> Predict(const Work& work, const Load& load) const;
};

}  // namespace heed::advise

#endif  // HEED_ADVISE_COST_MODEL_H_

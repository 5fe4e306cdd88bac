// CostModel: fits and predictions.
#include "heed/advise/cost_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "heed/advise/least_squares.h"

namespace heed::advise {
namespace {

constexpr char kCall[] = "call";

double AmountOf(const Load& load, const std::string& unit) {
  if (unit == kCall) return 1;
  const auto found = load.find(unit);
  return found == load.end() ? 0 : found->second;
}

}  // namespace

Coefficients Fit(const std::vector<Observation>& observations) {
  std::set<std::string> units = {kCall};
  for (const Observation& observation : observations) {
    for (const auto& [unit, amount] : observation.load) units.insert(unit);
  }
  // Each row is divided by its seconds, so its target is 1 and residuals are relative errors.
  std::vector<std::vector<double>> rows;
  for (const Observation& observation : observations) {
    std::vector<double>& row = rows.emplace_back();
    for (const std::string& unit : units) row.push_back(AmountOf(observation.load, unit) / observation.seconds);
  }
  const std::vector<double> seconds = NonNegativeLeastSquares(rows, std::vector<double>(rows.size(), 1.0));
  Coefficients coefficients;
  size_t i = 0;
  for (const std::string& unit : units) {
    if (!seconds.empty() && seconds[i] > 0) coefficients[unit] = seconds[i];
    ++i;
  }
  return coefficients;
}

double Predict(const Coefficients& coefficients, const Load& load) {
  double seconds = 0;
  for (const auto& [unit, each] : coefficients) seconds += each * AmountOf(load, unit);
  return seconds;
}

PredictionErrors Summarized(std::vector<double> errors) {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  if (errors.empty()) return {0, kNone, kNone, kNone};
  std::sort(errors.begin(), errors.end());
  // The smallest error that this fraction of calls does not exceed.
  const auto of = [&](double share) {
    const auto count = static_cast<size_t>(std::ceil(share * static_cast<double>(errors.size())));
    return errors[std::max<size_t>(count, 1) - 1];
  };
  const auto within = std::upper_bound(errors.begin(), errors.end(), PredictionErrors::kGoal) - errors.begin();
  return {std::ssize(errors), of(0.5), of(0.9), static_cast<double>(within) / static_cast<double>(errors.size())};
}

std::optional<double> CostModel::Predict(const Work& work, const Load& load) const {
  const auto found = fits.find(work);
  if (found == fits.end()) return std::nullopt;
  return advise::Predict(found->second, load);
}

}  // namespace heed::advise

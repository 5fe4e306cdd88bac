// Drift: whether errors of a recurrence grow with the length of a sequence.
#ifndef HEED_HARNESS_DRIFT_H_
#define HEED_HARNESS_DRIFT_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/harness/case.h"

namespace heed {

inline constexpr int64_t kDriftTokens = 1024;  // that an error is taken over

// The forward pass in f32 over ends.back() tokens of one head of `channels`
// channels: for each of `ends`, ascending, the root mean square of o - expected
// over the kDriftTokens before it, relative to that of `expected` there. Expected
// is the reference in f64. NaN where something is not finite.
std::vector<double> Drift(Context& ctx, const OpEntry& op, const std::string& variant, int64_t channels,
                          std::span<const int64_t> ends);

// The variants of `op` whose errors might drift: "", or "causal" where that is one, and
// "strong", "vanishing" and "faint" decays where it has them. Empty for mechanisms without a step.
std::vector<std::string> DriftVariants(const OpEntry& op);

}  // namespace heed

#endif  // HEED_HARNESS_DRIFT_H_

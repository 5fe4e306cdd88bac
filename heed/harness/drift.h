// Drift: measures the growth of a recurrence's error with the length of a sequence.
#ifndef HEED_HARNESS_DRIFT_H_
#define HEED_HARNESS_DRIFT_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/harness/case.h"

namespace heed {

inline constexpr int64_t kDriftTokens = 1024;  // length of the stretch over which an error is taken

// Runs the forward pass in f32 over ends.back() tokens of one head of `channels` channels. For each of `ends`,
// ascending, returns the root mean square of o - expected over the kDriftTokens before it, relative to that of
// `expected` there. The expected values are the reference's in f64. NaN if a value is not finite.
std::vector<double> Drift(Context& ctx, const OpEntry& op, const std::string& variant, int64_t channels,
                          std::span<const int64_t> ends);

// The variants of `op` whose errors might grow: "", or "causal" if that is a variant, and "strong", "vanishing" and
// "faint" decays if it has them. Empty for mechanisms without a step.
std::vector<std::string> DriftVariants(const OpEntry& op);

}  // namespace heed

#endif  // HEED_HARNESS_DRIFT_H_

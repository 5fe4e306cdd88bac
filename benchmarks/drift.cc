// Drift: every recurrence under every kind of decay.
#include "benchmarks/drift.h"

#include <algorithm>

#include "nlohmann/json.hpp"

#include "cli/format.h"
#include "heed/core/context.h"
#include "heed/harness/case.h"
#include "heed/harness/drift.h"

namespace heed::bench {
namespace {

constexpr int64_t kEnds[] = {1024, 2048, 8192, 32768, 131072};
constexpr int64_t kChannels = 16;

}  // namespace

std::vector<DriftResult> MeasureDrift(const Rows& rows) {
  std::vector<DriftResult> results;
  Context ctx;
  for (const OpEntry& op : AllOps()) {
    const std::vector<std::string> variants = DriftVariants(op);
    for (const std::string& variant : variants) {
      const std::string decays = !variant.empty() ? variant : variants.size() > 1 ? "ordinary" : "none";
      if (!rows.Begin(op.name + " " + decays)) continue;
      results.push_back({op.name, decays, Drift(ctx, op, variant, kChannels, kEnds)});
      rows.Print(DriftRow(results.back()));
    }
  }
  return results;
}

std::string DriftHeader() {
  std::string text = Format(
      "rms error of o against float64, f32, {} channels, over the {} tokens before\n\n"
      "{:<18} {:<10}",
      kChannels, kDriftTokens, "mechanism", "decays");
  for (const int64_t end : kEnds) text += Format(" {:>9}", end);
  return text + "\n";
}

std::string DriftRow(const DriftResult& r) {
  std::string text = Format("{:<18} {:<10}", r.mechanism, r.decays);
  for (const double error : r.errors) text += Format(" {:>9.1e}", error);
  return text + "\n";
}

std::string DriftJson(const std::vector<DriftResult>& results) {
  using Json = nlohmann::ordered_json;
  Json rows = Json::array();
  for (const DriftResult& r : results) {
    rows.push_back({{"mechanism", r.mechanism}, {"decays", r.decays}, {"errors", r.errors}});
  }
  return Json{{"tokens", kEnds}, {"channels", kChannels}, {"rows", rows}}.dump(2);
}

}  // namespace heed::bench

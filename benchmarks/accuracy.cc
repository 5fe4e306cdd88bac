// Accuracy on the harness's random problems, and with large logits.
#include "benchmarks/accuracy.h"

#include <algorithm>
#include <cstdint>

#include "nlohmann/json.hpp"

#include "cli/format.h"
#include "heed/core/context.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/exact/attention/cases/attention_case.h"

namespace heed::bench {
namespace {

constexpr char kFormat[] = "{:<12} {:<15} {:<5} {:>8}  {:>9}  {:>9}  {:>9}  {}\n";  // of one row

constexpr uint64_t kRandomProblems = 500, kLargeProblems = 8;

// Logits of N(0, 64) products reach 35 among this number of pairs; the scale raises them to 50.
Case LargeLogits(DType dtype, uint64_t seed) {
  attention::Problem p;
  const auto normal = [&](int64_t heads, uint64_t stream) {
    const Buffer buffer(dtype, {1, 257, heads, 64}, Placement::kAligned);
    p.memory.push_back(buffer.FillNormal(seed * 16 + stream));
    return buffer.view();
  };
  p.in = {normal(4, 0), normal(2, 1), normal(2, 2)};
  p.options.scale = 1.4;
  p.options.causal = seed % 2 == 0;
  attention::DescribeOutputs(p);
  return attention::MakeCase(p);
}

template <class MakeCase>
AccuracyResult Worst(const std::string& mechanism, const std::string& what, DType dtype, uint64_t problems,
                     MakeCase make_case) {
  AccuracyResult result{mechanism, what, dtype, static_cast<int>(problems), 0, 0, 0, true};
  Context ctx;
  double worst_ratio = -1;
  for (uint64_t seed = 1; seed <= problems; ++seed) {
    const Comparison c = Compare(make_case(seed), ctx);
    result.max_error = std::max(result.max_error, c.max_error);
    result.ok = result.ok && c.ok;
    if (c.worst_ratio > worst_ratio) {
      worst_ratio = c.worst_ratio;
      result.error = c.error;
      result.bound = c.tolerance;
    }
  }
  return result;
}

// The usual rule for 16 bits: at most twice the error of a plain computation in 16 bits, plus a rounding of the result.
AccuracyResult BesideNaive(const std::string& what, DType dtype) {
  AccuracyResult result{"attention", what, dtype, static_cast<int>(kRandomProblems), 0, 0, 0, true};
  Context ctx;
  double worst_ratio = -1;
  for (uint64_t seed = 1; seed <= kRandomProblems; ++seed) {
    const attention::Problem p = attention::RandomProblem(dtype, seed);
    const Comparison c = Compare(attention::MakeCase(p), ctx);
    const double error = c.max_errors[0];
    const double bound = attention::PlainBound(p);
    result.max_error = std::max(result.max_error, error);
    if (bound > 0 && error / bound > worst_ratio) {
      worst_ratio = error / bound;
      result.error = error;
      result.bound = bound;
      result.ok = result.ok && error <= bound;
    }
  }
  return result;
}

}  // namespace

std::vector<AccuracyResult> MeasureAccuracy(const Rows& rows) {
  std::vector<AccuracyResult> results;
  for (const OpEntry& op : AllOps()) {
    for (const DType dtype : op.dtypes) {
      const auto add = [&](const std::string& what, const auto& measure) {
        if (!rows.Begin(Format("accuracy {} {} {}", op.name, Name(dtype), what))) return;
        results.push_back(measure(what));
        rows.Print(AccuracyRow(results.back()));
      };
      add("random options", [&](const std::string& what) {
        return Worst(op.name, what, dtype, kRandomProblems, [&](uint64_t seed) { return op.random_case(dtype, seed); });
      });
      if (op.name != "attention") continue;
      add("logits to +-50", [&](const std::string& what) {
        return Worst(op.name, what, dtype, kLargeProblems, [&](uint64_t seed) { return LargeLogits(dtype, seed); });
      });
      if (SizeOf(dtype) == 2) add("twice plain", [&](const std::string& what) { return BesideNaive(what, dtype); });
    }
  }
  return results;
}

std::string AccuracyHeader() {
  return "largest error against float64, and the error closest to its bound\n\n" +
         Format(kFormat, "mechanism", "problems", "dtype", "number", "max error", "error", "bound", "");
}

std::string AccuracyRow(const AccuracyResult& r) {
  const auto e = [](double x) { return Format("{:.1e}", x); };
  return Format(kFormat, r.mechanism, r.what, Name(r.dtype), r.problems, e(r.max_error), e(r.error), e(r.bound),
                r.ok ? "ok" : "EXCEEDED");
}

std::string AccuracyJson(const std::vector<AccuracyResult>& results) {
  using Json = nlohmann::ordered_json;
  Json rows = Json::array();
  for (const AccuracyResult& r : results) {
    rows.push_back({{"mechanism", r.mechanism},
                    {"problems", r.what},
                    {"dtype", Name(r.dtype)},
                    {"number", r.problems},
                    {"max_error", r.max_error},
                    {"error", r.error},
                    {"bound", r.bound},
                    {"ok", r.ok}});
  }
  return rows.dump(2);
}

}  // namespace heed::bench

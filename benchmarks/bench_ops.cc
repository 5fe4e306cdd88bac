// bench_ops: throughput of every mechanism, on Google Benchmark, and the gates. A case that disagrees with its
// reference is reported as an error and never timed.
//
//   bench_ops [--benchmark_filter=REGEX] [--benchmark_format=json] ...
//
// The filters "gates", "recurrence", "scans", "patterns" (the gates of these), "decode", "crossover", "drift" and
// "cpp_layers" select these tables alone, "." or no filter selects everything, and any other filter selects the
// matching benchmarks without tables.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "benchmark/benchmark.h"
#include "nlohmann/json.hpp"

#include "benchmarks/accuracy.h"
#include "benchmarks/crossover.h"
#include "benchmarks/decode.h"
#include "benchmarks/drift.h"
#include "benchmarks/gates.h"
#include "benchmarks/layers.h"
#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/harness/case.h"
#include "heed/harness/timed_case.h"

namespace heed::bench {
namespace {

constexpr Sizes kSizes[] = {
    {1, 128, 128, 16, 16, 64, 64}, {1, 512, 512, 8, 8, 64, 64},     {1, 1000, 1000, 4, 4, 80, 80},
    {1, 2048, 2048, 4, 4, 64, 64}, {1, 2048, 2048, 4, 4, 128, 128}, {1, 2048, 2048, 8, 2, 128, 128},
};

void BenchOp(benchmark::State& state, const OpEntry& op, const CaseRequest& request, int threads) {
  std::unique_ptr<TimedCase> timed;
  try {
    timed = std::make_unique<TimedCase>(op, request, threads);
  } catch (const std::exception& e) {
    state.SkipWithError(e.what());
    return;
  }
  const double peak = timed->PeakFlopsPerSecond();
  for (auto _ : state) {
    timed->Run();
    benchmark::ClobberMemory();
  }
  using benchmark::Counter;
  const Case& c = timed->problem();
  const double tokens = static_cast<double>(request.sizes.B * request.sizes.Tq);
  constexpr auto kRate = Counter::kIsIterationInvariantRate;
  state.counters["FLOP/s"] = Counter(c.flops, kRate);
  state.counters["B/s"] = Counter(c.bytes, kRate);
  state.counters["token/s"] = Counter(tokens, kRate);
  state.counters["of_peak"] = Counter(c.flops / peak, kRate);
  state.SetLabel(TargetName(timed->context().allowed_targets()));
}

// Names have the form attention/f32/forward/B1_T2048_H4_D64/causal/threads:2.
void Register() {
  std::vector<int> thread_counts = {1};
  if (os::NumUsableCpus() > 1) thread_counts.push_back(os::NumUsableCpus());
  for (const OpEntry& op : AllOps()) {
    std::vector<std::string> variants = {""};
    if (std::find(op.variants.begin(), op.variants.end(), "causal") != op.variants.end()) {
      variants.push_back("causal");
    }
    for (const DType dtype : op.dtypes) {
      for (const std::string& pass : op.passes) {
        for (const Sizes& sizes : kSizes) {
          for (const std::string& variant : variants) {
            for (const int threads : thread_counts) {
              const CaseRequest request{sizes, dtype, 1, pass, variant};
              const std::string name = op.name + "/" + Name(dtype) + "/" + pass + "/" + ToString(sizes) +
                                       (variant.empty() ? "" : "/" + variant) + "/threads:" + std::to_string(threads);
              auto* bench = benchmark::RegisterBenchmark(
                  name.c_str(), [op, request, threads](benchmark::State& s) { BenchOp(s, op, request, threads); });
              bench->Unit(benchmark::kMillisecond);
              if (threads > 1) bench->UseRealTime();
            }
          }
        }
      }
    }
  }
}

// The value of --name=value among the arguments; the last one counts.
std::string Flag(int argc, char** argv, std::string_view name) {
  std::string value;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with(name) && argument.size() > name.size() && argument[name.size()] == '=') {
      value = argument.substr(name.size() + 1);
    }
  }
  return value;
}

void Progress(const std::string& text) {
  if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\r\033[K%s", text.c_str());
}

// A table, as text and as members of the JSON document.
struct Report {
  std::string text;
  nlohmann::ordered_json json;
};

Report Gates() {
  Progress("accuracy");
  const std::vector<AccuracyResult> accuracy = MeasureAccuracy();
  const std::vector<GateResult> gates = MeasureGates(AttentionLines(), &Progress);
  return {AccuracyTable(accuracy) + "\n" + GateTable(gates),
          {{"accuracy", nlohmann::ordered_json::parse(AccuracyJson(accuracy))},
           {"gates", nlohmann::ordered_json::parse(GateJson(gates))}}};
}

Report Recurrence() {
  const std::vector<GateResult> gates = MeasureGates(RecurrenceLines(), &Progress);
  return {GateTable(gates), {{"recurrence", nlohmann::ordered_json::parse(GateJson(gates))}}};
}

Report Scans() {
  const std::vector<GateResult> gates = MeasureGates(ScanLines(), &Progress);
  return {GateTable(gates), {{"scans", nlohmann::ordered_json::parse(GateJson(gates))}}};
}

Report Patterns() {
  const std::vector<GateResult> gates = MeasureGates(PatternLines(), &Progress);
  return {GateTable(gates), {{"patterns", nlohmann::ordered_json::parse(GateJson(gates))}}};
}

Report CrossoverReport() {
  const std::vector<CrossoverRow> rows = MeasureCrossover(&Progress);
  return {CrossoverTable(rows), {{"crossover", nlohmann::ordered_json::parse(CrossoverJson(rows))}}};
}

Report DriftReport() {
  const std::vector<DriftResult> results = MeasureDrift(&Progress);
  return {DriftTable(results), {{"drift", nlohmann::ordered_json::parse(DriftJson(results))}}};
}

Report DecodeReport() {
  const std::vector<GateResult> results = MeasureDecode(&Progress);
  return {GateTable(results), {{"decode", nlohmann::ordered_json::parse(GateJson(results))}}};
}

Report LayersReport() {
  const std::vector<GateResult> results = MeasureLayers(&Progress);
  return {GateTable(results), {{"cpp_layers", nlohmann::ordered_json::parse(GateJson(results))}}};
}

constexpr struct {
  std::string_view filter;
  Report (*measure)();
} kTables[] = {{"gates", &Gates},         {"recurrence", &Recurrence},     {"scans", &Scans},
               {"patterns", &Patterns},   {"crossover", &CrossoverReport}, {"drift", &DriftReport},
               {"decode", &DecodeReport}, {"cpp_layers", &LayersReport}};

int Main(int argc, char** argv) {
  const std::string filter = Flag(argc, argv, "--benchmark_filter");
  const bool json = Flag(argc, argv, "--benchmark_format") == "json";
  const bool everything = filter.empty() || filter == "." || filter == ".*" || filter == "all";
  const bool one_table =
      std::any_of(std::begin(kTables), std::end(kTables), [&](const auto& table) { return table.filter == filter; });
  Register();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;

  std::ostringstream captured;  // with --json, to merge both into one document
  if (!one_table && json && everything) {
    benchmark::JSONReporter reporter;
    reporter.SetOutputStream(&captured);
    benchmark::RunSpecifiedBenchmarks(&reporter);
  } else if (!one_table) {
    benchmark::RunSpecifiedBenchmarks();
  }
  if (!one_table && !everything) return 0;
  nlohmann::ordered_json document = nlohmann::ordered_json::object();
  if (json && !one_table) document = nlohmann::ordered_json::parse(captured.str());
  for (const auto& table : kTables) {
    if (one_table && table.filter != filter) continue;
    const Report report = table.measure();
    Progress("");
    document.update(report.json);
    if (!json) std::printf("%s%s", one_table ? "" : "\n", report.text.c_str());
  }
  if (json) std::printf("%s\n", document.dump(2).c_str());
  return 0;
}

}  // namespace
}  // namespace heed::bench

int main(int argc, char** argv) {
  try {
    return heed::bench::Main(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_ops: %s\n", e.what());
    return 1;
  }
}

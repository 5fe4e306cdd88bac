// bench_ops: throughput of every mechanism, on Google Benchmark, and the gates. A case that disagrees with its
// reference is reported as an error and never timed.
//
//   bench_ops [--benchmark_filter=REGEX] [--benchmark_format=json] ...
//
// The filters "gates", "recurrence", "scans", "patterns" (the gates of these), "decode", "crossover", "drift" and
// "cpp_layers" select these tables alone, "gates/REGEX" those of the table's rows whose names match, "." or no filter
// everything, and any other filter the matching benchmarks without tables. A row is printed as soon as it is measured.
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
#include "benchmarks/rows.h"
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

// Tables print their rows as they measure them and return their members of the JSON document.
using Json = nlohmann::ordered_json;

Json Document(const char* name, const std::vector<GateResult>& results) {
  return {{name, Json::parse(GateJson(results))}};
}

Json Gates(const Rows& rows) {
  rows.Print(AccuracyHeader());
  const std::vector<AccuracyResult> accuracy = MeasureAccuracy(rows);
  rows.Print("\n" + GateHeader());
  Json document = {{"accuracy", Json::parse(AccuracyJson(accuracy))}};
  document.update(Document("gates", MeasureGates(AttentionLines(), rows)));
  return document;
}

Json Recurrence(const Rows& rows) {
  rows.Print(GateHeader());
  return Document("recurrence", MeasureGates(RecurrenceLines(), rows));
}

Json Scans(const Rows& rows) {
  rows.Print(GateHeader());
  return Document("scans", MeasureGates(ScanLines(), rows));
}

Json Patterns(const Rows& rows) {
  rows.Print(GateHeader());
  return Document("patterns", MeasureGates(PatternLines(), rows));
}

Json CrossoverTable(const Rows& rows) {
  rows.Print(CrossoverHeader());
  return {{"crossover", Json::parse(CrossoverJson(MeasureCrossover(rows)))}};
}

Json DriftTable(const Rows& rows) {
  rows.Print(DriftHeader());
  return {{"drift", Json::parse(DriftJson(MeasureDrift(rows)))}};
}

Json Decode(const Rows& rows) {
  rows.Print(GateHeader());
  return Document("decode", MeasureDecode(rows));
}

Json Layers(const Rows& rows) {
  rows.Print(GateHeader());
  return Document("cpp_layers", MeasureLayers(rows));
}

struct Table {
  std::string_view name;
  Json (*measure)(const Rows& rows);
};

constexpr Table kTables[] = {{"gates", &Gates},       {"recurrence", &Recurrence},    {"scans", &Scans},
                             {"patterns", &Patterns}, {"crossover", &CrossoverTable}, {"drift", &DriftTable},
                             {"decode", &Decode},     {"cpp_layers", &Layers}};

// The table that a filter names, alone or followed by a slash; null if it names none.
const Table* TableOf(std::string_view filter) {
  const auto* end = std::end(kTables);
  const auto* found = std::find_if(std::begin(kTables), end, [&](const Table& table) {
    return filter == table.name || (filter.starts_with(table.name) && filter[table.name.size()] == '/');
  });
  return found == end ? nullptr : found;
}

int Main(int argc, char** argv) {
  const std::string filter = Flag(argc, argv, "--benchmark_filter");
  const bool json = Flag(argc, argv, "--benchmark_format") == "json";
  Json document = Json::object();
  Register();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;

  if (const Table* table = TableOf(filter)) {
    const size_t rows = std::min(table->name.size() + 1, filter.size());
    document = table->measure(Rows(filter.substr(rows), !json));
  } else {
    const bool everything = filter.empty() || filter == "." || filter == ".*" || filter == "all";
    std::ostringstream captured;  // with --json, to merge both into one document
    if (json && everything) {
      benchmark::JSONReporter reporter;
      reporter.SetOutputStream(&captured);
      benchmark::RunSpecifiedBenchmarks(&reporter);
      document = Json::parse(captured.str());
    } else {
      benchmark::RunSpecifiedBenchmarks();
    }
    if (!everything) return 0;
    const Rows all("", !json);
    for (const Table& each : kTables) {
      all.Print("\n");
      document.update(each.measure(all));
    }
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

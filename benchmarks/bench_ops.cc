// bench_ops: throughput of every mechanism, on Google Benchmark, and the gates.
// A case that disagrees with its reference is reported as an error, never
// timed.
//
//   bench_ops [--benchmark_filter=REGEX] [--benchmark_format=json] ...
//
// The filter "gates" means the gates alone, "." or none everything, any other
// the matching benchmarks without the gates.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "benchmark/benchmark.h"
#include "nlohmann/json.hpp"

#include "benchmarks/accuracy.h"
#include "benchmarks/gates.h"
#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/harness/case.h"
#include "heed/harness/timed_case.h"

namespace heed::bench {
namespace {

constexpr Sizes kSizes[] = {
    {1, 128, 128, 16, 16, 64, 64},   {1, 512, 512, 8, 8, 64, 64},
    {1, 1000, 1000, 4, 4, 80, 80},   {1, 2048, 2048, 4, 4, 64, 64},
    {1, 2048, 2048, 4, 4, 128, 128}, {1, 2048, 2048, 8, 2, 128, 128},
};

void BenchOp(benchmark::State& state, const OpEntry& op,
             const CaseRequest& request, int threads) {
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

// attention/f32/forward/B1_T2048_H4_D64/causal/threads:2
void Register() {
  std::vector<int> thread_counts = {1};
  if (os::NumUsableCpus() > 1) thread_counts.push_back(os::NumUsableCpus());
  for (const OpEntry& op : AllOps()) {
    std::vector<std::string> variants = {""};
    if (std::find(op.variants.begin(), op.variants.end(), "causal") !=
        op.variants.end()) {
      variants.push_back("causal");
    }
    for (const DType dtype : op.dtypes) {
      for (const std::string& pass : op.passes) {
        for (const Sizes& sizes : kSizes) {
          for (const std::string& variant : variants) {
            for (const int threads : thread_counts) {
              const CaseRequest request{sizes, dtype, 1, pass, variant};
              const std::string name = op.name + "/" + Name(dtype) + "/" +
                                       pass + "/" + ToString(sizes) +
                                       (variant.empty() ? "" : "/" + variant) +
                                       "/threads:" + std::to_string(threads);
              auto* bench = benchmark::RegisterBenchmark(
                  name.c_str(), [op, request, threads](benchmark::State& s) {
                    BenchOp(s, op, request, threads);
                  });
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
    if (argument.starts_with(name) && argument.size() > name.size() &&
        argument[name.size()] == '=') {
      value = argument.substr(name.size() + 1);
    }
  }
  return value;
}

void Progress(const std::string& text) {
  if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\r\033[K%s", text.c_str());
}

int Main(int argc, char** argv) {
  const std::string filter = Flag(argc, argv, "--benchmark_filter");
  const bool json = Flag(argc, argv, "--benchmark_format") == "json";
  const bool only_gates = filter == "gates";
  const bool gates = only_gates || filter.empty() || filter == "." ||
                     filter == ".*" || filter == "all";
  Register();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;

  std::ostringstream captured;  // with --json, to join both into one document
  if (!only_gates && json && gates) {
    benchmark::JSONReporter reporter;
    reporter.SetOutputStream(&captured);
    benchmark::RunSpecifiedBenchmarks(&reporter);
  } else if (!only_gates) {
    benchmark::RunSpecifiedBenchmarks();
  }
  if (!gates) return 0;
  Progress("accuracy");
  const std::vector<AccuracyResult> accuracy = MeasureAccuracy();
  const std::vector<GateResult> results = MeasureGates(&Progress);
  Progress("");
  if (json) {
    using Json = nlohmann::ordered_json;
    Json document = only_gates ? Json::object() : Json::parse(captured.str());
    document["accuracy"] = Json::parse(AccuracyJson(accuracy));
    document["gates"] = Json::parse(GateJson(results));
    std::printf("%s\n", document.dump(2).c_str());
  } else {
    std::printf("%s%s\n%s", only_gates ? "" : "\n",
                AccuracyTable(accuracy).c_str(), GateTable(results).c_str());
  }
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

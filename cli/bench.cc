// heed bench: throughput as a fraction of the roof that a probe finds right
// before each sample, in the same process.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fmt/format.h"

#include "cli/options.h"
#include "cli/print.h"
#include "cli/verbs.h"
#include "heed/core/os.h"
#include "heed/harness/case.h"
#include "heed/harness/probe.h"
#include "heed/harness/timed_case.h"
#include "heed/harness/timing.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "One thread is timed by its CPU time, more by wall time, where a sample "
    "counts\n"
    "only if nobody else took a CPU meanwhile. The roof is that of the "
    "problem's own\n"
    "arithmetic and bytes; figures are medians. Nothing is timed that "
    "disagrees with\n"
    "its float64 reference.\n\n"
    "Example:\n  heed bench attention --threads 1";

constexpr int kRounds = 7;
constexpr size_t kEnoughSamples = 5;  // fewer clean ones are called noisy
constexpr Sizes kSizes[] = {
    {1, 128, 128, 16, 16, 64, 64},
    {1, 512, 512, 8, 8, 64, 64},
    {1, 2048, 2048, 4, 4, 64, 64},
    {1, 2048, 2048, 4, 4, 128, 128},
};

struct BenchOptions {
  std::vector<std::string> mechanisms;
  std::string dtype;
  bool causal = false, json = false;
  MachineOptions machine;
};

struct Row {
  std::string mechanism, pass, shape;
  DType dtype;
  int threads;
  double seconds, flops_per_second, bytes_per_second, roof, fraction;
  bool noisy;
};

// Medians of the clean samples, or of all if too few are clean.
Row Measure(TimedCase& timed, const std::string& mechanism,
            double read_bytes_per_second) {
  const Case& c = timed.problem();
  std::vector<double> seconds[2], roofs[2], fractions[2];  // all, clean
  for (int round = 0; round < kRounds; ++round) {
    const double peak = timed.PeakFlopsPerSecond();
    const double roof_seconds =
        std::max(c.flops / peak, c.bytes / read_bytes_per_second);
    const Sample sample = timed.Time();
    for (int clean = 0; clean <= (sample.clean ? 1 : 0); ++clean) {
      seconds[clean].push_back(sample.seconds);
      roofs[clean].push_back(c.flops / roof_seconds);
      fractions[clean].push_back(roof_seconds / sample.seconds);
    }
  }
  const bool noisy = seconds[1].size() < kEnoughSamples;
  const int use = noisy ? 0 : 1;
  const double median = Summarize(seconds[use]).median;
  return {mechanism,
          c.pass,
          timed.Shape(),
          timed.request().dtype,
          timed.context().num_threads(),
          median,
          c.flops / median,
          c.bytes / median,
          Summarize(roofs[use]).median,
          Summarize(fractions[use]).median,
          noisy};
}

std::vector<int> ThreadCounts(const MachineOptions& machine) {
  const int threads = machine.Threads();
  if (!machine.threads.empty() || threads == 1) return {threads};
  return {1, threads};
}

// Every pass, dtype, size and thread count of a mechanism.
void MeasureOp(const OpEntry& op, const BenchOptions& options, double read,
               std::vector<Row>& rows) {
  std::vector<std::string> variants = {""};
  if (std::find(op.variants.begin(), op.variants.end(), "causal") !=
      op.variants.end()) {
    if (options.causal) variants.clear();
    variants.push_back("causal");
  }
  std::vector<DType> dtypes = op.dtypes;
  std::sort(dtypes.begin(), dtypes.end(), std::greater<>());  // f32 first
  for (const std::string& pass : op.passes) {
    for (const DType dtype : dtypes) {
      if (!options.dtype.empty() && ParseDType(options.dtype) != dtype)
        continue;
      for (const Sizes& sizes : kSizes) {
        for (const std::string& variant : variants) {
          for (const int threads : ThreadCounts(options.machine)) {
            Progress(fmt::format("{} {} {} {} {}", op.name, pass, Name(dtype),
                                 ToString(sizes), variant));
            TimedCase timed(op, {sizes, dtype, 1, pass, variant}, threads,
                            options.machine.isa);
            rows.push_back(Measure(timed, op.name, read));
          }
        }
      }
    }
  }
}

Json RowToJson(const Row& row) {
  return {{"mechanism", row.mechanism},
          {"pass", row.pass},
          {"dtype", Name(row.dtype)},
          {"shape", row.shape},
          {"threads", row.threads},
          {"seconds", row.seconds},
          {"flops_per_second", row.flops_per_second},
          {"bytes_per_second", row.bytes_per_second},
          {"roof", row.roof},
          {"fraction", row.fraction}};
}

void Bench(const BenchOptions& options) {
  if (!options.dtype.empty()) ParseDType(options.dtype);
  const std::vector<OpEntry> ops = ChooseOps(options.mechanisms);
  Context capped(options.machine.Threads());
  options.machine.Apply(capped);
  const int64_t targets = capped.allowed_targets();
  Progress("probing");
  const double read = probe::DramBytesPerSecond(1);
  const Json probes = {
      {"cpu", os::CpuName()},
      {"target", TargetName(targets)},
      {"fma_f32_flops_per_second",
       probe::PeakFlopsPerSecond(DType::kF32, targets, 9)},
      {"fma_f64_flops_per_second",
       probe::PeakFlopsPerSecond(DType::kF64, targets, 9)},
      {"exp2_f32_per_second", probe::Exp2PerSecond(DType::kF32, targets, 9)},
      {"dram_read_bytes_per_second", read}};
  std::vector<Row> rows;
  for (const OpEntry& op : ops) MeasureOp(op, options, read, rows);
  Progress("");
  if (options.json) {
    Json list = Json::array();
    for (const Row& row : rows) list.push_back(RowToJson(row));
    PrintJson(Json{{"probes", probes}, {"rows", list}});
    return;
  }
  const auto rate = [&](const char* name, const char* unit) {
    return Rate(probes[name].get<double>(), unit);
  };
  std::string text = fmt::format(
      "{}, {}\none core: multiply-add {} f32, {} f64; exp2 {}; DRAM read "
      "{}\n\n",
      os::CpuName(), TargetName(targets),
      rate("fma_f32_flops_per_second", "FLOP/s"),
      rate("fma_f64_flops_per_second", "FLOP/s"),
      rate("exp2_f32_per_second", "exp/s"),
      rate("dram_read_bytes_per_second", "B/s"));
  Table table({"<mechanism", "<pass", "<dtype", "<shape", "threads", "time",
               "speed", "of roof", "<"});
  for (const Row& row : rows) {
    table.Add({row.mechanism, row.pass, Name(row.dtype), row.shape,
               std::to_string(row.threads), Seconds(row.seconds),
               Rate(row.flops_per_second, "FLOP/s"), Percent(row.fraction),
               row.noisy ? "noisy" : ""});
  }
  Print(text + table.ToString());
}

}  // namespace

void AddBench(CLI::App& app) {
  CLI::App* verb = app.add_subcommand(
      "bench", "throughput as a fraction of the roof probed in the same run");
  verb->footer(kFooter);
  const auto options = std::make_shared<BenchOptions>();
  verb->add_option("MECHANISM", options->mechanisms, "only these; default all")
      ->type_name("");
  AddText(*verb, "--dtype", options->dtype, "only this dtype", "f32|bf16|f16|f64");
  verb->add_flag("--causal", options->causal, "only causal problems");
  options->machine.Register(*verb);
  verb->add_flag("--json", options->json, "one JSON document");
  verb->callback([options] { Bench(*options); });
}

}  // namespace heed::cli

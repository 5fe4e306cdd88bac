// heed bench: throughput as a fraction of the roof that a probe measures right before each sample, in the same process.
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/format.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/token_ids.h"
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
    "its float64 reference. Without a name it is every mechanism in f32 at one "
    "size,\n"
    "a minute or two; with one, every dtype and size.\n\n"
    "Example:\n  heed bench attention --threads 1";

constexpr size_t kRounds = 7, kFewestRounds = 3;
constexpr double kSeconds = 1;  // per row: on a busy machine it takes long to get clean samples
constexpr Sizes kSizes[] = {
    {1, 128, 128, 16, 16, 64, 64},
    {1, 512, 512, 8, 8, 64, 64},
    {1, 2048, 2048, 4, 4, 64, 64},
    {1, 2048, 2048, 4, 4, 128, 128},
};
constexpr Sizes kBriefSizes = {1, 512, 512, 8, 8, 64, 64};

struct BenchOptions {
  std::vector<std::string> mechanisms;
  std::string dtype, seconds;
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

// Medians of the clean samples, or of all samples if fewer than two of three are clean.
Row Measure(TimedCase& timed, const std::string& mechanism, double read_bytes_per_second, double row_seconds) {
  const Case& c = timed.problem();
  std::vector<double> seconds[2], roofs[2], fractions[2];  // all, clean
  const auto start = std::chrono::steady_clock::now();
  const auto is_enough = [&](size_t rounds) {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    return rounds == kRounds || (rounds >= (row_seconds > 0 ? kFewestRounds : 1) && passed.count() > row_seconds);
  };
  while (!is_enough(seconds[0].size())) {
    const double peak = timed.PeakFlopsPerSecond();
    const double roof_seconds = std::max(c.flops / peak, c.bytes / read_bytes_per_second);
    const Sample sample = timed.Time();
    for (int clean = 0; clean <= (sample.clean ? 1 : 0); ++clean) {
      seconds[clean].push_back(sample.seconds);
      roofs[clean].push_back(c.flops / roof_seconds);
      fractions[clean].push_back(roof_seconds / sample.seconds);
    }
  }
  const bool noisy = 3 * seconds[1].size() < 2 * seconds[0].size();
  const int use = noisy ? 0 : 1;
  const double median = Summarize(seconds[use]).median;
  return {mechanism, c.pass,           timed.Shape(),    timed.request().dtype,        timed.context().num_threads(),
          median,    c.flops / median, c.bytes / median, Summarize(roofs[use]).median, Summarize(fractions[use]).median,
          noisy};
}

std::vector<int> ThreadCounts(const MachineOptions& machine) {
  const int threads = machine.Threads();
  if (!machine.threads.empty() || threads == 1) return {threads};
  return {1, threads};
}

// A row that is still to be measured.
struct Job {
  OpEntry op;
  CaseRequest request;
  int threads;
};

// The shape in the form of TimedCase.
std::string ShapeOf(const CaseRequest& request) {
  const std::string sizes = ToString(request.sizes);
  return request.variant.empty() ? sizes : sizes + " " + request.variant;
}

// Mechanisms that are named are measured in every pass, dtype, size and number of threads. Without names, all are
// measured in f32 at one size, which takes a minute or two.
std::vector<Job> Jobs(const std::vector<OpEntry>& ops, const BenchOptions& options) {
  const bool brief = options.mechanisms.empty();
  std::vector<Job> jobs;
  for (const OpEntry& op : ops) {
    std::vector<std::string> variants = {""};
    if (HasVariant(op, "causal")) {
      if (options.causal) variants.clear();
      if (options.causal || !brief) variants.push_back("causal");
    }
    std::vector<DType> dtypes = op.dtypes;
    std::sort(dtypes.begin(), dtypes.end(), std::greater<>());  // f32 first
    if (!options.dtype.empty()) {
      std::erase_if(dtypes, [&](DType d) { return d != ParseDType(options.dtype); });
    } else if (brief) {
      dtypes = {DType::kF32};
    }
    const std::vector<Sizes> sizes =
        brief ? std::vector<Sizes>{kBriefSizes} : std::vector<Sizes>(std::begin(kSizes), std::end(kSizes));
    const std::vector<int> threads =
        brief ? std::vector<int>{options.machine.Threads()} : ThreadCounts(options.machine);
    for (const std::string& pass : op.passes) {
      for (const DType dtype : dtypes) {
        for (const Sizes& size : sizes) {
          for (const std::string& variant : variants) {
            for (const int count : threads) {
              jobs.push_back({op, {size, dtype, 1, pass, variant}, count});
            }
          }
        }
      }
    }
  }
  return jobs;
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
  const double row_seconds = ParseReal("--seconds", options.seconds, 0, 1e6, kSeconds);
  const std::vector<OpEntry> ops = ChooseOps(options.mechanisms);
  const std::vector<Job> jobs = Jobs(ops, options);
  std::string longest_shape;
  for (const Job& job : jobs) {
    const std::string shape = ShapeOf(job.request);
    if (shape.size() > longest_shape.size()) longest_shape = shape;
  }
  Context capped(options.machine.Threads());
  options.machine.Apply(capped);
  const int64_t targets = capped.allowed_targets();
  Progress("probing");
  const double read = probe::DramBytesPerSecond(1);
  const Json probes = {{"cpu", os::CpuName()},
                       {"target", TargetName(targets)},
                       {"fma_f32_flops_per_second", probe::PeakFlopsPerSecond(DType::kF32, targets, 9)},
                       {"fma_f64_flops_per_second", probe::PeakFlopsPerSecond(DType::kF64, targets, 9)},
                       {"exp2_f32_per_second", probe::Exp2PerSecond(DType::kF32, targets, 9)},
                       {"dram_read_bytes_per_second", read}};
  std::optional<StreamedTable> table;
  if (!options.json) {
    const auto rate = [&](const char* name, const char* unit) { return Rate(probes[name].get<double>(), unit); };
    Progress("");
    Print(
        Format("{}, {}\none core: multiply-add {} f32, {} f64; exp2 {}; DRAM read "
               "{}\n\n",
               os::CpuName(), TargetName(targets), rate("fma_f32_flops_per_second", "FLOP/s"),
               rate("fma_f64_flops_per_second", "FLOP/s"), rate("exp2_f32_per_second", "exp/s"),
               rate("dram_read_bytes_per_second", "B/s")));
    table.emplace(
        std::vector<std::string>{"<mechanism", "<pass", "<dtype", "<shape", "threads", "time", "speed", "of roof", "<"},
        std::vector<std::string>{LongestName(ops), "backward", "bf16", longest_shape, "", "1.23 ms", "123 GFLOP/s",
                                 "100.0 %"});
  }
  Json list = Json::array();
  {
    Countdown countdown(jobs.size());
    for (const Job& job : jobs) {
      countdown.Next(
          Format("{} {} {} {}", job.op.name, job.request.pass, Name(job.request.dtype), ShapeOf(job.request)));
      TimedCase timed(job.op, job.request, job.threads, options.machine.isa);
      const Row row = Measure(timed, job.op.name, read, row_seconds);
      list.push_back(RowToJson(row));
      if (!table) continue;
      table->Add({row.mechanism, row.pass, Name(row.dtype), row.shape, std::to_string(row.threads),
                  Seconds(row.seconds), Rate(row.flops_per_second, "FLOP/s"), Percent(row.fraction),
                  row.noisy ? "noisy" : ""});
    }
  }
  if (options.json) PrintJson(Json{{"probes", probes}, {"rows", list}});
}

}  // namespace

void AddBench(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "bench", "throughput as a fraction of the roof probed in the same run", kFooter);
  const auto options = std::make_shared<BenchOptions>();
  AddMechanisms(verb, options->mechanisms);
  AddText(verb, "--dtype", options->dtype, "only this dtype", "f32|bf16|f16|f64");
  AddFlag(verb, "--causal", options->causal, "only causal problems");
  AddText(verb, "--seconds", options->seconds, "at most for a row, of 3 to 7 samples, default 1; 0: one sample", "S");
  options->machine.Register(verb);
  AddFlag(verb, "--json", options->json, "one JSON document");
  OnChosen(verb, [options] { Bench(*options); });
}

}  // namespace heed::cli

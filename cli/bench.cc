// heed bench: throughput as a fraction of the roof that a probe finds right
// before each sample, in the same process.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fmt/format.h"

#include "cli/options.h"
#include "cli/print.h"
#include "cli/verbs.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/probe.h"
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
constexpr int64_t kCheckedTokens = 160;  // the reference is scalar

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

// Throws if the mechanism is wrong on a shorter problem of the same kind.
void CheckFirst(const OpEntry& op, CaseRequest request, Context& ctx) {
  request.sizes.Tq = std::min(request.sizes.Tq, kCheckedTokens);
  request.sizes.Tk = std::min(request.sizes.Tk, kCheckedTokens);
  const Comparison c = Compare(op.make_case(request), ctx);
  if (!c.ok)
    throw std::runtime_error("bench: not timed, wrong result: " + c.message);
}

Row Measure(const OpEntry& op, const CaseRequest& request, Context& ctx,
            double read_bytes_per_second) {
  CheckFirst(op, request, ctx);
  const Case c = op.make_case(request);
  std::vector<Buffer> outputs;
  std::vector<TensorView> views;
  for (const OutputSpec& spec : c.outputs) {
    outputs.push_back(spec.strides.empty()
                          ? Buffer(spec.dtype, spec.sizes, Placement::kAligned)
                          : Buffer(spec.dtype, spec.sizes, spec.strides,
                                   Placement::kAligned));
    views.push_back(outputs.back().view());
  }
  const int threads = ctx.num_threads();
  const int cores = std::min(threads, os::NumUsableCpus());
  c.run(ctx, views);

  std::vector<double> seconds, roofs, fractions;
  double fastest = INFINITY;
  for (int round = 0; round < kRounds; ++round) {
    const double fma =
        cores * probe::FmaFlopsPerSecond(request.dtype, ctx.allowed_targets());
    const double roof_seconds =
        std::max(c.flops / fma, c.bytes / read_bytes_per_second);
    const Sample sample = TimeClean(threads, [&] { c.run(ctx, views); });
    fastest = std::min(fastest, sample.seconds);
    if (!sample.clean) continue;
    seconds.push_back(sample.seconds);
    roofs.push_back(c.flops / roof_seconds);
    fractions.push_back(roof_seconds / sample.seconds);
  }
  const bool noisy = seconds.size() < kEnoughSamples;
  const double median = seconds.empty() ? fastest : Summarize(seconds).median;
  std::string shape = ToString(request.sizes);
  if (!request.variant.empty()) shape += " " + request.variant;
  return {op.name,
          c.pass,
          shape,
          request.dtype,
          threads,
          median,
          c.flops / median,
          c.bytes / median,
          Summarize(roofs).median,
          Summarize(fractions).median,
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
            Context ctx(threads);
            options.machine.Apply(ctx);
            Progress(fmt::format("{} {} {} {} {}", op.name, pass, Name(dtype),
                                 ToString(sizes), variant));
            rows.push_back(
                Measure(op, {sizes, dtype, 1, pass, variant}, ctx, read));
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
       probe::FmaFlopsPerSecond(DType::kF32, targets, 9)},
      {"fma_f64_flops_per_second",
       probe::FmaFlopsPerSecond(DType::kF64, targets, 9)},
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
  AddText(*verb, "--dtype", options->dtype, "only this dtype", "f32|f64");
  verb->add_flag("--causal", options->causal, "only causal problems");
  options->machine.Register(*verb);
  verb->add_flag("--json", options->json, "one JSON document");
  verb->callback([options] { Bench(*options); });
}

}  // namespace heed::cli

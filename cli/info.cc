// heed info: version, CPU, SIMD targets, and with --probe their measured limits.
#include <memory>
#include <string>
#include <vector>

#include "cli/format.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/verbs.h"
#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/harness/probe.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "Roofs are of one core, but for the read by all threads. --json gives them "
    "in\n"
    "flops, exponentials and bytes per second.\n\n"
    "Example:\n  heed info --probe";

struct InfoOptions {
  bool probe = false, json = false;
  MachineOptions machine;
};

Json ProbeRoofs(int64_t targets, int threads) {
  const auto step = [](const char* name) { Progress(std::string("probing ") + name); };
  Json roofs;
  step("multiply-add");
  roofs["fma_f32_flops_per_second"] = probe::PeakFlopsPerSecond(DType::kF32, targets, 9);
  roofs["fma_f64_flops_per_second"] = probe::PeakFlopsPerSecond(DType::kF64, targets, 9);
  roofs["bf16_flops_per_second"] = probe::PeakFlopsPerSecond(DType::kBF16, targets, 9);
  step("exp2");
  roofs["exp2_f32_per_second"] = probe::Exp2PerSecond(DType::kF32, targets, 9);
  roofs["exp2_f64_per_second"] = probe::Exp2PerSecond(DType::kF64, targets, 9);
  step("memory");
  roofs["dram_read_bytes_per_second"] = probe::DramBytesPerSecond(1);
  roofs["dram_read_all_threads_bytes_per_second"] =
      threads == 1 ? roofs["dram_read_bytes_per_second"].get<double>() : probe::DramBytesPerSecond(threads);
  Progress("");
  return roofs;
}

void Info(const InfoOptions& options) {
  const int threads = options.machine.Threads();
  Context ctx(threads);
  options.machine.Apply(ctx);
  std::vector<std::string> available = AvailableTargets();
  std::erase(available, "tiles");  // AMX has a line of its own
  const std::string target = TargetName(ctx.allowed_targets());
  const Json roofs = options.probe ? ProbeRoofs(ctx.allowed_targets(), threads) : Json(nullptr);
  if (options.json) {
    PrintJson(Json{{"version", HEED_VERSION},
                   {"cpu", os::CpuName()},
                   {"threads", threads},
                   {"simd",
                    {{"target", target},
                     {"available", available},
                     {"compiled", CompiledTargets()},
                     {"heed_targets", TargetsOption()}}},
                   {"tiles", os::HasAmx()},
                   {"roofs", roofs}});
    return;
  }
  Table table({"<heed", "<" HEED_VERSION});
  table.Add({"CPU", os::CpuName()});
  table.Add({"threads", std::to_string(threads)});
  table.Add({"SIMD target", Format("{} (available: {})", target, fmt::join(available, " "))});
  table.Add({"compiled for", Format("{} (HEED_TARGETS={})", fmt::join(CompiledTargets(), " "), TargetsOption())});
  table.Add({"AMX tiles", os::HasAmx() ? "present" : "none: " + os::WhyNoAmx()});
  if (options.probe) {
    const auto rate = [&](const char* name, const char* unit) { return Rate(roofs[name].get<double>(), unit); };
    table.Add({"multiply-add f32", rate("fma_f32_flops_per_second", "FLOP/s")});
    table.Add({"multiply-add f64", rate("fma_f64_flops_per_second", "FLOP/s")});
    table.Add({"bf16 products", rate("bf16_flops_per_second", "FLOP/s")});
    table.Add({"exp2 f32", rate("exp2_f32_per_second", "exp/s")});
    table.Add({"exp2 f64", rate("exp2_f64_per_second", "exp/s")});
    table.Add({"DRAM read, 1 thread", rate("dram_read_bytes_per_second", "B/s")});
    table.Add({Format("DRAM read, {} threads", threads), rate("dram_read_all_threads_bytes_per_second", "B/s")});
  }
  Print(table.ToString());
}

}  // namespace

void AddInfo(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "info", "version, CPU, SIMD target, threads; measured roofs with --probe", kFooter);
  const auto options = std::make_shared<InfoOptions>();
  AddFlag(verb, "--probe", options->probe, "measure this machine's limits");
  AddFlag(verb, "--json", options->json, "one JSON document");
  options->machine.Register(verb);
  OnChosen(verb, [options] { Info(*options); });
}

}  // namespace heed::cli

// heed advise: recommends a mechanism and its options for given tensors, length and budget; and measures this machine
// for the predictions.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/advise_report.h"
#include "cli/format.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/token_ids.h"
#include "cli/verbs.h"
#include "heed/advise/advise.h"
#include "heed/advise/calibrate.h"
#include "heed/advise/cost_model_file.h"
#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/core/path.h"
#include "heed/pages/page.h"

namespace heed::cli {
namespace {

using advise::Purpose;

constexpr char kFooter[] =
    "Candidates in f32 and bf16, or in --dtype, are predicted at --length and run on as many of the file's tokens as\n"
    "--seconds allow. Measured times are the best of several. Errors are the root mean square of the difference from\n"
    "exact attention in float64, relative to that. Time is that of a call, in decoding of one token of each sequence.\n"
    "Memory is inputs, outputs, gradients, workspace and the state for the next token. --calibrate "
    "measures\n"
    "this machine once, in less than two minutes, and prints how far predictions are off at sizes that were not\n"
    "fitted. Without it times are ranked that were measured at --length. With --shape nothing runs, and no error is "
    "known.\n--ranks adds, for each candidate, the bytes, times and memory of processes that divide the tokens, by "
    "the\n"
    "formulas of docs/distributed.md.\n\n"
    "Example:\n  heed advise data/minilm_alice.safetensors --layer 2 --error 0.05";

constexpr char kShapeForm[] = "B,T,H,D: sequences, tokens, heads, channels, with key heads as H 8x2";
constexpr int64_t kMostSize = int64_t{1} << 32, kMostHeads = int64_t{1} << 20;
constexpr double kSeconds = 10, kCalibrateSeconds = 90;
constexpr int64_t kRows = 20;

struct AdviseCall {
  std::string shape, length, memory, error, purpose, mechanisms, model, seconds, rows, html, ranks, bandwidth, latency;
  bool calibrate = false, json = false;
  TensorOptions tensors;
  MathOptions math;
  MachineOptions machine;
};

Purpose ParsePurpose(const std::string& text) {
  for (const Purpose purpose : {Purpose::kPrefill, Purpose::kTraining, Purpose::kDecode}) {
    if (text == advise::Name(purpose)) return purpose;
  }
  if (text.empty()) return Purpose::kPrefill;
  BadOption("--for", text, "prefill, training or decode");
}

// "512M", "2GiB", "1e9".
double ParseMemory(const std::string& text) {
  constexpr std::string_view kUnits = "KMGT";
  std::string number = text;
  double unit = 1;
  for (const std::string_view end : {"iB", "B"}) {
    if (!number.ends_with(end)) continue;
    number.resize(number.size() - end.size());
    break;
  }
  if (const size_t at = number.empty() ? std::string_view::npos : kUnits.find(number.back());
      at != std::string_view::npos) {
    number.pop_back();
    unit = std::exp2(10 * (static_cast<double>(at) + 1));
  }
  char* end = nullptr;
  const double value = std::strtod(number.c_str(), &end);
  const bool is_number = !number.empty() && end == number.c_str() + number.size() && std::isfinite(value) && value > 0;
  if (!is_number) BadOption("--memory", text, "bytes above 0, such as 512M or 2G");
  return value * unit;
}

// A number with the longest of these units that ends it.
std::optional<double> ParseUnits(const std::string& text, std::span<const std::pair<std::string_view, double>> units) {
  std::string number = text;
  double unit = 1;
  for (const auto& [name, of] : units) {
    if (!number.ends_with(name)) continue;
    number.resize(number.size() - name.size());
    unit = of;
    break;
  }
  const bool digit = !number.empty() && std::string_view("0123456789.-").find(number[0]) != std::string_view::npos;
  char* end = nullptr;
  const double value = std::strtod(number.c_str(), &end) * unit;
  if (!digit || end != number.c_str() + number.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

// "1.25G": decimal, as those of networks are.
double ParseBandwidth(const std::string& text) {
  static constexpr std::pair<std::string_view, double> kUnits[] = {{"K", 1e3}, {"M", 1e6}, {"G", 1e9}, {"T", 1e12}};
  const std::optional<double> value = ParseUnits(text, kUnits);
  if (!value || *value <= 0) BadOption("--bandwidth", text, "bytes per second above 0, such as 1.25G or 100M");
  return *value;
}

double ParseLatency(const std::string& text) {
  static constexpr std::pair<std::string_view, double> kUnits[] = {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}};
  const std::optional<double> value = ParseUnits(text, kUnits);
  if (!value || *value < 0) BadOption("--latency", text, "seconds of 0 or more, such as 1e-5, 10us or 1ms");
  return *value;
}

// The processes of --ranks; none without.
std::optional<advise::Cluster> ParseCluster(const AdviseCall& call) {
  if (call.ranks.empty()) return std::nullopt;
  advise::Cluster cluster;
  cluster.ranks = ParseInteger("--ranks", call.ranks, 1, advise::Cluster::kMostRanks, 0);
  if (!call.bandwidth.empty()) cluster.bandwidth = ParseBandwidth(call.bandwidth);
  if (!call.latency.empty()) cluster.latency = ParseLatency(call.latency);
  return cluster;
}

std::optional<double> ParseError(const std::string& text) {
  if (text.empty()) return std::nullopt;
  return ParseReal("--error", text, 0, 1e6, 0);
}

Sizes ParseShape(const std::string& text) {
  std::vector<std::string> parts = SplitAtCommas(text);
  if (parts.size() != 4) BadOption("--shape", text, kShapeForm);
  std::string& of_heads = parts[2];
  std::ranges::replace(of_heads, 'x', ',');
  const std::vector<std::string> heads = SplitAtCommas(of_heads);
  const auto size = [&](const std::string& part, int64_t most) {
    const bool digits = !part.empty() && part.size() <= 10 && part.find_first_not_of("0123456789") == std::string::npos;
    const int64_t value = digits ? std::stoll(part) : 0;
    if (value < 1 || value > most) BadOption("--shape", text, kShapeForm);
    return value;
  };
  if (heads.size() > 2) BadOption("--shape", text, kShapeForm);
  Sizes sizes;
  sizes.B = size(parts[0], kMostHeads);
  sizes.Tq = sizes.Tk = size(parts[1], kMostSize);
  sizes.Hq = size(heads[0], kMostHeads);
  sizes.Hkv = heads.size() == 2 ? size(heads[1], kMostHeads) : sizes.Hq;
  sizes.D = sizes.Dv = size(parts[3], kMostHeads);
  if (sizes.Hq % sizes.Hkv != 0) BadOption("--shape", text, "key heads that divide the heads");
  return sizes;
}

std::vector<std::string> Mechanisms(const AdviseCall& call) {
  if (call.mechanisms.empty()) return {};
  std::vector<std::string> names = SplitAtCommas(call.mechanisms);
  ChooseOps(names);  // throws for an unknown name
  return names;
}

std::string TargetOf(const AdviseCall& call) {
  Context ctx(call.machine.Threads());
  call.machine.Apply(ctx);
  return TargetName(ctx.allowed_targets());
}

// The path of the cost model: in the folder heed of the user's cache folder.
std::string ModelPath(const AdviseCall& call) {
  if (!call.model.empty()) return call.model;
  std::string why_not;
  const std::string folder = os::UserCacheFolder(&why_not);
  if (folder.empty()) throw FileError("no folder for cost models, as " + why_not + ", expected --model");
  return folder + "/heed/" + advise::ModelFileName(os::CpuName(), TargetOf(call), call.machine.Threads(), HEED_VERSION);
}

// "calibrating 34 %, 40 s left: ...".
auto ProgressOf(const char* what) {
  return [what, start = std::chrono::steady_clock::now()](double share, const std::string& text) {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    const std::string left = share > 0 ? ", " + RoughTime(passed.count() * (1 - share) / share) + " left" : "";
    Progress(Format("{} {:.0f} %{}: {}", what, 100 * share, left, text));
  };
}

void Calibrate(const AdviseCall& call) {
  advise::CalibrateOptions options;
  options.threads = call.machine.Threads();
  options.isa = call.machine.isa;
  options.mechanisms = Mechanisms(call);
  options.seconds = ParseReal("--seconds", call.seconds, 0, 1e6, kCalibrateSeconds);
  options.progress = ProgressOf("calibrating");
  const std::string path = ModelPath(call);
  const advise::Calibration calibration = advise::Calibrate(options);
  Progress("");
  advise::SaveModel(path, calibration.model);
  call.json ? PrintJson(ToJson(calibration, path)) : Print(ToText(calibration, path));
}

// The cost model of the predictions; absent if none was named and none exists at the default path.
std::optional<advise::CostModel> FindModel(const AdviseCall& call, AdviseReport& report) {
  const std::string path = ModelPath(call);
  if (call.model.empty() && !std::filesystem::exists(ToPath(path))) return std::nullopt;
  advise::CostModel model = advise::LoadModel(path);
  advise::CheckFits(path, model, report.cpu, report.target, report.threads, HEED_VERSION);
  report.model_path = path;
  report.of_model = advise::Summarized(model.errors);
  return model;
}

void CheckTogether(const AdviseCall& call) {
  for (const auto& [option, given] :
       {std::pair{"--bandwidth", !call.bandwidth.empty()}, {"--latency", !call.latency.empty()}}) {
    if (given && call.ranks.empty()) throw UsageError(std::string(option) + " without --ranks, expected both");
  }
  const bool has_tensors = !(call.tensors.file + call.tensors.q + call.tensors.k + call.tensors.v).empty();
  if (call.calibrate) {
    for (const auto& [option, given] : {std::pair{"FILE", has_tensors},
                                        {"--shape", !call.shape.empty()},
                                        {"--html", !call.html.empty()},
                                        {"--length", !call.length.empty()},
                                        {"--memory", !call.memory.empty()},
                                        {"--error", !call.error.empty()},
                                        {"--for", !call.purpose.empty()},
                                        {"--ranks", !call.ranks.empty()}}) {
      if (given) throw UsageError(std::string("both --calibrate and ") + option + ", expected one of them");
    }
  } else if (!call.shape.empty() && has_tensors) {
    throw UsageError("both FILE and --shape, expected one of them");
  } else if (!call.shape.empty() && !call.error.empty()) {
    throw UsageError("both --shape and --error, expected a FILE: without tensors there is no error");
  } else if (call.shape.empty() && !has_tensors) {
    throw UsageError("no tensors, expected FILE, --q --k --v, --shape or --calibrate");
  }
}

void Advise(const AdviseCall& call) {
  AdviseReport report;
  report.threads = call.machine.Threads();
  report.purpose = ParsePurpose(call.purpose);
  CheckTogether(call);
  if (call.calibrate) return Calibrate(call);
  advise::Request request;
  request.purpose = report.purpose;
  request.threads = report.threads;
  request.isa = call.machine.isa;
  request.mechanisms = Mechanisms(call);
  request.seconds = ParseReal("--seconds", call.seconds, 0, 1e6, kSeconds);
  if (!call.length.empty()) request.length = ParseInteger("--length", call.length, 1, kMostSize, 0);
  if (!call.memory.empty()) request.budget.memory_bytes = ParseMemory(call.memory);
  request.budget.relative_error = ParseError(call.error);
  request.cluster = ParseCluster(call);
  if (!call.tensors.dtype.empty()) request.dtypes = {ParseDType(call.tensors.dtype)};
  const int64_t rows = ParseInteger("--rows", call.rows, 0, kMostSize, kRows);
  call.math.Check();
  if (!call.html.empty()) call.tensors.CheckNotInput("--html", call.html);
  report.target = TargetOf(call);
  report.cpu = os::CpuName();
  report.budget = request.budget;
  report.cluster = request.cluster;
  if (!call.shape.empty()) {
    request.sizes = ParseShape(call.shape);
    std::vector<std::string> no_notes;
    request.exact = call.math.Resolve(TensorSet(), no_notes);
  } else {
    TensorOptions as_it_is = call.tensors;
    as_it_is.dtype.clear();
    const TensorSet set = as_it_is.Load();
    request.exact = call.math.Resolve(set, report.notes);
    report.file = set.file;
    report.layer = set.layer;
    request.source = [as_it_is](std::span<const InputSpec> inputs, std::optional<int64_t> tokens) {
      std::vector<InputSpec> specs(inputs.begin(), inputs.end());
      // A chosen query head comes with its key head.
      for (InputSpec& spec : specs) {
        if (!as_it_is.heads.empty()) std::ranges::replace(spec.axes, 'G', 'H');
      }
      return as_it_is.Load(specs, tokens);
    };
  }
  const std::optional<advise::CostModel> model = FindModel(call, report);
  request.model = model ? &*model : nullptr;
  if (!call.html.empty()) pages::CheckWritable(call.html);
  request.progress = ProgressOf("advising");
  report.advice = advise::Advise(request);
  Progress("");
  if (!call.html.empty()) WritePage(call.html, report);
  call.json ? PrintJson(ToJson(report)) : Print(ToText(report, static_cast<size_t>(rows)));
}

}  // namespace

void AddAdvise(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "advise", "ranked mechanisms and options for tensors, a length and a budget", kFooter);
  const auto call = std::make_shared<AdviseCall>();
  call->tensors.Register(verb);
  AddText(verb, "--shape", call->shape, "instead of tensors: sequences, tokens, heads (8x2: and key heads), channels",
          "B,T,H,D");
  AddText(verb, "--length", call->length, "tokens; default those of the tensors", "N");
  AddText(verb, "--for", call->purpose, "the purpose of the calls; default prefill", "prefill|training|decode");
  AddText(verb, "--memory", call->memory, "memory that a call may use, 512M or 2G", "BYTES");
  AddText(verb, "--error", call->error, "error that is allowed, as a share of the output", "E");
  AddText(verb, "-m,--mechanisms", call->mechanisms, "only these, by name; default all", "A,B,C");
  AddText(verb, "--ranks", call->ranks, "processes among which the tokens are divided: predicts bytes, time and memory",
          "N");
  AddText(verb, "--bandwidth", call->bandwidth, "of a process of --ranks, bytes per second; default 1.25G (10 Gbit/s)",
          "B");
  AddText(verb, "--latency", call->latency, "of a message of --ranks, seconds, 10us or 1ms; default 50us", "L");
  AddText(verb, "--seconds", call->seconds, "for running candidates, default 10; for --calibrate, default 90", "S");
  AddText(verb, "--rows", call->rows, "of the table; 0 is all; default 20", "N");
  AddText(verb, "--html", call->html, "also writes the frontier and the table as a page", "F");
  AddFlag(verb, "--calibrate", call->calibrate, "measures this machine, for predictions");
  AddText(verb, "--model", call->model, "the cost model, read or written; default in the user's cache", "F");
  call->math.Register(verb);
  call->machine.Register(verb);
  AddFlag(verb, "--json", call->json, "one JSON document");
  OnChosen(verb, [call] { Advise(*call); });
}

}  // namespace heed::cli

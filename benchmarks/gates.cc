// Gates: measurement and output of the lines.
#include "benchmarks/gates.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <thread>

#include "nlohmann/json.hpp"

#include "cli/format.h"
#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/harness/case.h"
#include "heed/harness/probe.h"
#include "heed/harness/timed_case.h"
#include "heed/harness/timing.h"

namespace heed::bench {
namespace {

constexpr char kFormat[] = "{:<62} {:>7}  {:>6}  {:>13}  {:>7}  {}\n";  // of one row

constexpr double kShortSeconds = 0.010;
constexpr int kRounds = 9, kShortRounds = 15;  // for long and for short samples
constexpr size_t kEnoughSamples = 5;
constexpr double kGoalOfTwoCalls = .925;  // a speed-up of 1.85, if that of two calls is 2
constexpr double kFlopsPerUpdate = 7;     // per update of a selective scan's state by one token

// The targets that HEED_ISA allows: the roof is that of the measured target.
int64_t Targets() { return Context(1).allowed_targets(); }

std::unique_ptr<TimedCase> Prepare(const Side& side) {
  const Sizes sizes = {side.B, side.T, side.T, side.Hq, side.Hkv, side.D, side.D};
  // The length is such that a window of 512 excludes some keys.
  const int64_t checked = side.variant.starts_with("window") ? 1100 : 300;
  return std::make_unique<TimedCase>(FindOp(side.mechanism), CaseRequest{sizes, side.dtype, 1, side.pass, side.variant},
                                     side.threads, "", checked);
}

// Counts the bytes of what a step reads and writes: all outputs but the first.
size_t StateBytes(const Case& c) {
  size_t bytes = 0;
  for (size_t i = 1; i < c.outputs.size(); ++i) {
    size_t size = SizeOf(c.outputs[i].dtype);
    for (const int64_t n : c.outputs[i].sizes) size *= static_cast<size_t>(n);
    bytes += size;
  }
  return bytes;
}

GateResult ResultOf(const std::string& name, double goal, bool at_least, const std::vector<double>& ratios,
                    int rejected) {
  const Quartiles q = Summarize(ratios);
  const int samples = static_cast<int>(ratios.size());
  const bool noisy = ratios.size() < kEnoughSamples;
  const bool reached = at_least ? q.median >= goal : q.median <= goal;
  return {name, goal, at_least, q.q1, q.median, q.q3, samples, rejected, std::isnan(goal) || noisy || reached};
}

// Times both cases, each on a thread of its own, until the later one has ended.
Sample TimeAtOnce(TimedCase& a, TimedCase& b) {
  return TimeClean(2, [&] {
    std::thread thread([&b] { b.Run(); });
    a.Run();
    thread.join();
  });
}

GateResult Measure(const Line& line) {
  const std::unique_ptr<TimedCase> subject = Prepare(line.subject);
  const std::unique_ptr<TimedCase> other = line.other ? Prepare(*line.other) : nullptr;
  const std::unique_ptr<TimedCase> twin = line.ratio == Ratio::kOfTwoCalls ? Prepare(*line.other) : nullptr;
  const bool is_short = subject->Time().seconds < kShortSeconds;
  const int rounds = is_short ? kShortRounds : kRounds;
  Buffer state;  // of the same size as the subject's
  if (line.ratio == Ratio::kOfMemory) {
    const auto words = static_cast<int64_t>(StateBytes(subject->problem()) / 8);
    state = Buffer(DType::kI64, {words}, Placement::kAligned);
  }
  std::vector<double> ratios;
  int rejected = 0;
  for (int round = 0; round < rounds; ++round) {
    const double peak = line.ratio == Ratio::kOfPeak   ? subject->PeakFlopsPerSecond()
                        : line.ratio == Ratio::kOfAmx  ? probe::AmxFlopsPerSecond()
                        : line.ratio == Ratio::kOfExp2 ? kFlopsPerUpdate * probe::Exp2PerSecond(line.subject.dtype)
                                                       : 1;
    const Sample a = subject->Time();
    const Sample b = twin ? TimeAtOnce(*other, *twin) : other ? other->Time() : Sample{1, true};
    if (!a.clean || !b.clean) {
      ++rejected;
      continue;
    }
    switch (line.ratio) {
      case Ratio::kOfPeak:
      case Ratio::kOfAmx:
      case Ratio::kOfExp2: ratios.push_back(subject->problem().flops / a.seconds / peak); break;
      case Ratio::kTime: ratios.push_back(a.seconds / b.seconds); break;
      case Ratio::kTimePerToken:
        ratios.push_back(a.seconds / static_cast<double>(line.subject.T) /
                         (b.seconds / static_cast<double>(line.other->T)));
        break;
      case Ratio::kTimePerFlop:
        ratios.push_back(a.seconds / subject->problem().flops / (b.seconds / other->problem().flops));
        break;
      case Ratio::kOfMemory:
        ratios.push_back(probe::UpdateSeconds(state.view().data(), state.bytes().size(), Targets(), 1) / a.seconds);
        break;
      case Ratio::kSpeedUp: ratios.push_back(b.seconds / a.seconds); break;
      case Ratio::kOfTwoCalls: ratios.push_back(b.seconds / 2 / a.seconds); break;
    }
  }
  const bool at_least =
      line.ratio != Ratio::kTime && line.ratio != Ratio::kTimePerToken && line.ratio != Ratio::kTimePerFlop;
  return ResultOf(line.name, line.goals.OnThisCpu(), at_least, ratios, rejected);
}

const char* Verdict(const GateResult& r) {
  if (r.rounds < static_cast<int>(kEnoughSamples)) return "noisy";
  return std::isnan(r.goal) ? "" : r.ok ? "ok" : "MISSED";
}

const char* Name(CpuKind kind) {
  switch (kind) {
    case CpuKind::kZen4: return "AMD Zen 4";
    case CpuKind::kIntelAmx: return "Intel with AMX";
    case CpuKind::kAvx2: return "AVX2";
    case CpuKind::kOther: break;
  }
  return "neither AMD Zen 4 nor Intel with AMX nor AVX2: no goal for fractions of peak";
}

}  // namespace

double Goals::OnThisCpu() const {
  switch (ThisCpu()) {
    case CpuKind::kZen4: return zen4;
    case CpuKind::kIntelAmx: return intel;
    case CpuKind::kAvx2: return avx2;
    case CpuKind::kOther: break;
  }
  return any;
}

CpuKind ThisCpu() {
  if (std::string_view(TargetName(Targets())) == "AVX2") return CpuKind::kAvx2;
  const std::string cpu = os::CpuName();
  if (cpu.starts_with("Intel") && os::HasAmx()) return CpuKind::kIntelAmx;
  int family = 0, model = 0;
  const size_t at = cpu.rfind("(family ");
  if (at == std::string::npos || std::sscanf(cpu.c_str() + at, "(family %d model %d)", &family, &model) != 2) {
    return CpuKind::kOther;
  }
  const auto in = [&](int low, int high) { return low <= model && model <= high; };
  if (cpu.starts_with("AMD") && family == 25 && (in(0x10, 0x1f) || in(0x60, 0x7f) || in(0xa0, 0xaf))) {
    return CpuKind::kZen4;
  }
  return CpuKind::kOther;
}

Line OfPeak(const std::string& name, const Side& subject, const Goals& goals) {
  return {name, Ratio::kOfPeak, subject, std::nullopt, goals};
}

Line Against(const std::string& name, Ratio ratio, const Side& subject, const Side& other, double goal) {
  return {name, ratio, subject, other, Everywhere(goal)};
}

void AddSpeedUp(const std::string& name, const Side& one, const Goals& speed_up, std::vector<Line>& lines) {
  Side two = one;
  two.threads = 2;
  lines.push_back({name + ", speed-up", Ratio::kSpeedUp, two, one, speed_up});
  lines.push_back({name + ", of two calls", Ratio::kOfTwoCalls, two, one, Everywhere(kGoalOfTwoCalls)});
}

void AddTwoThreads(const std::string& name, Side one, const Goals& goals, const Goals& speed_up,
                   std::vector<Line>& lines) {
  Side two = one;
  two.threads = 2;
  lines.push_back(OfPeak(name + ", of two cores", two,
                         {.zen4 = 0.9 * goals.zen4, .intel = 0.9 * goals.intel, .avx2 = 0.9 * goals.avx2}));
  AddSpeedUp(name, one, speed_up, lines);
}

std::vector<GateResult> MeasureGates(const std::vector<Line>& lines, const Rows& rows) {
  std::vector<GateResult> results;
  for (const Line& line : lines) AddRow(rows, line.name, [&] { return Measure(line); }, results);
  return results;
}

void AddRow(const Rows& rows, const std::string& name, const std::function<GateResult()>& measure,
            std::vector<GateResult>& results) {
  if (!rows.Begin(name)) return;
  results.push_back(measure());
  rows.Print(GateRow(results.back()));
}

GateResult MeasureRatio(const std::string& name, double goal, bool at_least,
                        const std::function<double(bool*)>& ratio) {
  std::vector<double> ratios;
  int rejected = 0;
  for (int round = 0; round < kShortRounds; ++round) {
    bool clean = true;
    const double r = ratio(&clean);
    if (clean) {
      ratios.push_back(r);
    } else {
      ++rejected;
    }
  }
  return ResultOf(name, goal, at_least, ratios, rejected);
}

std::string GateHeader() {
  const std::string text = Format(
      "forward, f32 unless said, on {}\n{}, target {}, multiply-add {:.0f} GFLOP/s\n"
      "one thread unless said; fraction of the peak probed beside each sample, "
      "or a ratio of times\n\n",
      os::CpuName(), Name(ThisCpu()), TargetName(Targets()),
      probe::PeakFlopsPerSecond(DType::kF32, Targets(), 9) / 1e9);
  return text + Format(kFormat, "line", "goal", "median", "quartiles", "samples", "");
}

std::string GateRow(const GateResult& r) {
  const std::string goal = std::isnan(r.goal) ? "-" : Format("{} {:.2f}", r.at_least ? ">=" : "<=", r.goal);
  const bool none = r.rounds == 0;
  return Format(kFormat, r.name, goal, none ? "-" : Format("{:.3f}", r.median),
                none ? "-" : Format("{:.3f} - {:.3f}", r.q1, r.q3), Format("{}/{}", r.rounds, r.rounds + r.rejected),
                Verdict(r));
}

std::string GateJson(const std::vector<GateResult>& results) {
  using Json = nlohmann::ordered_json;
  Json lines = Json::array();
  for (const GateResult& r : results) {
    lines.push_back({{"name", r.name},
                     {"goal", r.goal},  // NaN becomes null
                     {"at_least", r.at_least},
                     {"median", r.median},
                     {"q1", r.q1},
                     {"q3", r.q3},
                     {"samples", r.rounds},
                     {"rejected", r.rejected},
                     {"ok", r.ok}});
  }
  return Json{{"cpu", os::CpuName()}, {"kind", Name(ThisCpu())}, {"target", TargetName(Targets())}, {"lines", lines}}
      .dump(2);
}

}  // namespace heed::bench

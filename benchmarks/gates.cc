// Gates of exact attention: fractions of the multiply-add peak, and costs of
// threads, layouts and options beside the plain call.
#include "benchmarks/gates.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>

#include "fmt/format.h"
#include "nlohmann/json.hpp"

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/harness/case.h"
#include "heed/harness/probe.h"
#include "heed/harness/timed_case.h"
#include "heed/harness/timing.h"

namespace heed::bench {
namespace {

constexpr char kFormat[] =
    "{:<47} {:>7}  {:>6}  {:>13}  {:>7}  {}\n";  // of one row

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr double kShortSeconds = 0.010;
constexpr int kRounds = 9, kShortRounds = 15;  // of long and of short samples
constexpr size_t kEnoughSamples = 5;

// One side of a line.
struct Side {
  int64_t T, Hq, Hkv, D;
  std::string variant;
  int threads = 1;
  DType dtype = DType::kF32;
  const char* pass = "forward";
};

// What is measured: the subject's fraction of peak, or its time over that of
// the other, or the other's over its (which is a speed-up).
enum class Ratio { kOfPeak, kTime, kSpeedUp };

struct Line {
  std::string name;
  Ratio ratio;
  Side subject;
  std::optional<Side> other;
  double zen4, intel, any;  // goals by kind of CPU
};

Line OfPeak(const std::string& name, const Side& subject, double zen4,
            double intel) {
  return {name, Ratio::kOfPeak, subject, std::nullopt, zen4, intel, kNone};
}

Line Against(const std::string& name, Ratio ratio, const Side& subject,
             const Side& other, double goal) {
  return {name, ratio, subject, other, goal, goal, goal};
}

// Two threads reach 0.9 of twice the goal of one, and so much more speed.
void AddTwoThreads(const std::string& name, Side one, double zen4, double intel,
                   double speed_up, std::vector<Line>& lines) {
  Side two = one;
  two.threads = 2;
  lines.push_back(
      OfPeak(name + ", of two cores", two, 0.9 * zen4, 0.9 * intel));
  lines.push_back(
      Against(name + ", speed-up", Ratio::kSpeedUp, two, one, speed_up));
}

// The backward pass, on its 10 N^2 d flops per head.
void AddBackward(std::vector<Line>& lines) {
  const auto backward = [](int64_t T, int64_t H, int64_t D, const char* variant,
                           DType dtype = DType::kF32) {
    return Side{T, H, H, D, variant, 1, dtype, "backward"};
  };
  for (const int64_t D : {64, 128}) {
    for (const bool causal : {false, true}) {
      const char* variant = causal ? "causal" : "";
      const double zen4 = causal ? .80 : .86, intel = causal ? .66 : .72;
      const auto name = [&](const char* dtype, int64_t N) {
        return fmt::format("{} backward N {} d {} {}", dtype, N, D,
                           causal ? variant : "full");
      };
      lines.push_back(OfPeak(name("f32", 2048), backward(2048, 4, D, variant), zen4, intel));
      lines.push_back(OfPeak(name("f32", 512), backward(512, 8, D, variant), 0.8 * zen4,
                             0.8 * intel));
      const Side bf16 = backward(2048, 4, D, variant, DType::kBF16);
      lines.push_back(OfPeak(name("bf16", 2048), bf16, .68, kNone));
      lines.push_back(Against(name("bf16", 2048) + " / f32", Ratio::kTime, bf16,
                              backward(2048, 4, D, variant), 1.02));
      if (os::NumUsableCpus() < 2) continue;
      AddTwoThreads(name("f32", 2048) + ", 4 heads", backward(2048, 4, D, variant), zen4,
                    intel, 1.85, lines);
      AddTwoThreads(name("f32", 2048) + ", 1 head", backward(2048, 1, D, variant), zen4,
                    intel, 1.85, lines);
    }
  }
  lines.push_back(OfPeak("f32 backward window 512, N 8192 d 64",
                         backward(8192, 2, 64, "window=512"), .65, .55));
}

std::vector<Line> Lines() {
  std::vector<Line> lines = {
      OfPeak("N 2048 d 64 full", {2048, 4, 4, 64, ""}, .88, .76),
      OfPeak("N 2048 d 128 full", {2048, 4, 4, 128, ""}, .90, .74),
      OfPeak("N 2048 d 64 causal", {2048, 4, 4, 64, "causal"}, .82, .70),
      OfPeak("N 2048 d 128 causal", {2048, 4, 4, 128, "causal"}, .85, .68),
      OfPeak("N 512 d 64 full", {512, 8, 8, 64, ""}, .80, .70),
      OfPeak("N 512 d 64 causal", {512, 8, 8, 64, "causal"}, .70, kNone),
      OfPeak("N 128 d 64 full", {128, 16, 16, 64, ""}, .65, kNone),
      OfPeak("window 512, N 8192 d 64", {8192, 2, 2, 64, "window=512"}, .70,
             .62),
      OfPeak("window 1024, N 8192 d 64", {8192, 2, 2, 64, "window=1024"}, .78,
             .68),
  };
  if (os::NumUsableCpus() >= 2) {
    AddTwoThreads("2 threads, d 64 full, 4 heads", {2048, 4, 4, 64, ""}, .88,
                  .76, 1.85, lines);
    AddTwoThreads("2 threads, d 128 full, 4 heads", {2048, 4, 4, 128, ""}, .90,
                  .74, 1.85, lines);
    AddTwoThreads("2 threads, d 64 causal, 4 heads", {2048, 4, 4, 64, "causal"},
                  .82, .70, 1.80, lines);
    AddTwoThreads("2 threads, d 128 causal, 4 heads",
                  {2048, 4, 4, 128, "causal"}, .85, .68, 1.80, lines);
    AddTwoThreads("2 threads, d 64 full, 1 head", {2048, 1, 1, 64, ""}, .88,
                  .76, 1.85, lines);
    AddTwoThreads("2 threads, d 64 causal, 1 head", {2048, 1, 1, 64, "causal"},
                  .82, .70, 1.80, lines);
  }
  const Side plain = {2048, 4, 4, 64, ""};
  const auto time = [&](const std::string& name, const Side& subject,
                        const Side& other, double goal) {
    lines.push_back(Against(name, Ratio::kTime, subject, other, goal));
  };
  time("[B,T,H,D] / [B,H,T,D], d 64", plain, {2048, 4, 4, 64, "bhtd"}, 1.06);
  time("[B,T,H,D] / [B,H,T,D], d 128, 16 heads", {2048, 16, 16, 128, ""},
       {2048, 16, 16, 128, "bhtd"}, 1.06);
  time("GQA 8 on 2 / 8 on 8 heads, d 64", {2048, 8, 2, 64, ""},
       {2048, 8, 8, 64, ""}, 1.00);
  time("GQA 8 on 2 / 8 on 8 heads, d 128 causal", {2048, 8, 2, 128, "causal"},
       {2048, 8, 8, 128, "causal"}, 1.00);
  time("softcap / plain", {2048, 4, 4, 64, "softcap=30"}, plain, 1.15);
  time("ALiBi / plain", {2048, 4, 4, 64, "alibi"}, plain, 1.03);
  time("bias / plain", {2048, 4, 4, 64, "bias"}, plain, 1.10);
  time("attention_map 64 x 64 / attention, N 16384", {16384, 1, 1, 64, "map=64"},
       {16384, 1, 1, 64, ""}, 1.30);
  // 16 bits. Goals of peak stand where bf16 has dot products of its own.
  for (const auto& [D, full, causal] : {std::tuple{64, .76, .70}, {128, .80, .74}}) {
    for (const char* variant : {"", "causal"}) {
      const bool is_full = variant[0] == '\0';
      const std::string name =
          fmt::format("bf16 N 2048 d {} {}", D, is_full ? "full" : variant);
      Side side = {2048, 4, 4, D, variant};
      const Side single = side;
      side.dtype = DType::kBF16;
      lines.push_back(OfPeak(name, side, is_full ? full : causal, kNone));
      time(name + " / f32", side, single, 1.02);
      side.dtype = DType::kF16;
      time(fmt::format("f16 N 2048 d {} {} / f32", D, is_full ? "full" : variant),
           side, single, 1.02);
    }
  }
  const Side short_f32 = {100, 8, 8, 64, ""};
  Side short_bf16 = short_f32, short_f16 = short_f32;
  short_bf16.dtype = DType::kBF16;
  short_f16.dtype = DType::kF16;
  time("bf16 N 100 d 64 / f32", short_bf16, short_f32, 1.02);
  time("f16 N 100 d 64 / f32", short_f16, short_f32, 1.02);
  AddBackward(lines);
  return lines;
}

std::unique_ptr<TimedCase> Prepare(const OpEntry& op, const Side& side) {
  const Sizes sizes = {1, side.T, side.T, side.Hq, side.Hkv, side.D, side.D};
  // Long enough that a window of 512 excludes something.
  const int64_t checked = side.variant.starts_with("window") ? 1100 : 300;
  return std::make_unique<TimedCase>(
      op, CaseRequest{sizes, side.dtype, 1, side.pass, side.variant},
      side.threads, "", checked);
}

double Goal(const Line& line) {
  switch (ThisCpu()) {
    case CpuKind::kZen4:
      return line.zen4;
    case CpuKind::kIntelAmx:
      return line.intel;
    case CpuKind::kOther:
      break;
  }
  return line.any;
}

GateResult Measure(const OpEntry& op, const Line& line) {
  const std::unique_ptr<TimedCase> subject = Prepare(op, line.subject);
  const std::unique_ptr<TimedCase> other =
      line.other ? Prepare(op, *line.other) : nullptr;
  const bool is_short = subject->Time().seconds < kShortSeconds;
  const int rounds = is_short ? kShortRounds : kRounds;
  std::vector<double> ratios;
  int rejected = 0;
  for (int round = 0; round < rounds; ++round) {
    const double peak =
        line.ratio == Ratio::kOfPeak ? subject->PeakFlopsPerSecond() : 1;
    const Sample a = subject->Time();
    const Sample b = other ? other->Time() : Sample{1, true};
    if (!a.clean || !b.clean) {
      ++rejected;
      continue;
    }
    switch (line.ratio) {
      case Ratio::kOfPeak:
        ratios.push_back(subject->problem().flops / a.seconds / peak);
        break;
      case Ratio::kTime:
        ratios.push_back(a.seconds / b.seconds);
        break;
      case Ratio::kSpeedUp:
        ratios.push_back(b.seconds / a.seconds);
        break;
    }
  }
  const Quartiles q = Summarize(ratios);
  const bool at_least = line.ratio != Ratio::kTime;
  const double goal = Goal(line);
  const bool noisy = ratios.size() < kEnoughSamples;
  const bool reached = at_least ? q.median >= goal : q.median <= goal;
  return {line.name,
          goal,
          at_least,
          q.q1,
          q.median,
          q.q3,
          static_cast<int>(ratios.size()),
          rejected,
          std::isnan(goal) || noisy || reached};
}

const char* Verdict(const GateResult& r) {
  if (r.rounds < static_cast<int>(kEnoughSamples)) return "noisy";
  return std::isnan(r.goal) ? "" : r.ok ? "ok" : "MISSED";
}

const char* Name(CpuKind kind) {
  switch (kind) {
    case CpuKind::kZen4:
      return "AMD Zen 4";
    case CpuKind::kIntelAmx:
      return "Intel with AMX";
    case CpuKind::kOther:
      break;
  }
  return "neither AMD Zen 4 nor Intel with AMX: no goal for fractions of peak";
}

}  // namespace

CpuKind ThisCpu() {
  const std::string cpu = os::CpuName();
  int family = 0, model = 0;
  const size_t at = cpu.rfind("(family ");
  if (at == std::string::npos ||
      std::sscanf(cpu.c_str() + at, "(family %d model %d)", &family, &model) !=
          2) {
    return CpuKind::kOther;
  }
  const auto in = [&](int low, int high) {
    return low <= model && model <= high;
  };
  if (cpu.starts_with("AMD") && family == 25 &&
      (in(0x10, 0x1f) || in(0x60, 0x7f) || in(0xa0, 0xaf))) {
    return CpuKind::kZen4;
  }
  // Sapphire, Emerald and Granite Rapids.
  if (cpu.find("Intel") != std::string::npos && family == 6 &&
      (model == 143 || model == 207 || model == 173 || model == 174)) {
    return CpuKind::kIntelAmx;
  }
  return CpuKind::kOther;
}

std::vector<GateResult> MeasureGates(void (*progress)(const std::string&)) {
  const OpEntry op = FindOp("attention");
  std::vector<GateResult> results;
  for (const Line& line : Lines()) {
    progress(line.name);
    results.push_back(Measure(op, line));
  }
  return results;
}

std::string GateTable(const std::vector<GateResult>& results) {
  std::string text = fmt::format(
      "forward, f32 unless said, on {}\n{}, target {}, multiply-add {:.0f} GFLOP/s\n"
      "one thread unless said; fraction of the peak probed beside each sample, "
      "or a ratio of times\n\n",
      os::CpuName(), Name(ThisCpu()), TargetName(kAllTargets),
      probe::PeakFlopsPerSecond(DType::kF32, kAllTargets, 9) / 1e9);
  text += fmt::format(kFormat, "line", "goal", "median", "quartiles", "samples",
                      "");
  for (const GateResult& r : results) {
    const std::string goal =
        std::isnan(r.goal)
            ? "-"
            : fmt::format("{} {:.2f}", r.at_least ? ">=" : "<=", r.goal);
    const bool none = r.rounds == 0;
    text += fmt::format(
        kFormat, r.name, goal, none ? "-" : fmt::format("{:.3f}", r.median),
        none ? "-" : fmt::format("{:.3f} - {:.3f}", r.q1, r.q3),
        fmt::format("{}/{}", r.rounds, r.rounds + r.rejected), Verdict(r));
  }
  return text;
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
  return Json{{"cpu", os::CpuName()},
              {"kind", Name(ThisCpu())},
              {"target", TargetName(kAllTargets)},
              {"lines", lines}}
      .dump(2);
}

}  // namespace heed::bench

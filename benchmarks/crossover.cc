// Crossover: both calls are timed alternately at lengths that double, until the mechanism has been cheaper at two
// successive lengths. Between two lengths, the ratio of times is interpolated as a power of the length.
#include "benchmarks/crossover.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "nlohmann/json.hpp"

#include "cli/format.h"
#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/harness/case.h"
#include "heed/harness/timed_case.h"
#include "heed/harness/timing.h"

namespace heed::bench {
namespace {

constexpr int64_t kHeads = 4, kChannels = 64, kTokens = 2048;
constexpr int64_t kShortest = 16, kLongest = 8192, kMostKeys = 131072;
constexpr double kSampleSeconds = 0.0005;  // shorter calls are repeated
constexpr int kRounds = 5;
constexpr double kNever = -1;
constexpr char kFormat[] = "{:<20} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n";  // of one row

std::string Text(double seconds) { return Format("{:.4g}", 1e9 * seconds); }

// The number of calls in one sample.
int CallsOf(TimedCase& timed) {
  const double once = std::max(timed.Time().seconds, 1e-7);
  return static_cast<int>(std::clamp(kSampleSeconds / once, 1.0, 1000.0));
}

double SecondsOfCall(TimedCase& timed, int calls) {
  const Sample sample = TimeClean(1, [&] {
    for (int i = 0; i < calls; ++i) timed.Run();
  });
  return sample.seconds / calls;
}

struct Pair {
  double seconds, ratio;  // seconds of the mechanism's call, and its ratio to attention's
};

Pair InTurns(TimedCase& mechanism, TimedCase& attention) {
  const int own = CallsOf(mechanism), other = CallsOf(attention);
  std::vector<double> seconds, ratios;
  for (int round = 0; round < kRounds; ++round) {
    seconds.push_back(SecondsOfCall(mechanism, own));
    ratios.push_back(seconds.back() / SecondsOfCall(attention, other));
  }
  return {Summarize(seconds).median, Summarize(ratios).median};
}

TimedCase Make(const OpEntry& op, const std::string& pass, int64_t Tq, int64_t Tk, const char* variant) {
  const Sizes sizes = {1, Tq, Tk, kHeads, kHeads, kChannels, kChannels};
  return TimedCase(op, {sizes, DType::kF32, 1, pass, variant}, 1);
}

// Attention's call for a pass: as many queries as keys, or one query for a step.
TimedCase Attention(const std::string& pass, int64_t T) {
  const OpEntry op = FindOp("attention");
  return pass == "step" ? Make(op, pass, 1, T, "") : Make(op, pass, T, T, "causal");
}

double PerTokenAndHead(double seconds, const std::string& pass, int64_t T) {
  return seconds / static_cast<double>(kHeads * (pass == "step" ? 1 : T));
}

Crossover Measure(const OpEntry& op, const std::string& pass) {
  const bool step = pass == "step";
  const int64_t longest = step ? kMostKeys : kLongest;
  Crossover result;
  if (op.name == "attention") {
    TimedCase timed = Attention(pass, kTokens);
    result.seconds_per_token = PerTokenAndHead(SecondsOfCall(timed, CallsOf(timed)), pass, kTokens);
    return result;
  }
  TimedCase usual = Make(op, pass, step ? 1 : kTokens, step ? 1 : kTokens, "");
  result.seconds_per_token = PerTokenAndHead(SecondsOfCall(usual, CallsOf(usual)), pass, kTokens);
  double before = 0;  // ratio at half the length
  double from = kNever;
  for (int64_t T = kShortest; T <= longest; T *= 2) {
    TimedCase mechanism = Make(op, pass, step ? 1 : T, step ? 1 : T, "");
    TimedCase attention = Attention(pass, T);
    const double ratio = InTurns(mechanism, attention).ratio;
    if (ratio > 1) {
      from = kNever;
    } else if (from >= 0) {
      break;  // cheaper at two successive lengths
    } else if (T == kShortest) {
      from = 0;
    } else {
      const double part = std::log(before) / std::log(before / ratio);
      from = static_cast<double>(T) / 2 * std::exp2(part);
    }
    before = ratio;
  }
  result.from = from < 0 ? Format("> {}", longest) : from == 0 ? Format("<= {}", kShortest) : Format("{:.0f}", from);
  return result;
}

}  // namespace

std::vector<CrossoverRow> MeasureCrossover(const Rows& rows) {
  std::vector<CrossoverRow> results;
  for (const OpEntry& op : AllOps()) {
    if (!rows.Begin(op.name)) continue;
    const auto measure = [&](const std::string& pass) -> std::optional<Crossover> {
      const bool has = std::find(op.passes.begin(), op.passes.end(), pass) != op.passes.end();
      if (!has) return std::nullopt;
      return Measure(op, pass);
    };
    results.push_back({op.name, measure("forward"), measure("backward"), measure("step")});
    rows.Print(CrossoverText(results.back()));
  }
  return results;
}

std::string CrossoverHeader() {
  const std::string text = Format(
      "{}, target {}, f32, {} heads of {} channels, one thread\n"
      "ns per token and head at {} tokens, and from how many tokens on that is less "
      "than exact attention takes, causal\n\n",
      os::CpuName(), TargetName(kAllTargets), kHeads, kChannels, kTokens);
  return text + Format(kFormat, "mechanism", "forward", "from", "backward", "from", "one token", "from keys");
}

std::string CrossoverText(const CrossoverRow& row) {
  const auto time = [](const std::optional<Crossover>& c) { return c ? Text(c->seconds_per_token) : "-"; };
  const auto from = [](const std::optional<Crossover>& c) { return c ? c->from : "-"; };
  return Format(kFormat, row.mechanism, time(row.forward), from(row.forward), time(row.backward), from(row.backward),
                time(row.step), from(row.step));
}

std::string CrossoverJson(const std::vector<CrossoverRow>& rows) {
  using Json = nlohmann::ordered_json;
  Json list = Json::array();
  for (const CrossoverRow& row : rows) {
    const auto pass = [](const std::optional<Crossover>& c) {
      if (!c) return Json(nullptr);
      return Json{{"seconds_per_token", c->seconds_per_token},
                  {"from", c->from.empty() ? Json(nullptr) : Json(c->from)}};
    };
    list.push_back({{"mechanism", row.mechanism},
                    {"forward", pass(row.forward)},
                    {"backward", pass(row.backward)},
                    {"step", pass(row.step)}});
  }
  return Json{{"cpu", os::CpuName()},
              {"target", TargetName(kAllTargets)},
              {"command", "scripts/bench crossover --json"},
              {"dtype", "f32"},
              {"heads", kHeads},
              {"channels", kChannels},
              {"tokens", kTokens},
              {"threads", 1},
              {"rows", list}}
      .dump(2);
}

}  // namespace heed::bench

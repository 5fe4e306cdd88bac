// Gates of the recurrence engine: fractions of the multiply-add peak, counting 4 K V
// flops per token forward and 12 K V backward, of delta rules 6 and 18; a step beside the memory of its state;
// long sequences beside short ones.
#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/gates.h"
#include "cli/format.h"
#include "heed/core/os.h"

namespace heed::bench {
namespace {

// One kind of gate, and its goals at 64 and 128 channels.
struct Kind {
  const char* name;
  const char* mechanism;
  const char* variant;
  double zen4[2], intel[2];
  double backward_zen4[2] = {.55, .55}, backward_intel[2] = {.48, .48};
  double twelve_heads_zen4 = .60;  // of 64 channels, forward
};

constexpr Kind kKinds[] = {
    {"linear", "linear_attention", "identity", {.72, .75}, {.67, .63}, {.55, .55}, {.48, .48}, .72},
    {"normalised", "linear_attention", "elu1", {.72, .75}, {.67, .63}, {.55, .55}, {.48, .48}, .72},
    {"scalar gate", "simple_gla", "", {.65, .65}, {.60, .60}},
    {"vector gate", "gla", "", {.60, .60}, {.54, .54}},
    {"mlstm", "mlstm", "", {.60, .60}, {.54, .54}},
};

// Delta rules, of one head and of twelve.
constexpr Kind kDeltaKinds[] = {
    {"delta rule", "delta_rule", "", {.50, .60}, {.50, .52}, {.40, .45}, {.40, .42}},
    {"gated delta rule", "gated_delta_rule", "", {.50, .60}, {.50, .52}, {.40, .45}, {.40, .42}},
    {"kda", "kda", "", {.50, .60}, {.50, .52}, {.40, .45}, {.40, .42}},
};
constexpr double kSpeedUp = 1.85;
constexpr int64_t kStepHeads = 256;  // 16 MiB of state at 128 channels

Side SideOf(const Kind& kind, const char* pass, int64_t T, int64_t heads, int64_t D) {
  return {T, heads, heads, D, kind.variant, 1, DType::kF32, pass, kind.mechanism};
}

}  // namespace

std::vector<Line> RecurrenceLines() {
  std::vector<Line> lines;
  for (const Kind& kind : kKinds) {
    for (const int i : {0, 1}) {
      const int64_t D = i == 0 ? 64 : 128;
      for (const char* pass : {"forward", "backward"}) {
        const bool forward = std::string(pass) == "forward";
        const double zen4 = forward ? kind.zen4[i] : kind.backward_zen4[i];
        const double intel = forward ? kind.intel[i] : kind.backward_intel[i];
        const std::string name = Format("{} {} T 2048 d {}", kind.name, pass, D);
        lines.push_back(OfPeak(name, SideOf(kind, pass, 2048, 4, D), zen4, intel));
        if (D == 64) {  // rows of a head lie 3 KiB apart
          lines.push_back(OfPeak(name + ", 12 heads", SideOf(kind, pass, 2048, 12, D),
                                 forward ? kind.twelve_heads_zen4 : .50, kNone));
        }
        if (os::NumUsableCpus() < 2) continue;
        for (const int64_t heads : {4, 1}) {
          AddTwoThreads(Format("{}, {} head{}", name, heads, heads > 1 ? "s" : ""), SideOf(kind, pass, 2048, heads, D),
                        zen4, intel, kSpeedUp, lines);
        }
      }
    }
  }
  for (const Kind& kind : kDeltaKinds) {
    for (const int i : {0, 1}) {
      const int64_t D = i == 0 ? 64 : 128;
      for (const int64_t heads : {1, 12}) {
        const auto name = [&](const char* pass) {
          return Format("{} {} T 2048 d {}, {} head{}", kind.name, pass, D, heads, heads > 1 ? "s" : "");
        };
        lines.push_back(OfPeak(name("forward"), SideOf(kind, "forward", 2048, heads, D), kind.zen4[i], kind.intel[i]));
        lines.push_back(OfPeak(name("backward"), SideOf(kind, "backward", 2048, heads, D), kind.backward_zen4[i],
                               kind.backward_intel[i]));
      }
    }
    lines.push_back({Format("{} step, of a raw read and write", kind.name), Ratio::kOfMemory,
                     SideOf(kind, "step", 1, kStepHeads, 128), std::nullopt, .80, .80, .80});
  }
  // Chunks with AMX beside the recurrence itself.
  for (const Kind& kind : kKinds) {
    const std::string name = kind.name;
    if (!os::HasAmx() || (name != "linear" && name != "scalar gate")) continue;
    for (const int i : {0, 1}) {
      const int64_t D = i == 0 ? 64 : 128;
      const Side f32 = SideOf(kind, "forward", 2048, 4, D);
      Side bf16 = f32;
      bf16.dtype = DType::kBF16;
      lines.push_back(Against(Format("{} forward T 2048 d {}, bf16 / f32", name, D), Ratio::kTime, bf16, f32,
                              i == 0 ? 1 / 2.5 : 1 / 3.5));
    }
  }
  for (const Kind& kind : kKinds) {
    lines.push_back({Format("{} step, of a raw read and write", kind.name), Ratio::kOfMemory,
                     SideOf(kind, "step", 1, kStepHeads, 128), std::nullopt, .80, .80, .80});
  }
  for (const Kind& kind : kKinds) {
    for (const char* pass : {"forward", "backward"}) {
      lines.push_back(Against(Format("{} {}, T 131072 / 2048", kind.name, pass), Ratio::kTimePerToken,
                              SideOf(kind, pass, 131072, 1, 64), SideOf(kind, pass, 2048, 1, 64), 1.05));
    }
  }
  return lines;
}

}  // namespace heed::bench

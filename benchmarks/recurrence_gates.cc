// Gates of the recurrence engine: fractions of the FMA peak, counting 4 K V flops per token forward and 12 K V
// backward, for delta rules 6 and 18; a step relative to the memory of its state; long sequences relative to short
// ones.
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
  Goals forward[2], backward[2];
  Goals twelve_heads = {};  // of 64 channels, forward
};

constexpr Goals kBackward[2] = {{.55, .48, .42}, {.55, .48, .45}};

constexpr Kind kKinds[] = {
    {"linear",
     "linear_attention",
     "identity",
     {{.72, .67, .55}, {.75, .63, .60}},
     {kBackward[0], kBackward[1]},
     {.zen4 = .72, .avx2 = .52}},
    {"normalised",
     "linear_attention",
     "elu1",
     {{.72, .67, .55}, {.75, .63, .60}},
     {kBackward[0], kBackward[1]},
     {.zen4 = .72, .avx2 = .52}},
    {"scalar gate", "simple_gla", "", {{.65, .60, .48}, {.65, .60, .52}}, {kBackward[0], kBackward[1]}, {.zen4 = .60}},
    {"vector gate", "gla", "", {{.60, .54, .40}, {.60, .54, .45}}, {{.55, .48, .36}, {.55, .48, .40}}, {.zen4 = .60}},
    {"mlstm", "mlstm", "", {{.60, .54, .48}, {.60, .54, .52}}, {kBackward[0], kBackward[1]}, {.zen4 = .60}},
};

// Delta rules, of one head and of twelve.
constexpr Goals kDeltaForward[2] = {{.50, .50, .52}, {.60, .52, .52}};
constexpr Goals kDeltaBackward[2] = {{.40, .40, .44}, {.45, .42, .44}};
constexpr const char* kDeltaKinds[][2] = {
    {"delta rule", "delta_rule"}, {"gated delta rule", "gated_delta_rule"}, {"kda", "kda"}};
constexpr Goals kSpeedUp = {1.85, 1.85, 1.70, 1.85};  // of two threads
constexpr int64_t kStepHeads = 256;                   // 16 MiB of state at 128 channels

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
        const Goals& goals = forward ? kind.forward[i] : kind.backward[i];
        const std::string name = Format("{} {} T 2048 d {}", kind.name, pass, D);
        lines.push_back(OfPeak(name, SideOf(kind, pass, 2048, 4, D), goals));
        if (D == 64) {  // rows of a head lie 3 KiB apart
          lines.push_back(OfPeak(name + ", 12 heads", SideOf(kind, pass, 2048, 12, D),
                                 forward ? kind.twelve_heads : Goals{.zen4 = .50}));
        }
        if (os::NumUsableCpus() < 2) continue;
        for (const int64_t heads : {4, 1}) {
          AddTwoThreads(Format("{}, {} head{}", name, heads, heads > 1 ? "s" : ""), SideOf(kind, pass, 2048, heads, D),
                        goals, kSpeedUp, lines);
        }
      }
    }
  }
  for (const auto& [rule, mechanism] : kDeltaKinds) {
    const Kind kind = {
        rule, mechanism, "", {kDeltaForward[0], kDeltaForward[1]}, {kDeltaBackward[0], kDeltaBackward[1]}};
    for (const int i : {0, 1}) {
      const int64_t D = i == 0 ? 64 : 128;
      for (const int64_t heads : {1, 12}) {
        const auto name = [&](const char* pass) {
          return Format("{} {} T 2048 d {}, {} head{}", kind.name, pass, D, heads, heads > 1 ? "s" : "");
        };
        lines.push_back(OfPeak(name("forward"), SideOf(kind, "forward", 2048, heads, D), kind.forward[i]));
        lines.push_back(OfPeak(name("backward"), SideOf(kind, "backward", 2048, heads, D), kind.backward[i]));
        if (heads > 1 || os::NumUsableCpus() < 2) continue;
        for (const char* pass : {"forward", "backward"}) {
          AddSpeedUp(name(pass), SideOf(kind, pass, 2048, heads, D), kSpeedUp, lines);
        }
      }
    }
    lines.push_back({Format("{} step, of a raw read and write", kind.name), Ratio::kOfMemory,
                     SideOf(kind, "step", 1, kStepHeads, 128), std::nullopt, Everywhere(.80)});
  }
  // Chunks in AMX tiles, compared with the recurrence itself.
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
                     SideOf(kind, "step", 1, kStepHeads, 128), std::nullopt, Everywhere(.80)});
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

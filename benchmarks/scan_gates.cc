// Gates of the scan engine: updates of states relative to exponentials, a step relative to the memory of its states,
// long sequences relative to short ones, and convolutions.
#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/gates.h"
#include "cli/format.h"
#include "heed/core/os.h"

namespace heed::bench {
namespace {

constexpr Goals kOfExp2 = {.zen4 = .60, .intel = .60, .avx2 = .50};
constexpr double kSpeedUp = 1.85, kBackward = 3.2, kStep = .75, kLong = 1.05;
constexpr double kGrowth = 1.6;                  // of transforms of 32 times the length
constexpr int64_t kHeads = 12, kHeadSize = 128;  // 1536 channels, as of Mamba with 768 features
constexpr int64_t kStepSequences = 128;          // 12 MiB of states, which leave A in a cache

Side SideOf(const char* mechanism, const char* pass, int64_t T, const std::string& variant) {
  Side side = {T, kHeads, kHeads, kHeadSize, variant};
  side.pass = pass;
  side.mechanism = mechanism;
  return side;
}

// The layout of tensors: tokens contiguous, or channels contiguous.
struct Layout {
  const char *name, *variant;
};
constexpr Layout kLayouts[] = {{"[B, D, T]", ""}, {"[B, T, D]", "strided"}};

}  // namespace

std::vector<Line> ScanLines() {
  std::vector<Line> lines;
  for (const Layout& layout : kLayouts) {
    const std::string name = Format("selective_scan {}", layout.name);
    const auto side = [&](const char* pass, int64_t T) { return SideOf("selective_scan", pass, T, layout.variant); };
    const Side forward = side("forward", 2048), backward = side("backward", 2048);
    lines.push_back({name + " forward, of exp2", Ratio::kOfExp2, forward, std::nullopt, kOfExp2});
    Side mamba = forward;
    mamba.variant += layout.variant[0] == '\0' ? "mamba" : "+mamba";
    lines.push_back({name + " with softplus, bias and gate, of exp2", Ratio::kOfExp2, mamba, std::nullopt, Goals()});
    lines.push_back(Against(name + " backward / forward", Ratio::kTime, backward, forward, kBackward));
    Side brief = forward, lengthy = side("forward", 131072);  // of channels that fit in memory
    brief.Hq = brief.Hkv = lengthy.Hq = lengthy.Hkv = 1;
    lines.push_back(
        Against(name + " forward, T 131072 / 2048, 128 channels", Ratio::kTimePerToken, lengthy, brief, kLong));
    if (os::NumUsableCpus() < 2) continue;
    for (const Side& one : {forward, backward}) {
      AddSpeedUp(Format("{} {}, two threads", name, one.pass), one, Everywhere(kSpeedUp), lines);
    }
  }
  Side step = SideOf("selective_scan", "step", 1, "");
  step.B = kStepSequences;
  lines.push_back(
      {"selective_scan step, of a raw read and write", Ratio::kOfMemory, step, std::nullopt, Everywhere(kStep)});
  for (const char* mechanism : {"rg_lru", "hgrn"}) {
    const Side forward = SideOf(mechanism, "forward", 2048, "");
    lines.push_back(Against(Format("{} backward / forward", mechanism), Ratio::kTime,
                            SideOf(mechanism, "backward", 2048, ""), forward, kBackward));
  }
  for (const char* pass : {"forward", "backward"}) {
    Side brief = SideOf("long_convolution", pass, 4096, "");
    brief.Hq = brief.Hkv = 1;
    Side lengthy = brief;
    lengthy.T = 131072;
    lines.push_back(Against(Format("long_convolution {}, T 131072 / 4096, 128 channels", pass), Ratio::kTimePerToken,
                            lengthy, brief, pass == std::string("forward") ? kGrowth : kNone));
  }
  return lines;
}

}  // namespace heed::bench

// Gates of sparse attention: the time of a kept pair relative to that of dense attention, and the cost of a list of
// tiles.
#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/gates.h"
#include "cli/format.h"

namespace heed::bench {
namespace {

constexpr int64_t N = 8192;
constexpr double kBackward = 1.35;

}  // namespace

std::vector<Line> PatternLines() {
  const auto side = [](int64_t D, DType dtype, const char* pass, const std::string& pattern, int64_t T = N) {
    return Side{T, 1, 1, D, pattern.empty() ? "" : "pattern=" + pattern, 1, dtype, pass};
  };
  const struct {
    const char* name;
    std::string pattern;
    double forward;
  } patterns[] = {{"longformer 512, 2 tokens", "longformer(512, [0, 4096])", 1.25},
                  {"bigbird 64, 3", "bigbird(64, 3)", 1.15},
                  {"dilated 256, 2", "dilated(256, 2)", 1.25},
                  {"dilated 256, 7", "dilated(256, 7)", 1.25},
                  {"13 of 128 blocks", "random_blocks(13)", 1.15}};
  std::vector<Line> lines;
  for (const char* pass : {"forward", "backward"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t D : {64, 128}) {
        for (const auto& [name, pattern, forward] : patterns) {
          lines.push_back(Against(Format("{}, {} {} d {}: pair / dense", name, Name(dtype), pass, D),
                                  Ratio::kTimePerFlop, side(D, dtype, pass, pattern), side(D, dtype, pass, ""),
                                  pass[0] == 'f' ? forward : kBackward));
        }
      }
    }
  }
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto add = [&](const char* name, const char* pattern, const char* other, int64_t other_N, double goal) {
      lines.push_back(Against(Format("{}, {} d 64", name, Name(dtype)), Ratio::kTime,
                              side(64, dtype, "forward", pattern), side(64, dtype, "forward", other, other_N), goal));
    };
    add("longformer N 8192 / 4096", "longformer(512, [0])", "longformer(512, [0])", N / 2, 2.1);
    add("bigbird N 8192 / 4096", "bigbird(64, 3)", "bigbird(64, 3)", N / 2, 2.1);
    add("longformer listed anew / found", "longformer(512, [0, #])", "longformer(512, [0])", N, 1.03);
    add("13 blocks listed anew / found", "random_blocks(13, 64, #)", "random_blocks(13)", N, 1.03);
  }
  return lines;
}

}  // namespace heed::bench

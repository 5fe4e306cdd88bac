// Gates: the lines that a release must reach, each a ratio within one run.
#ifndef BENCHMARKS_GATES_H_
#define BENCHMARKS_GATES_H_

#include <string>
#include <vector>

namespace heed::bench {

// What the goal of a fraction of peak depends on.
enum class CpuKind { kZen4, kIntelAmx, kOther };
CpuKind ThisCpu();

struct GateResult {
  std::string name;
  double goal;    // NaN: none for this kind of CPU
  bool at_least;  // false: the ratio must not exceed the goal
  double q1, median, q3;
  int rounds, rejected;  // samples that counted, and those retried
  bool ok;               // or there is no goal
};

// Measures all lines, interleaved with probes. Throws std::runtime_error if a
// result is wrong. `progress` is called before each line.
std::vector<GateResult> MeasureGates(void (*progress)(const std::string&));

// Aligned table with CPU and goals.
std::string GateTable(const std::vector<GateResult>& results);

// A JSON document: cpu, kind, lines.
std::string GateJson(const std::vector<GateResult>& results);

}  // namespace heed::bench

#endif  // BENCHMARKS_GATES_H_

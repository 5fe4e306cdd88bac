// Gates: the ratios that a release must reach, each measured within one run.
#ifndef BENCHMARKS_GATES_H_
#define BENCHMARKS_GATES_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/rows.h"
#include "heed/core/dtype.h"

namespace heed::bench {

// The kinds of CPU that have goals of their own for fractions of peak. kAvx2: the best target is AVX2, by the CPU or by
// HEED_ISA.
enum class CpuKind { kZen4, kIntelAmx, kAvx2, kOther };
CpuKind ThisCpu();

// One side of a ratio: the subject, or what it is compared with.
struct Side {
  int64_t T, Hq, Hkv, D;
  std::string variant;
  int threads = 1;
  DType dtype = DType::kF32;
  const char* pass = "forward";
  const char* mechanism = "attention";
  int64_t B = 1;
};

// The measured ratio.
enum class Ratio {
  kOfPeak,        // the subject's fraction of the FMA peak
  kOfAmx,         // its fraction of the rate of AMX tiles
  kOfExp2,        // its fraction of the rate of exponentials: its state updates, each of which takes one
  kTime,          // its time divided by the other's
  kSpeedUp,       // the other's time divided by its time
  kOfTwoCalls,    // half the time of two of the other at once, one thread each, divided by its time of two threads
  kTimePerToken,  // kTime with each time divided by the tokens
  kTimePerFlop,   // kTime with each time divided by the operations on kept pairs
  kOfMemory,      // seconds to read and write as many bytes as its state has, divided by its time
};

inline constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// The goals of a line, by kind of CPU.
struct Goals {
  double zen4 = kNone, intel = kNone, avx2 = kNone, any = kNone;
  double OnThisCpu() const;
};
inline Goals Everywhere(double goal) { return {goal, goal, goal, goal}; }

struct Line {
  std::string name;
  Ratio ratio;
  Side subject;
  std::optional<Side> other;
  Goals goals;
};

Line OfPeak(const std::string& name, const Side& subject, const Goals& goals);
Line Against(const std::string& name, Ratio ratio, const Side& subject, const Side& other, double goal);

// Two threads are so many times as fast as one, and take half of the time of two independent calls at once, which is
// the bound where the cores share memory bandwidth, caches or a clock.
void AddSpeedUp(const std::string& name, const Side& one, const Goals& speed_up, std::vector<Line>& lines);

// Two threads reach 0.9 of twice the goal of one, and so much more speed.
void AddTwoThreads(const std::string& name, Side one, const Goals& goals, const Goals& speed_up,
                   std::vector<Line>& lines);

std::vector<Line> AttentionLines();
std::vector<Line> RecurrenceLines();
std::vector<Line> ScanLines();
std::vector<Line> PatternLines();

struct GateResult {
  std::string name;
  double goal;    // NaN: none for this kind of CPU
  bool at_least;  // false: the ratio must not exceed the goal
  double q1, median, q3;
  int rounds, rejected;  // samples that counted, and samples that were retried
  bool ok;               // also true if there is no goal
};

// Measures the lines that `rows` selects, interleaved with probes. Throws std::runtime_error if a result is wrong.
std::vector<GateResult> MeasureGates(const std::vector<Line>& lines, const Rows& rows);

// Calls `measure` for a row that is not among the lines, if `rows` selects it.
void AddRow(const Rows& rows, const std::string& name, const std::function<GateResult()>& measure,
            std::vector<GateResult>& results);

// Measures a ratio that is not among the lines, 15 times; samples that set *clean to false do not count.
GateResult MeasureRatio(const std::string& name, double goal, bool at_least,
                        const std::function<double(bool* clean)>& ratio);

// Returns the lines above the first row: the CPU, the peak and the names of the columns.
std::string GateHeader();

// One row, aligned with the header's columns.
std::string GateRow(const GateResult& result);

// A JSON document: cpu, kind, lines.
std::string GateJson(const std::vector<GateResult>& results);

}  // namespace heed::bench

#endif  // BENCHMARKS_GATES_H_

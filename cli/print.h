// Printing: aligned tables, numbers with units, one write to stdout.
#ifndef CLI_PRINT_H_
#define CLI_PRINT_H_

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "heed/pages/json.h"

namespace heed::cli {

// Columns as wide as their widest cell, two spaces apart. A column whose name
// begins with '<' is aligned left, any other right.
class Table {
 public:
  explicit Table(std::vector<std::string> columns);
  void Add(std::vector<std::string> cells);  // as many as there are columns
  std::string ToString() const;

 private:
  std::vector<std::vector<std::string>> rows_;  // the first is the header
  std::vector<bool> left_;
};

// A table that is printed line by line, as rows come: `widest` is a row whose cells
// are as wide as any that will come. A wider one moves what stands right of it.
class StreamedTable {
 public:
  StreamedTable(std::vector<std::string> columns, const std::vector<std::string>& widest);
  void Add(std::vector<std::string> cells) const;

 private:
  std::vector<size_t> widths_;
  std::vector<bool> left_;
};

std::string Seconds(double seconds);                         // "1.23 ms"
std::string Bytes(double num_bytes);                         // "12.5 MiB"
std::string Rate(double per_second, std::string_view unit);  // "117 GFLOP/s"
std::string Percent(double fraction);                        // "87.3 %"
std::string ErrorSize(double error);                         // "1.2e-07"

// All of `text` to stdout. Throws FileError if it cannot be written.
void Print(std::string_view text);

// One document. Bytes that are not UTF-8, which file names may have, become
// U+FFFD; infinities and NaN become null.
void PrintJson(const Json& json);

// One line to stderr, "heed: " first; control characters become '?'.
void PrintError(std::string_view text);

// What is going on, on stderr if that is a terminal, erased by the next one.
// An empty text erases it.
void Progress(std::string_view text);

// Progress through steps that take about equally long: how many are done, and
// the time that the others will take.
class Countdown {
 public:
  explicit Countdown(size_t steps);
  ~Countdown();  // erases the line
  Countdown(const Countdown&) = delete;
  Countdown& operator=(const Countdown&) = delete;

  void Next(std::string_view text);  // a step begins

 private:
  size_t steps_, begun_ = 0;
  std::chrono::steady_clock::time_point start_, shown_;
};

// "38 s", "4 min": of one second at least.
std::string RoughTime(double seconds);

// Opens /dev/null in place of a closed stdin, stdout or stderr, so that no file
// that heed opens is taken for one of them.
void HoldStandardStreams();

}  // namespace heed::cli

#endif  // CLI_PRINT_H_

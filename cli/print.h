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

// Columns as wide as their widest cell, two spaces apart. A column whose name begins with '<' is aligned left, any
// other right.
class Table {
 public:
  explicit Table(std::vector<std::string> columns);
  void Add(std::vector<std::string> cells);  // one per column
  std::string ToString() const;

 private:
  std::vector<std::vector<std::string>> rows_;  // the first is the header
  std::vector<bool> left_;
};

// A table that is printed line by line, as rows arrive. The cells of `widest` are as wide as those of any row to come.
// A wider cell shifts the cells to its right.
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

// Writes all of `text` to stdout. Throws FileError if that fails.
void Print(std::string_view text);

// Prints one document. Bytes that are not UTF-8, which file names may have, become U+FFFD; infinities and NaN become
// null.
void PrintJson(const Json& json);

// Prints one line to stderr, after "heed: "; control characters become '?'.
void PrintError(std::string_view text);

// Shows the current activity on stderr if that is a terminal. The next call erases it; an empty text only erases it.
void Progress(std::string_view text);

// Progress through steps of about equal duration: the number of finished steps, and the time of the remaining ones.
class Countdown {
 public:
  explicit Countdown(size_t steps);
  ~Countdown();  // erases the line
  Countdown(const Countdown&) = delete;
  Countdown& operator=(const Countdown&) = delete;

  void Next(std::string_view text);  // called when a step begins

 private:
  size_t steps_, begun_ = 0;
  std::chrono::steady_clock::time_point start_, shown_;
};

// A duration "38 s", "4 min", of at least one second.
std::string RoughTime(double seconds);

}  // namespace heed::cli

#endif  // CLI_PRINT_H_

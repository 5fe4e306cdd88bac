// The rows of a table: which of them are measured, and their text as soon as they are.
#ifndef BENCHMARKS_ROWS_H_
#define BENCHMARKS_ROWS_H_

#include <regex>
#include <string>

namespace heed::bench {

class Rows {
 public:
  // Selects the rows whose names contain a match of `filter`; an empty one selects all. `print` is false where the
  // results are printed as one document at the end.
  Rows(const std::string& filter, bool print);

  // Returns whether the row is to be measured. If so, a terminal shows its name meanwhile.
  bool Begin(const std::string& name) const;

  // Writes a row, or the lines above the first one, to stdout at once.
  void Print(const std::string& text) const;

 private:
  std::regex filter_;
  bool print_;
};

}  // namespace heed::bench

#endif  // BENCHMARKS_ROWS_H_

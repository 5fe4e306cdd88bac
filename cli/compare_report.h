// What `heed compare` found, as text, as JSON and as a page.
#ifndef CLI_COMPARE_REPORT_H_
#define CLI_COMPARE_REPORT_H_

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cli/attention_call.h"
#include "cli/print.h"
#include "heed/core/dtype.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::cli {

// One mechanism with one choice of options in one dtype.
struct CompareRow {
  std::string mechanism;
  attention::Options options;        // of the others, whether they are causal
  std::string selector;              // what chose the pattern, if anything did
  std::vector<std::string> assumed;  // inputs that the file does not have
  DType dtype;
  double seconds;
  int64_t workspace_bytes, state_bytes;
  OutputError error;
  double visited_pairs = std::nan(""), all_pairs = std::nan("");  // of attention
};

struct CompareReport {
  std::string file, layer;
  int64_t tokens = 0;              // keys of a sequence
  std::string problem;             // dtype, shapes, threads
  std::vector<std::string> notes;  // facts of the file
  std::string reference;           // what errors are against
  std::vector<DType> dtypes;
  std::vector<CompareRow> rows;                              // dtypes of the same mechanism and options together
  std::vector<std::pair<std::string, std::string>> skipped;  // mechanism, reason
};

// Times, then errors, a line per mechanism and a column per dtype; then what was
// assumed and what was left out.
std::string ToText(const CompareReport& report);

Json ToJson(const CompareReport& report);

// Writes a page with the rows of ToText() as one table, and a picture of it. Throws FileError.
void WritePage(const std::string& path, const CompareReport& report);

}  // namespace heed::cli

#endif  // CLI_COMPARE_REPORT_H_

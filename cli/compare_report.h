// The results of `heed compare` as text, as JSON and as a page.
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
  attention::Options options;        // for other mechanisms, only whether they are causal
  std::string selector;              // the selector of the pattern, if there is one
  std::vector<std::string> assumed;  // inputs that the file lacks
  DType dtype;
  double seconds;
  int64_t workspace_bytes, state_bytes;
  OutputError error;
  double visited_pairs = std::nan(""), all_pairs = std::nan("");  // of attention
};

struct CompareReport {
  std::string file, layer;
  int64_t tokens = 0;              // number of keys of a sequence
  std::string problem;             // dtype, shapes, threads
  std::vector<std::string> notes;  // facts of the file
  std::string reference;           // the reference of errors
  std::vector<DType> dtypes;
  std::vector<CompareRow> rows;                              // dtypes of the same mechanism and options are adjacent
  std::vector<std::pair<std::string, std::string>> skipped;  // mechanism, reason
};

// Times, then errors, a line per mechanism and a column per dtype; then assumptions and skipped mechanisms.
std::string ToText(const CompareReport& report);

Json ToJson(const CompareReport& report);

// Writes a page with the rows of ToText() as one table, and a chart of them. Throws FileError.
void WritePage(const std::string& path, const CompareReport& report);

}  // namespace heed::cli

#endif  // CLI_COMPARE_REPORT_H_

// The findings of `heed compare`, as text, as JSON and as a page.
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

// The relation of a row's function to the reference, which determines the meaning of its error. Exact attention differs
// by rounding, and an approximation by the pairs that it leaves out. Another function differs in everything, so its
// error does not predict the quality of a model that is trained with it.
enum class Kind { kExact, kApproximate, kOther };

const char* Name(Kind kind);  // "exact", "approximate", "other"

// One mechanism with one choice of options in one dtype.
struct CompareRow {
  Kind kind;
  std::string mechanism;
  attention::Options options;        // for other mechanisms, only whether they are causal
  std::string selector;              // the selector of the pattern, if there is one
  std::vector<std::string> assumed;  // inputs that the file lacks
  DType dtype;
  double seconds, flops;
  double roof;  // multiply-adds of all cores in use, flops per second
  int64_t workspace_bytes, state_bytes;
  OutputError error;
  double visited_pairs = std::nan(""), all_pairs = std::nan("");  // of attention
};

struct CompareReport {
  bool full = false;  // ToText() has every table, what was assumed, and each mechanism that was left out
  std::string file, layer;
  int64_t tokens = 0;              // keys of a sequence
  std::string machine;             // CPU, SIMD target, threads
  std::string problem;             // dtype and shapes
  std::vector<std::string> notes;  // facts of the file
  std::string reference;           // the reference of errors
  std::vector<DType> dtypes;
  std::vector<CompareRow> rows;                              // dtypes of the same mechanism and options are adjacent
  std::vector<std::pair<std::string, std::string>> skipped;  // mechanism, reason
};

// A section for each kind, with a line per mechanism and choice of options. Unless the report is full, other functions
// have no errors, and one line counts the mechanisms that were left out.
std::string ToText(const CompareReport& report);

Json ToJson(const CompareReport& report);

// Writes a page with all rows as one table, and a picture of it. Throws FileError.
void WritePage(const std::string& path, const CompareReport& report);

}  // namespace heed::cli

#endif  // CLI_COMPARE_REPORT_H_

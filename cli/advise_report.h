// The results of `heed advise` as text, as JSON and as a page.
#ifndef CLI_ADVISE_REPORT_H_
#define CLI_ADVISE_REPORT_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "cli/print.h"
#include "heed/advise/advise.h"
#include "heed/advise/calibrate.h"
#include "heed/advise/cost_model.h"
#include "heed/advise/divided.h"

namespace heed::cli {

struct AdviseReport {
  std::string file, layer;  // empty if only shapes are given
  advise::Purpose purpose;
  advise::Budget budget;
  std::optional<advise::Cluster> cluster;  // rows are predicted for its processes too
  int threads = 1;
  std::string cpu, target;
  std::string model_path;             // empty: no cost model
  advise::PredictionErrors of_model;  // errors of that model
  std::vector<std::string> notes;     // facts of the file
  advise::Advice advice;
};

// The table has at most `most_rows` rows; 0: all.
std::string ToText(const AdviseReport& report, size_t most_rows);
Json ToJson(const AdviseReport& report);

// Writes a page with the frontier of error against time, and all rows as a table. Throws FileError.
void WritePage(const std::string& path, const AdviseReport& report);

// The results of a calibration, and the path of its file.
std::string ToText(const advise::Calibration& calibration, const std::string& path);
Json ToJson(const advise::Calibration& calibration, const std::string& path);

}  // namespace heed::cli

#endif  // CLI_ADVISE_REPORT_H_

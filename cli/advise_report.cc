// Rows of `heed advise`: the best first, each with the reason for its rank.
#include "cli/advise_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <span>

#include "cli/format.h"
#include "heed/harness/assumed_tensors.h"
#include "heed/pages/page.h"

namespace heed::cli {
namespace {

using advise::Row;

constexpr char kOtherFunction[] =
    "another function than softmax attention: in a model that was trained with it nothing is lost; its error is that "
    "of putting it in "
    "place of softmax attention as it is";

std::string Number(double value) { return std::isfinite(value) ? ErrorSize(value) : "-"; }

// "layers.0 of file.safetensors, B1_T371_H12_D32, prefill of 371 tokens, 2 threads".
std::string ProblemOf(const AdviseReport& report) {
  const advise::Advice& advice = report.advice;
  const char* const what = report.purpose == advise::Purpose::kDecode ? "of one token behind" : "of";
  return Format("{}  {} {} {} tokens  {} thread{}", ToString(advice.sizes), advise::Name(report.purpose), what,
                advice.length, report.threads, report.threads == 1 ? "" : "s");
}

std::string SourceOf(const AdviseReport& report) {
  if (report.file.empty()) return "shapes alone";
  return report.layer.empty() ? report.file : report.file + " " + report.layer;
}

std::string ErrorsText(const advise::PredictionErrors& errors) {
  if (errors.count == 0) return "no call was held out";
  return Format(
      "of {} calls that were not fitted, predictions are off by {} in the median and by at most {} for nine of ten; {} "
      "are within {}",
      errors.count, Percent(errors.median), Percent(errors.nine_of_ten), Percent(errors.share_within_goal),
      Percent(advise::PredictionErrors::kGoal));
}

// Remarks that are necessary to read the numbers.
std::vector<std::string> Remarks(const AdviseReport& report) {
  const advise::Advice& advice = report.advice;
  std::vector<std::string> lines;
  if (advice.sample_tokens == 0) {
    lines.push_back("nothing was run: times are predictions, and errors need tensors");
  } else {
    lines.push_back(Format("measured on {} tokens, errors against exact attention in float64; ranked by {} times",
                           advice.sample_tokens, advice.sample_tokens == advice.length ? "measured" : "predicted"));
  }
  lines.push_back(
      report.model_path.empty()
          ? "no predictions: heed advise --calibrate measures this machine for them, in less than two minutes"
          : "predictions from " + report.model_path + ": " + ErrorsText(report.of_model));
  if (report.cluster && report.cluster->ranks > 1) {
    lines.emplace_back(
        "divided: by the method that heed.torch chooses, each number that of the process with the largest; the order "
        "of "
        "rows, their reasons and the budget are those of one process");
  }
  if (std::ranges::any_of(advice.rows, [](const Row& row) { return !row.is_softmax; }))
    lines.emplace_back(kOtherFunction);
  std::map<std::string, std::string> assumed;  // names by assumption
  for (const Row& row : advice.rows) {
    for (const std::string& name : row.assumed) {
      std::string& names = assumed[WhatIsAssumed(name)];
      if ((", " + names + ",").find(", " + name + ",") == std::string::npos)
        names += (names.empty() ? "" : ", ") + name;
    }
  }
  for (const auto& [what, names] : assumed) lines.push_back("assumed, because not given: " + names + ": " + what);
  std::map<std::string, std::string> left_out;  // mechanisms by reason
  for (const auto& [mechanism, reason] : advice.left_out) {
    left_out[reason] += (left_out[reason].empty() ? "" : ", ") + mechanism;
  }
  for (const auto& [reason, mechanisms] : left_out) lines.push_back("left out: " + mechanisms + ": " + reason);
  return lines;
}

std::string OptionsOf(const Row& row) { return row.options + (row.assumed.empty() ? "" : ", assumed"); }

Json OrNull(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json TrafficToJson(const advise::Traffic& traffic) {
  return {{"bytes", traffic.bytes}, {"messages", traffic.messages}};
}

// The predictions for the processes of a cluster; the method that heed.torch chooses is the first.
Json DividedToJson(const Row& row) {
  Json methods = Json::array();
  for (const advise::Divided& divided : row.divided) {
    methods.push_back({{"method", divided.method},
                       {"forward", TrafficToJson(divided.forward)},
                       {"backward", TrafficToJson(divided.backward)},
                       {"communication_seconds", divided.communication_seconds},
                       {"computation_seconds", divided.computation_seconds},
                       {"seconds", divided.seconds()},
                       {"memory_bytes", divided.memory_bytes}});
  }
  return {{"methods", methods}, {"refused", row.not_divided.empty() ? Json(nullptr) : Json(row.not_divided)}};
}

// The fastest of the methods that heed.torch does not choose by itself; null if it is no faster than the one that it
// does, within the accuracy of predictions.
const advise::Divided* FasterMethod(const Row& row) {
  constexpr double kSame = 1.05;
  const auto fastest = std::ranges::min_element(row.divided, {}, &advise::Divided::seconds);
  return fastest == row.divided.begin() || kSame * fastest->seconds() > row.divided[0].seconds() ? nullptr : &*fastest;
}

// The table of predictions for the processes of a cluster, with the rows that the first table has.
std::string DividedText(const AdviseReport& report, std::span<const Row> rows) {
  const advise::Cluster& cluster = *report.cluster;
  const bool trains = report.purpose == advise::Purpose::kTraining;
  std::string text =
      Format("the tokens divided among {} process{}, each receives {}, a message takes {} more\n\n", cluster.ranks,
             cluster.ranks == 1 ? "" : "es", Rate(cluster.bandwidth, "B/s"), Seconds(cluster.latency));
  std::vector<std::string> columns = {"rank", "<mechanism", "<options", "<dtype", "<method", "received"};
  if (trains) columns.emplace_back("backward");
  for (const char* column : {"messages", "communication", "computation", "together", "one process", "memory"}) {
    columns.emplace_back(column);
  }
  Table table(columns);
  std::map<std::string, std::string> refused;  // candidates by reason
  for (const Row& row : rows) {
    if (row.divided.empty()) {
      std::string& names = refused[row.not_divided];
      const std::string name = row.mechanism + " " + row.options;
      if (("; " + names + "; ").find("; " + name + "; ") == std::string::npos)
        names += (names.empty() ? "" : "; ") + name;
      continue;
    }
    const auto add = [&](const advise::Divided& divided, const std::string& method) {
      std::vector<std::string> cells = {std::to_string(row.rank), row.mechanism, row.options,
                                        Name(row.dtype),          method,        Bytes(divided.forward.bytes)};
      if (trains) cells.push_back(Bytes(divided.backward.bytes));
      cells.insert(cells.end(), {Format("{:.0f}", divided.forward.messages + divided.backward.messages),
                                 Seconds(divided.communication_seconds), Seconds(divided.computation_seconds),
                                 Seconds(divided.seconds()), Seconds(row.seconds), Bytes(divided.memory_bytes)});
      table.Add(cells);
    };
    add(row.divided[0], row.divided[0].method);
    if (const advise::Divided* faster = FasterMethod(row)) add(*faster, "faster: " + faster->method);
  }
  if (std::ranges::any_of(rows, [](const Row& row) { return !row.divided.empty(); })) text += table.ToString() + "\n";
  for (const auto& [reason, names] : refused) text += "not divided, as " + reason + ": " + names + "\n";
  return text;
}

Json RowToJson(const Row& row) {
  return {{"rank", row.rank},
          {"mechanism", row.mechanism},
          {"options", row.options},
          {"python", row.python},
          {"dtype", Name(row.dtype)},
          {"threads", row.threads},
          {"seconds", OrNull(row.seconds)},
          {"predicted_seconds", OrNull(row.predicted_seconds)},
          {"measured_seconds", OrNull(row.measured_seconds)},
          {"predicted_sample_seconds", OrNull(row.predicted_sample_seconds)},
          {"memory_bytes", row.memory_bytes()},
          {"workspace_bytes", row.memory.workspace},
          {"state_bytes", row.memory.state},
          {"relative_error", OrNull(row.error.relative)},
          {"max_error", OrNull(row.error.max)},
          {"kept", row.kept},
          {"softmax", row.is_softmax},
          {"causal", row.is_causal},
          {"assumed", row.assumed},
          {"within", row.within},
          {"frontier", row.frontier},
          {"reason", row.reason}};
}

Json ErrorsToJson(const advise::PredictionErrors& errors) {
  return {{"calls", errors.count},
          {"median", OrNull(errors.median)},
          {"nine_of_ten", OrNull(errors.nine_of_ten)},
          {"share_within_goal", OrNull(errors.share_within_goal)},
          {"goal", advise::PredictionErrors::kGoal}};
}

std::string HtmlCell(const char* tag, const std::string& attributes, const std::string& text) {
  return Format("<{0}{1}>{2}</{0}>", tag, attributes, pages::EscapeHtml(text));
}

std::string HtmlTable(const AdviseReport& report) {
  static constexpr const char* kColumns[] = {"rank",   "mechanism", "options",  "dtype",     "threads",
                                             "time",   "predicted", "measured", "rms error", "max error",
                                             "memory", "state",     "why"};
  static constexpr const char* kLeft[] = {"mechanism", "options", "dtype", "why"};
  const auto attributes = [](const std::string& column, double value = std::nan("")) {
    std::string text = std::ranges::count(kLeft, column) > 0 ? " class=\"left\"" : "";
    if (text.empty()) text = Format(" data-value=\"{}\"", value);
    return text;
  };
  std::string html = "<table id=\"table\">\n<thead><tr>";
  for (const char* column : kColumns) {
    html += HtmlCell("th", std::ranges::count(kLeft, std::string(column)) > 0 ? " class=\"left\"" : "", column);
  }
  html += "</tr></thead>\n<tbody>";
  for (const Row& row : report.advice.rows) {
    html += row.within ? "\n<tr>" : "\n<tr class=\"outside\">";
    const auto add = [&](const char* column, const std::string& text, double value = std::nan("")) {
      html += HtmlCell("td", attributes(column, value), text);
    };
    add("rank", std::to_string(row.rank), static_cast<double>(row.rank));
    add("mechanism", row.mechanism);
    add("options", OptionsOf(row));
    add("dtype", Name(row.dtype));
    add("threads", std::to_string(row.threads), row.threads);
    add("time", Seconds(row.seconds), row.seconds);
    add("predicted", Seconds(row.predicted_seconds), row.predicted_seconds);
    add("measured", Seconds(row.measured_seconds), row.measured_seconds);
    add("rms error", Number(row.error.relative), row.error.relative);
    add("max error", Number(row.error.max), row.error.max);
    add("memory", Bytes(row.memory_bytes()), row.memory_bytes());
    add("state", Bytes(row.memory.state), row.memory.state);
    html += "<td class=\"left why\">" + pages::EscapeHtml(row.reason) + "<code>" + pages::EscapeHtml(row.python) +
            "</code></td></tr>";
  }
  return html + "\n</tbody></table>";
}

}  // namespace

std::string ToText(const AdviseReport& report, size_t most_rows) {
  const advise::Advice& advice = report.advice;
  std::string text = SourceOf(report) + "\n" + ProblemOf(report) + "\n";
  for (const std::string& note : report.notes) text += note + "\n";
  const bool predicts = !report.model_path.empty(), measures = advice.sample_tokens > 0;
  std::vector<std::string> columns = {"rank", "<mechanism", "<options", "<dtype"};
  if (predicts) columns.emplace_back("predicted");
  if (measures) columns.emplace_back("measured");
  for (const char* column : {"rms error", "memory", "state", "<why"}) columns.emplace_back(column);
  Table table(columns);
  const size_t shown = most_rows == 0 ? advice.rows.size() : std::min(most_rows, advice.rows.size());
  for (const Row& row : std::span(advice.rows).first(shown)) {
    std::vector<std::string> cells = {std::to_string(row.rank), row.mechanism, OptionsOf(row), Name(row.dtype)};
    if (predicts) cells.push_back(Seconds(row.predicted_seconds));
    if (measures) cells.push_back(Seconds(row.measured_seconds));
    cells.insert(cells.end(),
                 {Number(row.error.relative), Bytes(row.memory_bytes()), Bytes(row.memory.state), row.reason});
    table.Add(cells);
  }
  text += Format("\n{}\n", table.ToString());
  if (shown < advice.rows.size()) text += Format("{} more with --rows 0\n", advice.rows.size() - shown);
  if (report.cluster) text += DividedText(report, std::span(advice.rows).first(shown));
  text += "rank 1 in Python: " + advice.rows[0].python + "\n";
  for (const std::string& remark : Remarks(report)) text += remark + "\n";
  return text;
}

Json ToJson(const AdviseReport& report) {
  const advise::Advice& advice = report.advice;
  Json rows = Json::array(), left_out = Json::array();
  for (const Row& row : advice.rows) {
    rows.push_back(RowToJson(row));
    if (report.cluster) rows.back()["divided"] = DividedToJson(row);
  }
  for (const auto& [mechanism, reason] : advice.left_out)
    left_out.push_back({{"mechanism", mechanism}, {"reason", reason}});
  const auto or_null = [](const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); };
  Json json = {
      {"file", report.file},
      {"layer", report.layer},
      {"for", advise::Name(report.purpose)},
      {"shape", ToString(advice.sizes)},
      {"length", advice.length},
      {"sample_tokens", advice.sample_tokens},
      {"threads", report.threads},
      {"cpu", report.cpu},
      {"target", report.target},
      {"budget",
       {{"memory_bytes", or_null(report.budget.memory_bytes)}, {"error", or_null(report.budget.relative_error)}}},
      {"model", report.model_path.empty() ? Json(nullptr) : Json(report.model_path)},
      {"prediction_errors", report.model_path.empty() ? Json(nullptr) : ErrorsToJson(report.of_model)},
      {"rows", rows},
      {"left_out", left_out},
      {"remarks", Remarks(report)}};
  if (report.cluster) {
    json["cluster"] = {{"ranks", report.cluster->ranks},
                       {"bandwidth", report.cluster->bandwidth},
                       {"latency", report.cluster->latency}};
  }
  return json;
}

void WritePage(const std::string& path, const AdviseReport& report) {
  pages::Page page;
  page.name = "advise.html";
  page.styles = {"base.css", "compare.css", "advise.css"};
  page.scripts = {"base.js", "scatter.js", "sort.js", "advise.js"};
  page.title = report.file.empty() ? ProblemOf(report) : report.file;
  page.data = ToJson(report);
  page.body =
      HtmlCell("p", " class=\"sub\"", SourceOf(report)) + HtmlCell("p", " class=\"sub\"", ProblemOf(report)) + "\n";
  page.body += "<section class=\"picture\" id=\"picture\" hidden></section>\n<section class=\"table\">" +
               HtmlTable(report) + "</section>\n<ul class=\"note\">";
  for (const std::string& note : report.notes) page.body += HtmlCell("li", "", note);
  for (const std::string& remark : Remarks(report)) page.body += HtmlCell("li", "", remark);
  page.body += "</ul>\n";
  pages::WriteText(path, pages::ComposePage(page));
}

std::string ToText(const advise::Calibration& calibration, const std::string& path) {
  const advise::CostModel& model = calibration.model;
  std::string text =
      Format("{}, {}, {} thread{}\n{} calls in {}, {} kinds of work fitted\n", model.cpu, model.target, model.threads,
             model.threads == 1 ? "" : "s", calibration.calls, Seconds(model.seconds), model.fits.size());
  return text + ErrorsText(advise::Summarized(model.errors)) + "\nwritten to " + path + "\n";
}

Json ToJson(const advise::Calibration& calibration, const std::string& path) {
  const advise::CostModel& model = calibration.model;
  Json held_out = Json::array();
  for (const advise::HeldOut& call : calibration.held_out) {
    held_out.push_back(
        {{"what", call.what}, {"predicted_seconds", call.predicted}, {"measured_seconds", call.measured}});
  }
  return {{"model", path},
          {"cpu", model.cpu},
          {"target", model.target},
          {"threads", model.threads},
          {"seconds", model.seconds},
          {"calls", calibration.calls},
          {"fits", model.fits.size()},
          {"prediction_errors", ErrorsToJson(advise::Summarized(model.errors))},
          {"held_out", held_out}};
}

}  // namespace heed::cli

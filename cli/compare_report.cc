// Rows of `heed compare` as a table. Dtypes are columns, because readers first choose a mechanism and then a dtype.
#include "cli/compare_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <span>

#include "cli/format.h"
#include "heed/harness/assumed_tensors.h"
#include "heed/pages/page.h"

namespace heed::cli {
namespace {

// Rows that differ in their dtype alone.
using Group = std::span<const CompareRow>;

// A chosen pattern has no readable expression: the name of its selector replaces it.
attention::Options Typed(const CompareRow& row) {
  attention::Options options = row.options;
  if (!row.selector.empty()) options.pattern = {};
  return options;
}

std::string OptionsOf(const CompareRow& row) {
  std::string text = ToString(Typed(row));
  if (!row.selector.empty()) text = (text == "full" ? "" : text + " ") + row.selector;
  return text + (row.assumed.empty() ? "" : ", assumed");
}

std::vector<Group> GroupsOf(const CompareReport& report) {
  std::vector<Group> groups;
  const std::vector<CompareRow>& rows = report.rows;
  for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    const auto same = [&](const CompareRow& row) {
      return row.mechanism == rows[begin].mechanism && OptionsOf(row) == OptionsOf(rows[begin]);
    };
    while (end < rows.size() && same(rows[end])) ++end;
    groups.push_back(Group(rows).subspan(begin, end - begin));
  }
  return groups;
}

// Null if the mechanism has no kernel in this dtype.
const CompareRow* Find(Group group, DType dtype) {
  const auto found =
      std::find_if(group.begin(), group.end(), [&](const CompareRow& row) { return row.dtype == dtype; });
  return found == group.end() ? nullptr : &*found;
}

// The dtype for which memory is reported: f32 if there are rows in it, else the first.
DType UsualDType(const CompareReport& report) {
  const std::vector<DType>& all = report.dtypes;
  return std::find(all.begin(), all.end(), DType::kF32) == all.end() ? all[0] : DType::kF32;
}

// A cell of a table, and its key for sorting.
struct Cell {
  std::string text;
  double value;
};
using Measure = Cell (*)(const CompareRow&);

Cell Time(const CompareRow& row) { return {Seconds(row.seconds), row.seconds}; }
Cell Workspace(const CompareRow& row) {
  const auto bytes = static_cast<double>(row.workspace_bytes);
  return {Bytes(bytes), bytes};
}
Cell State(const CompareRow& row) {
  const auto bytes = static_cast<double>(row.state_bytes);
  return {Bytes(bytes), bytes};
}
Cell Visited(const CompareRow& row) {
  const double share = row.visited_pairs / row.all_pairs;
  return {std::isnan(share) ? "-" : Percent(share), share};
}
Cell RmsError(const CompareRow& row) { return {ErrorSize(row.error.relative), row.error.relative}; }
Cell MaxError(const CompareRow& row) { return {ErrorSize(row.error.max), row.error.max}; }

Cell CellOf(Group group, DType dtype, Measure measure) {
  const CompareRow* row = Find(group, dtype);
  return row == nullptr ? Cell{"-", std::nan("")} : measure(*row);
}

// Columns: one measure in every dtype, then other measures in the usual dtype.
std::string TableOf(const CompareReport& report, Measure in_each,
                    const std::vector<std::pair<std::string, Measure>>& in_one) {
  std::vector<std::string> columns = {"<mechanism", "<options"};
  for (const DType dtype : report.dtypes) columns.push_back(Name(dtype));
  for (const auto& [name, measure] : in_one) columns.push_back(name);
  Table table(columns);
  for (const Group& group : GroupsOf(report)) {
    std::vector<std::string> cells = {group[0].mechanism, OptionsOf(group[0])};
    for (const DType dtype : report.dtypes) {
      cells.push_back(CellOf(group, dtype, in_each).text);
    }
    for (const auto& [name, measure] : in_one) {
      cells.push_back(CellOf(group, UsualDType(report), measure).text);
    }
    table.Add(cells);
  }
  return table.ToString();
}

// Assumptions about inputs, by their names.
std::map<std::string, std::string> Assumed(const CompareReport& report) {
  std::map<std::string, std::string> assumed;
  for (const CompareRow& row : report.rows) {
    for (const std::string& name : row.assumed) assumed[name] = WhatIsAssumed(name);
  }
  return assumed;
}

// "file.safetensors layers.0".
std::string Where(const CompareReport& report) {
  return report.layer.empty() ? report.file : report.file + " " + report.layer;
}

// Remarks that are necessary to read the numbers.
std::vector<std::string> Remarks(const CompareReport& report) {
  std::map<std::string, std::string> names;  // by the assumption about them
  for (const auto& [name, what] : Assumed(report)) {
    names[what] += (names[what].empty() ? "" : ", ") + name;
  }
  std::vector<std::string> lines;
  for (const auto& [what, list] : names) {
    lines.push_back("assumed, as the file has none: " + list + ": " + what);
  }
  std::map<std::string, std::string> mechanisms;  // by the reason
  for (const auto& [mechanism, reason] : report.skipped) {
    mechanisms[reason] += (mechanisms[reason].empty() ? "" : ", ") + mechanism;
  }
  for (const auto& [reason, list] : mechanisms) {
    lines.push_back("left out: " + list + ": " + reason);
  }
  return lines;
}

std::string HtmlCell(const char* tag, const std::string& attributes, const std::string& text) {
  return Format("<{0}{1}>{2}</{0}>", tag, attributes, pages::EscapeHtml(text));
}

// Two rows of headers: the measure, and its dtype.
std::string HtmlTable(const CompareReport& report) {
  const size_t n = report.dtypes.size();
  const std::string usual = Name(UsualDType(report));
  const std::string each = Format(" colspan=\"{}\" class=\"group\"", n);
  std::string html = "<table id=\"table\">\n<thead><tr class=\"groups\"><td colspan=\"2\"></td>" +
                     HtmlCell("th", each, "time") + HtmlCell("th", each, "rms error") +
                     HtmlCell("th", " colspan=\"4\" class=\"group\"", "in " + usual) + "</tr>\n<tr>" +
                     HtmlCell("th", " class=\"left\"", "mechanism") + HtmlCell("th", " class=\"left\"", "options");
  for (int measure = 0; measure < 2; ++measure) {
    for (size_t i = 0; i < n; ++i) {
      html += HtmlCell("th", i == 0 ? " class=\"first\"" : "", Name(report.dtypes[i]));
    }
  }
  html += HtmlCell("th", " class=\"first\"", "max error") + HtmlCell("th", "", "visited") +
          HtmlCell("th", "", "workspace") + HtmlCell("th", "", "state") + "</tr></thead>\n<tbody>";
  for (const Group& group : GroupsOf(report)) {
    html += "\n<tr>" + HtmlCell("td", " class=\"left\"", group[0].mechanism) +
            HtmlCell("td", " class=\"left\"", OptionsOf(group[0]));
    const auto add = [&](DType dtype, Measure measure, bool first) {
      const Cell cell = CellOf(group, dtype, measure);
      html += HtmlCell("td", Format("{} data-value=\"{}\"", first ? " class=\"first\"" : "", cell.value), cell.text);
    };
    for (const Measure measure : {&Time, &RmsError}) {
      for (size_t i = 0; i < n; ++i) add(report.dtypes[i], measure, i == 0);
    }
    add(UsualDType(report), &MaxError, true);
    add(UsualDType(report), &Visited, false);
    add(UsualDType(report), &Workspace, false);
    add(UsualDType(report), &State, false);
    html += "</tr>";
  }
  return html + "\n</tbody></table>";
}

}  // namespace

std::string ToText(const CompareReport& report) {
  std::string text = Where(report) + "\n" + report.problem + "\n";
  for (const std::string& note : report.notes) text += note + "\n";
  const std::string usual = Name(UsualDType(report));
  text += "\ntime of a call; visited pairs, workspace and state in " + usual + "\n" +
          TableOf(report, &Time, {{"visited", &Visited}, {"workspace", &Workspace}, {"state", &State}});
  text += "\nrms error against " + report.reference + "; max error in " + usual + "\n" +
          TableOf(report, &RmsError, {{"max error", &MaxError}});
  const std::vector<std::string> remarks = Remarks(report);
  if (!remarks.empty()) text += "\n";
  for (const std::string& remark : remarks) text += remark + "\n";
  return text;
}

Json ToJson(const CompareReport& report) {
  Json rows = Json::array(), skipped = Json::array();
  for (const CompareRow& row : report.rows) {
    rows.push_back({{"mechanism", row.mechanism},
                    {"options", ToJson(Typed(row))},
                    {"selector", row.selector},
                    {"assumed", row.assumed},
                    {"dtype", Name(row.dtype)},
                    {"seconds", row.seconds},
                    {"visited_pairs", row.visited_pairs},
                    {"workspace_bytes", row.workspace_bytes},
                    {"state_bytes", row.state_bytes},
                    {"max_error", row.error.max},
                    {"relative_error", row.error.relative}});
  }
  for (const auto& [mechanism, reason] : report.skipped) {
    skipped.push_back({{"mechanism", mechanism}, {"reason", reason}});
  }
  return {
      {"file", report.file}, {"layer", report.layer},      {"tokens", report.tokens}, {"reference", report.reference},
      {"rows", rows},        {"assumed", Assumed(report)}, {"skipped", skipped}};
}

void WritePage(const std::string& path, const CompareReport& report) {
  pages::Page page;
  page.name = "compare.html";
  page.styles = {"base.css", "compare.css"};
  page.scripts = {"base.js", "scatter.js", "sort.js", "compare.js"};
  page.title = report.file;
  page.data = ToJson(report);
  page.body = HtmlCell("p", " class=\"sub\"", Where(report)) + HtmlCell("p", " class=\"sub\"", report.problem) + "\n";
  page.body +=
      "<section class=\"picture\" id=\"picture\" hidden></section>\n"
      "<section class=\"table\">" +
      HtmlTable(report) + "</section>\n<ul class=\"note\">";
  std::vector<std::string> notes = report.notes;
  notes.push_back("errors against " + report.reference);
  for (const std::string& remark : Remarks(report)) notes.push_back(remark);
  for (const std::string& note : notes) page.body += HtmlCell("li", "", note);
  page.body += "</ul>\n";
  pages::WriteText(path, pages::ComposePage(page));
}

}  // namespace heed::cli

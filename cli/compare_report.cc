// The rows of `heed compare` in sections, one for each kind of function, from those that only round to those that only
// training makes comparable. A line is a mechanism with one choice of options, and dtypes are columns.
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
      return row.kind == rows[begin].kind && row.mechanism == rows[begin].mechanism &&
             OptionsOf(row) == OptionsOf(rows[begin]);
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
Cell Speed(const CompareRow& row) {
  const double speed = row.flops / row.seconds;
  return {Rate(speed, "FLOP/s"), speed};
}
Cell OfRoof(const CompareRow& row) {
  const double share = row.flops / row.seconds / row.roof;
  return {Percent(share), share};
}
Cell Roof(const CompareRow& row) { return {Rate(row.roof, "FLOP/s"), row.roof}; }
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
  return {Percent(share), share};
}
Cell RmsError(const CompareRow& row) { return {ErrorSize(row.error.relative), row.error.relative}; }
Cell MaxError(const CompareRow& row) { return {ErrorSize(row.error.max), row.error.max}; }

Cell CellOf(Group group, DType dtype, Measure measure) {
  const CompareRow* row = Find(group, dtype);
  return row == nullptr ? Cell{"-", std::nan("")} : measure(*row);
}

// In which reports a table is printed: in those that are not full, in full ones, or in both.
enum class In { kBrief, kFull, kBoth };

// A table of a section: one measure in every dtype, if any, then others in the usual one.
struct TableSpec {
  In in;
  const char* caption;  // {0} is the usual dtype, {1} the reference
  Measure in_each;      // may be null
  std::vector<std::pair<std::string, Measure>> in_one;
};

// The rows of one kind. A section without rows is not printed.
struct Section {
  Kind kind;
  const char* title;
  const char* brief;  // follows the title unless the report is full
  std::vector<TableSpec> tables;
};

const std::vector<Section>& Sections() {
  static constexpr char kErrors[] = "rms error against {1}; max error in {0}";
  static constexpr char kTimes[] = "time of a call; visited pairs, workspace and state in {0}";
  static const std::vector<Section> sections = {
      {Kind::kExact,
       "Exact: errors are those of rounding",
       "",
       {{In::kBoth, kErrors, &RmsError, {{"max error", &MaxError}}},
        {In::kBoth, kTimes, &Time, {{"visited", &Visited}, {"workspace", &Workspace}, {"state", &State}}},
        {In::kBoth,
         "speed as a share of the roof, multiply-adds of all cores in use; FLOP/s in {0}",
         &OfRoof,
         {{"speed", &Speed}, {"roof", &Roof}}}}},
      {Kind::kApproximate,
       "Approximations: softmax attention over fewer pairs of a query and a key",
       "",
       {{In::kBrief,
         "in {0}",
         nullptr,
         {{"time", &Time},
          {"visited", &Visited},
          {"rms error", &RmsError},
          {"max error", &MaxError},
          {"state", &State}}},
        {In::kFull, kErrors, &RmsError, {{"max error", &MaxError}}},
        {In::kFull, kTimes, &Time, {{"visited", &Visited}, {"workspace", &Workspace}, {"state", &State}}}}},
      {Kind::kOther,
       "Other functions: only training makes their outputs comparable with those of attention",
       "; untrained, errors mean nothing",
       {{In::kBoth,
         "time of a call; workspace and state in {0}",
         &Time,
         {{"workspace", &Workspace}, {"state", &State}}},
        {In::kFull, kErrors, &RmsError, {{"max error", &MaxError}}}}}};
  return sections;
}

std::string TableOf(const CompareReport& report, Kind kind, const TableSpec& spec) {
  const std::vector<DType> dtypes = spec.in_each == nullptr ? std::vector<DType>{} : report.dtypes;
  std::vector<std::string> columns = {"<mechanism", "<options"};
  for (const DType dtype : dtypes) columns.push_back(Name(dtype));
  for (const auto& [name, measure] : spec.in_one) columns.push_back(name);
  Table table(columns);
  for (const Group& group : GroupsOf(report)) {
    if (group[0].kind != kind) continue;
    std::vector<std::string> cells = {group[0].mechanism, OptionsOf(group[0])};
    for (const DType dtype : dtypes) cells.push_back(CellOf(group, dtype, spec.in_each).text);
    for (const auto& [name, measure] : spec.in_one) {
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

// Lines that say what was assumed and what was left out, and why.
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

// One line that counts what Remarks() lists.
std::vector<std::string> BriefRemarks(const CompareReport& report) {
  const size_t n = report.skipped.size();
  if (n == 0) return {};
  return {Format("left out: {} mechanism{} that {} not take these tensors; --all prints which and why", n,
                 n == 1 ? "" : "s", n == 1 ? "does" : "do")};
}

// Empty where there is no row of the kind.
std::string SectionText(const CompareReport& report, const Section& section) {
  const auto is_of_kind = [&](const CompareRow& row) { return row.kind == section.kind; };
  if (std::none_of(report.rows.begin(), report.rows.end(), is_of_kind)) return "";
  std::string text = std::string("\n") + section.title + (report.full ? "" : section.brief) + "\n";
  const std::string usual = Name(UsualDType(report));
  for (const TableSpec& table : section.tables) {
    if (table.in == (report.full ? In::kBrief : In::kFull)) continue;
    text += "\n" + FormatArguments(table.caption, fmt::make_format_args(usual, report.reference)) + "\n" +
            TableOf(report, section.kind, table);
  }
  return text;
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
    html += Format("\n<tr class=\"{}\">", Name(group[0].kind)) + HtmlCell("td", " class=\"left\"", group[0].mechanism) +
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

const char* Name(Kind kind) {
  constexpr const char* kNames[] = {"exact", "approximate", "other"};
  return kNames[static_cast<size_t>(kind)];
}

std::string ToText(const CompareReport& report) {
  std::string text = Where(report) + "\n" + report.problem + "\n" + report.machine + "\n";
  for (const std::string& note : report.notes) text += note + "\n";
  for (const Section& section : Sections()) text += SectionText(report, section);
  const std::vector<std::string> remarks = report.full ? Remarks(report) : BriefRemarks(report);
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
                    {"relative_error", row.error.relative},
                    {"kind", Name(row.kind)},
                    {"flops_per_second", row.flops / row.seconds},
                    {"roof", row.roof}});
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
  page.body = HtmlCell("p", " class=\"sub\"", Where(report)) + HtmlCell("p", " class=\"sub\"", report.problem) +
              HtmlCell("p", " class=\"sub\"", report.machine) + "\n";
  page.body +=
      "<section class=\"picture\" id=\"picture\" hidden></section>\n"
      "<section class=\"table\">" +
      HtmlTable(report) + "</section>\n<ul class=\"note\">";
  std::vector<std::string> notes = report.notes;
  notes.push_back("errors against " + report.reference);
  notes.push_back(
      "rows in gray are other functions: only training makes their outputs comparable with those of attention");
  for (const std::string& remark : Remarks(report)) notes.push_back(remark);
  for (const std::string& note : notes) page.body += HtmlCell("li", "", note);
  page.body += "</ul>\n";
  pages::WriteText(path, pages::ComposePage(page));
}

}  // namespace heed::cli

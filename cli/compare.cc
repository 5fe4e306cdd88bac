// heed compare: what each mechanism costs on these tensors, and how far it is
// from exact attention in float64. Today the rows are exact attention itself,
// in every dtype and under windows that drop keys.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fmt/format.h"

#include "cli/attention_call.h"
#include "cli/options.h"
#include "cli/page.h"
#include "cli/print.h"
#include "cli/verbs.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "Errors are against exact attention in float64 without --window: the "
    "largest\n"
    "difference of an element of o, and the root mean square relative to "
    "o's.\n\n"
    "Example:\n  heed compare data/minilm_alice.safetensors --layer 2";

// Above this the scalar reference would take minutes.
constexpr double kMaxReferenceFlops = 4e9;

constexpr int64_t kWindows[] = {64, 128, 256};  // keys that a query sees

struct CompareOptions {
  std::string mechanisms, html;
  bool json = false;
  MachineOptions machine;
  TensorOptions tensors;
  MathOptions math;
};

struct Row {
  std::string mechanism;
  attention::Options options;
  DType dtype;
  double seconds;
  int64_t workspace_bytes, state_bytes;
  OutputError error;
};

// Exact attention as the reference sees it, and its restrictions by a window:
// the typed one, else some that are narrower than the keys.
std::vector<attention::Options> Variants(const attention::Options& full,
                                         const attention::Options& typed,
                                         bool has_window, int64_t Tk) {
  std::vector<attention::Options> variants = {full};
  if (has_window) {
    variants.push_back(typed);
    return variants;
  }
  if (full.window.left >= 0 || full.window.right >= 0) return variants;
  for (const int64_t keys : kWindows) {
    if (keys >= Tk) break;
    variants.push_back(full);
    variants.back().window = full.causal
                                 ? attention::Window{keys - 1, 0}
                                 : attention::Window{keys / 2, keys / 2};
  }
  return variants;
}

// What errors are against. A kernel as reference is itself checked on some
// rows.
struct Reference {
  std::string text;
  std::optional<OutputError> own_error;
};

// Fills `expected` and says how.
Reference ComputeReference(Context& ctx, const AttentionCall& expected,
                           int64_t num_queries) {
  Progress("reference");
  const attention::Explanation plan = expected.Explain(ctx);
  if (plan.flops <= kMaxReferenceFlops) {
    expected.Reference();
    return {"attention in float64, scalar reference", std::nullopt};
  }
  expected.Forward(ctx);
  const double affordable =
      kMaxReferenceFlops / plan.flops * static_cast<double>(num_queries) / 3;
  const int64_t rows =
      std::clamp<int64_t>(static_cast<int64_t>(affordable), 1, 32);
  const OutputError error = expected.SpotCheck(rows);
  return {fmt::format("attention in float64, kernel {} {}, within {} of the "
                      "scalar reference on {} queries",
                      plan.kernel, plan.target, ErrorSize(error.max), 3 * rows),
          error};
}

std::vector<Row> Measure(Context& ctx, const CompareOptions& options,
                         int64_t num_keys, const attention::Options& typed,
                         const attention::Options& full,
                         const AttentionCall& expected,
                         const Reference& reference) {
  std::vector<DType> dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
  if (!options.tensors.dtype.empty()) {
    dtypes = {ParseDType(options.tensors.dtype)};
  }
  std::map<DType, TensorSet> sets;
  for (const DType dtype : dtypes) {
    TensorOptions rounded = options.tensors;
    rounded.dtype = Name(dtype);
    sets.emplace(dtype, rounded.Load());
  }

  std::vector<Row> rows;
  for (const attention::Options& variant :
       Variants(full, typed, options.math.HasWindow(), num_keys)) {
    for (const DType dtype : dtypes) {
      Progress("attention " + ToString(variant) + " " + Name(dtype));
      const AttentionCall call(sets.at(dtype), variant, dtype);
      const double seconds = MedianSeconds(ctx, [&] { call.Forward(ctx); });
      rows.push_back({"attention", variant, dtype, seconds, call.Workspace(ctx),
                      0, MeasureError(call.o(), expected.o())});
      // Beside itself its error would be 0.
      if (rows.size() == 1 && dtype == DType::kF64 && reference.own_error) {
        rows[0].error = *reference.own_error;
      }
    }
  }
  return rows;
}

Json RowToJson(const Row& row) {
  return {{"mechanism", row.mechanism},
          {"options", ToJson(row.options)},
          {"dtype", Name(row.dtype)},
          {"seconds", row.seconds},
          {"workspace_bytes", row.workspace_bytes},
          {"state_bytes", row.state_bytes},
          {"max_error", row.error.max},
          {"relative_error", row.error.relative}};
}

std::vector<std::string> ToCells(const Row& row) {
  return {row.mechanism,
          ToString(row.options),
          Name(row.dtype),
          Seconds(row.seconds),
          Bytes(static_cast<double>(row.workspace_bytes)),
          Bytes(static_cast<double>(row.state_bytes)),
          ErrorSize(row.error.max),
          ErrorSize(row.error.relative)};
}

// The table stands in the page as such; what its script adds is drawn from
// `document`.
void WritePage(const std::string& path, const std::string& problem,
               const std::vector<std::string>& notes, const Json& document,
               const std::vector<std::string>& columns,
               const std::vector<Row>& rows) {
  const auto cell = [&](const char* tag, size_t column,
                        const std::string& text) {
    const bool left = columns[column].starts_with('<');
    return fmt::format("<{0}{1}>{2}</{0}>", tag,
                       left ? " class=\"left\"" : "", EscapeHtml(text));
  };
  std::string body = "<p class=\"sub\">" + EscapeHtml(problem) + "</p>\n";
  std::string remarks;
  for (const std::string& note : notes) remarks += note + "; ";
  body += "<p class=\"sub\">" + EscapeHtml(remarks) + "errors against " +
          EscapeHtml(document["reference"].get<std::string>()) +
          ".</p>\n<section class=\"table\"><table id=\"table\">\n<thead><tr>";
  for (size_t i = 0; i < columns.size(); ++i) {
    body += cell("th", i, columns[i].substr(columns[i].starts_with('<')));
  }
  body += "</tr></thead>\n<tbody>";
  for (const Row& row : rows) {
    const std::vector<std::string> cells = ToCells(row);
    body += "\n<tr>";
    for (size_t i = 0; i < cells.size(); ++i) body += cell("td", i, cells[i]);
    body += "</tr>";
  }
  body += "\n</tbody></table></section>\n";

  Page page;
  page.name = "compare.html";
  page.styles = {"base.css", "compare.css"};
  page.scripts = {"base.js", "compare.js"};
  page.title = document["file"].get<std::string>();
  page.body = body;
  page.data = document;
  WriteText(path, ComposePage(page));
}

void Compare(const CompareOptions& options) {
  if (!options.mechanisms.empty()) ChooseOps(SplitAtCommas(options.mechanisms));
  if (!options.html.empty()) {
    options.tensors.CheckNotInput("--html", options.html);
  }
  options.math.Check();
  Context ctx(options.machine.Threads());
  options.machine.Apply(ctx);
  TensorOptions widest = options.tensors;
  if (!widest.dtype.empty()) ParseDType(widest.dtype);
  widest.dtype = "f64";
  const TensorSet wide = widest.Load();
  if (!options.html.empty()) CheckWritable(options.html);
  std::vector<std::string> notes;
  const attention::Options typed = options.math.Resolve(wide, notes);
  attention::Options full = typed;
  if (options.math.HasWindow()) full.window = {};

  const AttentionCall expected(wide, full, DType::kF64);
  const Reference reference = ComputeReference(ctx, expected, wide.q.size(1));
  const std::vector<Row> rows =
      Measure(ctx, options, wide.k.size(1), typed, full, expected, reference);
  Progress("");

  const std::vector<std::string> columns = {"<mechanism", "<options",  "<dtype",
                                            "time",       "workspace", "state",
                                            "max error",  "rms error"};
  Json list = Json::array();
  for (const Row& row : rows) list.push_back(RowToJson(row));
  const Json document = {{"file", wide.file},
                         {"layer", wide.layer},
                         {"reference", reference.text},
                         {"rows", list}};
  const auto shape = [&](const ConstTensorView& x) { return x.ShapeString(); };
  const std::string problem = fmt::format(
      "{} {}  {} in the file  q {}  k {}  v {}  {} thread{}", wide.file,
      wide.layer, Name(wide.file_dtype), shape(wide.q), shape(wide.k),
      shape(wide.v), ctx.num_threads(), ctx.num_threads() == 1 ? "" : "s");
  if (!options.html.empty()) {
    WritePage(options.html, problem, notes, document, columns, rows);
  }
  if (options.json) return PrintJson(document);
  std::string text = problem + "\n";
  for (const std::string& note : notes) text += note + "\n";
  text += "errors against " + reference.text + "\n\n";
  Table table(columns);
  for (const Row& row : rows) table.Add(ToCells(row));
  Print(text + table.ToString());
}

}  // namespace

void AddCompare(CLI::App& app) {
  CLI::App* verb = app.add_subcommand(
      "compare", "every mechanism on these tensors: time, memory, error");
  verb->footer(kFooter);
  const auto options = std::make_shared<CompareOptions>();
  options->tensors.Register(*verb);
  AddText(*verb, "-m,--mechanisms", options->mechanisms,
          "only these, by name; default all", "A,B,C");
  AddText(*verb, "--html", options->html, "also writes the table as a page",
          "F");
  options->math.Register(*verb);
  options->machine.Register(*verb);
  verb->add_flag("--json", options->json, "one JSON document");
  verb->callback([options] { Compare(*options); });
}

}  // namespace heed::cli

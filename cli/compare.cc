// heed compare: what each mechanism costs on these tensors, and how far it is
// from exact attention in float64: exact attention itself, in every dtype and
// under windows that drop keys, and every other mechanism for which q, k and v
// suffice.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fmt/format.h"

#include "cli/attention_call.h"
#include "cli/mechanism_call.h"
#include "cli/options.h"
#include "cli/page.h"
#include "cli/print.h"
#include "cli/verbs.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "Errors are against exact attention in float64 without --window, causal "
    "where a\n"
    "row is: the largest difference of an element of o, and the root mean "
    "square\n"
    "relative to o's. State is what the next token needs of these: keys and "
    "values,\n"
    "or a recurrence's state. Other mechanisms run with their default "
    "options.\n\n"
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
  attention::Options options;  // of the others, whether they are causal
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

// Keys and values that the next query would see.
int64_t KeyValueBytes(const TensorSet& set, const attention::Options& options) {
  const bool drops = options.window.left >= 0;
  const int64_t all = set.k.size(1);
  const int64_t keys = drops ? std::min(all, options.window.left + 1) : all;
  return set.k.size(0) * keys * set.k.size(2) *
         (set.k.size(3) + set.v.size(3)) *
         static_cast<int64_t>(SizeOf(set.dtype));
}

// What errors are against. A kernel as reference is itself checked on some
// rows.
struct Reference {
  AttentionCall expected;
  std::string text;
  std::optional<OutputError> own_error;
};

Reference ComputeReference(Context& ctx, const TensorSet& wide,
                           const attention::Options& options) {
  Progress("reference");
  const int64_t num_queries = wide.q.size(1);
  const AttentionCall expected(wide, options, DType::kF64);
  const attention::Explanation plan = expected.Explain(ctx);
  if (plan.flops <= kMaxReferenceFlops) {
    expected.Reference();
    return {expected, "attention in float64, scalar reference", std::nullopt};
  }
  expected.Forward(ctx);
  const double affordable =
      kMaxReferenceFlops / plan.flops * static_cast<double>(num_queries) / 3;
  const int64_t rows =
      std::clamp<int64_t>(static_cast<int64_t>(affordable), 1, 32);
  const OutputError error = expected.SpotCheck(rows);
  return {expected,
          fmt::format("attention in float64, kernel {} {}, within {} of the "
                      "scalar reference on {} queries",
                      plan.kernel, plan.target, ErrorSize(error.max), 3 * rows),
          error};
}

// What the rows come from.
struct Comparison {
  const CompareOptions& options;
  const TensorSet& wide;            // in f64
  attention::Options full, typed;  // without and with --window
  std::vector<DType> dtypes;
  std::map<DType, TensorSet> sets;
  std::vector<OpEntry> others;      // that q, k and v suffice for
  std::map<bool, Reference> references;  // exact attention as `full`, causal or not

  // Computed when first asked for: it may take minutes.
  const Reference& For(Context& ctx, bool causal) {
    const auto found = references.find(causal);
    if (found != references.end()) return found->second;
    attention::Options exact = full;
    exact.causal = causal;
    return references.emplace(causal, ComputeReference(ctx, wide, exact)).first->second;
  }
};

void AddAttention(Context& ctx, Comparison& c, const attention::Options& variant,
                  std::vector<Row>& rows) {
  const Reference& reference = c.For(ctx, variant.causal);
  const bool exact = variant.window.left < 0 && variant.window.right < 0;
  for (const DType dtype : c.dtypes) {
    Progress("attention " + ToString(variant) + " " + Name(dtype));
    const TensorSet& set = c.sets.at(dtype);
    const AttentionCall call(set, variant, dtype);
    const double seconds = MedianSeconds(ctx, [&] { call.Forward(ctx); });
    rows.push_back({"attention", variant, dtype, seconds, call.Workspace(ctx),
                    KeyValueBytes(set, variant),
                    MeasureError(call.o(), reference.expected.o())});
    // Beside itself its error would be 0.
    if (exact && dtype == DType::kF64 && reference.own_error) {
      rows.back().error = *reference.own_error;
    }
  }
}

void AddMechanism(Context& ctx, Comparison& c, const OpEntry& op,
                  std::vector<Row>& rows) {
  for (const DType dtype : c.dtypes) {
    if (std::find(op.dtypes.begin(), op.dtypes.end(), dtype) ==
        op.dtypes.end()) {
      continue;
    }
    Progress(op.name + " " + Name(dtype));
    TensorOptions rounded = c.options.tensors;
    rounded.dtype = Name(dtype);
    std::vector<InputSpec> inputs = op.inputs;
    std::erase_if(inputs, [](const InputSpec& spec) { return spec.optional; });
    const NamedTensors set = rounded.Load(inputs);
    const MechanismCall call(ctx, op, set.file, set.tensors, std::nullopt);
    const bool causal = call.plan().causal;
    const double seconds = MedianSeconds(ctx, [&] { call.Forward(ctx); });
    attention::Options shown;
    shown.causal = causal;
    rows.push_back(
        {op.name, shown, dtype, seconds, call.plan().workspace_bytes,
         call.StateBytes(),
         MeasureError(call.Outputs(set.batched)[0].tensor,
                      c.For(ctx, causal).expected.o())});
  }
}

// Those of the chosen mechanisms, attention aside, for which q, k and v suffice.
// One that was named must be among them.
std::vector<OpEntry> Others(const CompareOptions& options,
                            const std::vector<OpEntry>& chosen,
                            const TensorSet& set,
                            std::vector<std::string>& notes) {
  std::vector<OpEntry> others;
  for (const OpEntry& op : chosen) {
    if (op.name == "attention") continue;
    const bool suffice =
        op.call != nullptr &&
        std::all_of(op.inputs.begin(), op.inputs.end(), [](const InputSpec& x) {
          return x.optional || x.name == "q" || x.name == "k" || x.name == "v";
        });
    if (suffice) {
      others.push_back(op);
    } else if (!options.mechanisms.empty()) {
      throw UsageError("-m has '" + op.name +
                       "', expected mechanisms that take q, k and v alone");
    }
  }
  if (others.empty() || set.q.size(1) == set.k.size(1)) return others;
  const std::string what =
      fmt::format("{} queries for {} keys", set.q.size(1), set.k.size(1));
  if (!options.mechanisms.empty()) {
    throw FileError(set.file + ": has " + what + ", expected as many for " +
                    others[0].name);
  }
  notes.push_back("recurrences left out: " + what);
  return {};
}

std::vector<Row> Measure(Context& ctx, Comparison& c, bool with_attention) {
  std::vector<Row> rows;
  if (with_attention) {
    const std::vector<attention::Options> variants =
        Variants(c.full, c.typed, c.options.math.HasWindow(),
                 c.sets.begin()->second.k.size(1));
    AddAttention(ctx, c, variants[0], rows);
    if (!c.others.empty() && !c.full.causal) {
      attention::Options causal = c.full;
      causal.causal = true;
      AddAttention(ctx, c, causal, rows);
    }
    for (size_t i = 1; i < variants.size(); ++i) {
      AddAttention(ctx, c, variants[i], rows);
    }
  }
  for (const OpEntry& op : c.others) AddMechanism(ctx, c, op, rows);
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
  const std::vector<OpEntry> chosen =
      options.mechanisms.empty() ? AllOps()
                                 : ChooseOps(SplitAtCommas(options.mechanisms));
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
  Comparison c{options, wide, {}, options.math.Resolve(wide, notes), {}, {}, {}, {}};
  c.full = c.typed;
  if (options.math.HasWindow()) c.full.window = {};
  c.others = Others(options, chosen, wide, notes);
  c.dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
  if (!options.tensors.dtype.empty()) {
    c.dtypes = {ParseDType(options.tensors.dtype)};
  }
  for (const DType dtype : c.dtypes) {
    TensorOptions rounded = options.tensors;
    rounded.dtype = Name(dtype);
    c.sets.emplace(dtype, rounded.Load());
  }
  const bool with_attention =
      std::any_of(chosen.begin(), chosen.end(),
                  [](const OpEntry& op) { return op.name == "attention"; });
  const std::vector<Row> rows = Measure(ctx, c, with_attention);
  const std::string against =
      c.For(ctx, c.full.causal).text +
      (c.references.size() > 1 ? ", causal where the row is" : "");
  Progress("");

  const std::vector<std::string> columns = {"<mechanism", "<options",  "<dtype",
                                            "time",       "workspace", "state",
                                            "max error",  "rms error"};
  Json list = Json::array();
  for (const Row& row : rows) list.push_back(RowToJson(row));
  const Json document = {{"file", wide.file},
                         {"layer", wide.layer},
                         {"reference", against},
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
  text += "errors against " + against + "\n\n";
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

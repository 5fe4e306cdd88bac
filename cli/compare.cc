// heed compare: the cost of each mechanism on these tensors and its distance from exact attention in float64: exact
// attention itself in every dtype, attention under windows and patterns that drop keys, and every other mechanism that
// the tensors of the file suffice for, with those that can be assumed.
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/attention_call.h"
#include "cli/compare_report.h"
#include "cli/format.h"
#include "cli/mechanism_call.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/verbs.h"
#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/harness/assumed_tensors.h"
#include "heed/harness/probe.h"
#include "heed/ops/sparse/select/select.h"
#include "heed/pages/page.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "Errors are against exact attention in float64 without --window and --pattern,\n"
    "which attention has in a row of its own, causal where a row is: the root mean\n"
    "square relative to that of o, and the largest difference of an element. Rows of\n"
    "a selector choose their pairs by content, which their times include. Visited\n"
    "is the share of all pairs of a query and a key that attention computes. State is\n"
    "the memory for the next token: keys and values, or a recurrence's state.\n"
    "Other mechanisms run with their default options; decays and projections that the\n"
    "file does not have are assumed. Such mechanisms compute another function, which\n"
    "only training makes comparable with attention: their errors are printed with\n"
    "--all or -m. The errors of a file without q, k and v are against each mechanism\n"
    "in float64. The roof is that of heed bench.\n\n"
    "Example:\n  heed compare data/minilm_alice.safetensors --layer 2";

// Above this number of flops the scalar reference would take minutes.
constexpr double kMaxReferenceFlops = 4e9;

constexpr int64_t kWindows[] = {64, 128, 256};  // keys that a query sees
constexpr int64_t kFewestToChoose = 128;

struct CompareOptions {
  std::string mechanisms, html;
  bool all = false, json = false;
  MachineOptions machine;
  TensorOptions tensors;
  MathOptions math;
};

// Attention with these options, and a pattern that is chosen for the given tensors if there is a selector.
struct Variant {
  Kind kind;
  attention::Options options;
  std::string selector = {};
  std::function<Pattern(Context&, const TensorSet&)> choose = {};
};

// The patterns that heed.select chooses if attention has no other restriction: an eighth of the blocks by two scores,
// nine tenths of the mass, and under a causal mask columns and diagonals.
std::vector<Variant> Selectors(const attention::Options& full, int64_t Tk) {
  std::vector<Variant> variants;
  const auto add = [&](const std::string& text, const auto& choose) {
    variants.push_back({Kind::kApproximate, full, text, choose});
  };
  select::TopBlocksOptions top;
  top.causal = full.causal;
  top.block = Tk < 1024 ? 16 : 64;
  top.count = std::max<int64_t>(Tk / top.block / 8, 1);
  for (const auto& [score, name] : {std::pair{select::Score::kMean, "mean"}, {select::Score::kBox, "box"}}) {
    top.score = score;
    add(Format("top_blocks({}, {}, {})", top.count, top.block, name),
        [top](Context& ctx, const TensorSet& set) { return select::TopBlocks(ctx, set.q, set.k, top); });
  }
  select::CumulativeOptions cumulative;
  cumulative.causal = full.causal;
  cumulative.block = top.block;
  cumulative.mass = .9;
  add(Format("cumulative(0.9, {})", top.block),
      [cumulative](Context& ctx, const TensorSet& set) { return select::Cumulative(ctx, set.q, set.k, cumulative); });
  if (!full.causal) return variants;
  select::VerticalSlashOptions slash;
  slash.verticals = slash.sinks = Tk / 32;
  slash.slashes = slash.local = Tk / 16;
  add(Format("vertical_slash({}, {})", slash.verticals, slash.slashes),
      [slash](Context& ctx, const TensorSet& set) { return select::VerticalSlash(ctx, set.q, set.k, slash); });
  return variants;
}

// Exact attention as the reference computes it, and its restrictions: the window and the pattern on the command line,
// or else some windows that are narrower than the keys and the patterns of selectors.
std::vector<Variant> Variants(const attention::Options& full, const attention::Options& typed, bool is_restricted,
                              const TensorSet& set) {
  const int64_t Tk = set.k.size(1);
  std::vector<Variant> variants = {{Kind::kExact, full}};
  if (is_restricted) {
    variants.push_back({Kind::kApproximate, typed});
    return variants;
  }
  if (full.window.left >= 0 || full.window.right >= 0) return variants;
  for (const int64_t keys : kWindows) {
    if (keys >= Tk) break;
    attention::Options narrow = full;
    narrow.window = full.causal ? attention::Window{keys - 1, 0} : attention::Window{keys / 2, keys / 2};
    variants.push_back({Kind::kApproximate, narrow});
  }
  // With fewer keys there is nothing to choose, and queries that are not tokens of the keys have no block.
  if (Tk < kFewestToChoose || set.q.size(1) != Tk) return variants;
  for (Variant& variant : Selectors(full, Tk)) variants.push_back(std::move(variant));
  return variants;
}

// Bytes of the keys and values that the next query would see.
int64_t KeyValueBytes(const TensorSet& set, const attention::Options& options) {
  const bool drops = options.window.left >= 0;
  const int64_t all = set.k.size(1);
  const int64_t keys = drops ? std::min(all, options.window.left + 1) : all;
  return set.k.size(0) * keys * set.k.size(2) * (set.k.size(3) + set.v.size(3)) *
         static_cast<int64_t>(SizeOf(set.dtype));
}

// The number of pairs of a query and a key, over all heads.
double AllPairs(const TensorSet& set) {
  return static_cast<double>(set.q.size(0) * set.q.size(2)) * static_cast<double>(set.q.size(1) * set.k.size(1));
}

// The reference of errors. A kernel that serves as reference is itself checked on some rows.
struct Reference {
  AttentionCall expected;
  std::string text;
  std::optional<OutputError> own_error;
};

Reference ComputeReference(Context& ctx, const TensorSet& wide, const attention::Options& options) {
  Progress("reference");
  const int64_t num_queries = wide.q.size(1);
  const AttentionCall expected(wide, options, DType::kF64);
  const attention::Explanation plan = expected.Explain(ctx);
  if (plan.flops <= kMaxReferenceFlops) {
    expected.Reference();
    return {expected, "attention in float64, scalar reference", std::nullopt};
  }
  expected.Forward(ctx);
  const double affordable = kMaxReferenceFlops / plan.flops * static_cast<double>(num_queries) / 3;
  const int64_t rows = std::clamp<int64_t>(static_cast<int64_t>(affordable), 1, 32);
  const OutputError error = expected.SpotCheck(rows);
  return {expected,
          Format("attention in float64, kernel {} {}, within {} of the "
                 "scalar reference on {} queries",
                 plan.kernel, plan.target, ErrorSize(error.max), 3 * rows),
          error};
}

// The input of the rows: a file with q, k and v.
struct Comparison {
  const CompareOptions& options;
  const TensorSet& wide;                 // the same in f64
  attention::Options full, typed;        // without and with --window and --pattern
  std::map<bool, Reference> references;  // exact attention with options `full`, causal or not
  std::map<DType, TensorSet> sets;
  std::map<DType, double> roofs;  // of all cores in use, flops per second

  // Computed on first use, because it may take minutes.
  const Reference& For(Context& ctx, bool causal) {
    const auto found = references.find(causal);
    if (found != references.end()) return found->second;
    attention::Options exact = full;
    exact.causal = causal;
    return references.emplace(causal, ComputeReference(ctx, wide, exact)).first->second;
  }
};

TensorOptions In(const TensorOptions& tensors, DType dtype) {
  TensorOptions rounded = tensors;
  rounded.dtype = Name(dtype);
  return rounded;
}

bool Has(const OpEntry& op, DType dtype) {
  return std::find(op.dtypes.begin(), op.dtypes.end(), dtype) != op.dtypes.end();
}

void AddAttention(Context& ctx, Comparison& c, const Variant& variant, Countdown& countdown, CompareReport& report) {
  attention::Options options = variant.options;
  const Reference& reference = c.For(ctx, options.causal);
  for (const DType dtype : report.dtypes) {
    const TensorSet& set = c.sets.at(dtype);
    countdown.Next("attention " + (variant.choose ? variant.selector : ToString(options)) + " " + Name(dtype));
    if (variant.choose) options.pattern = Named(set.file, [&] { return variant.choose(ctx, set); });
    const AttentionCall call(set, options, dtype);
    const double seconds = MedianSeconds(ctx, [&] {
      if (variant.choose) variant.choose(ctx, set);  // the selector's time counts too
      call.Forward(ctx);
    });
    const attention::Explanation plan = call.Explain(ctx);
    report.rows.push_back({variant.kind,
                           "attention",
                           options,
                           variant.selector,
                           {},
                           dtype,
                           seconds,
                           plan.flops,
                           c.roofs.at(dtype),
                           call.Workspace(ctx),
                           KeyValueBytes(set, options),
                           MeasureError(call.o(), reference.expected.o()),
                           plan.visited_pairs,
                           AllPairs(set)});
    // The error of the reference against itself would be 0, so its own error is reported instead.
    if (variant.kind == Kind::kExact && dtype == DType::kF64 && reference.own_error) {
      report.rows.back().error = *reference.own_error;
    }
  }
}

// Multiply-adds of all cores that `ctx` uses.
double RoofOf(const Context& ctx, DType dtype) {
  const int cores = std::min(ctx.num_threads(), os::NumUsableCpus());
  return cores * probe::PeakFlopsPerSecond(dtype, ctx.allowed_targets());
}

CompareRow RowOf(Context& ctx, const OpEntry& op, DType dtype, double roof, const MechanismCall& call,
                 const ConstTensorView& o, const ConstTensorView& expected) {
  const double seconds = MedianSeconds(ctx, [&] { call.Forward(ctx); });
  attention::Options options;
  options.causal = call.plan().causal;
  return {Kind::kExact,
          op.name,
          options,
          {},
          {},
          dtype,
          seconds,
          call.plan().flops,
          roof,
          call.plan().workspace_bytes,
          call.StateBytes(),
          MeasureError(o, expected)};
}

// For example "i and log_decay".
std::string Enumerate(const std::vector<std::string>& names) {
  std::string text = names[0];
  for (size_t i = 1; i < names.size(); ++i) {
    text += (i + 1 < names.size() ? ", " : " and ") + names[i];
  }
  return text;
}

// Sparse mechanisms are softmax attention over fewer pairs; with assumed gates or projections a result is that of no
// trained model.
Kind KindOf(const OpEntry& op, const std::vector<std::string>& assumed) {
  return op.family == "sparse" && assumed.empty() ? Kind::kApproximate : Kind::kOther;
}

// Throws FileError where the mechanism does not fit these tensors.
void AddMechanism(Context& ctx, Comparison& c, const OpEntry& op, Countdown& countdown, CompareReport& report,
                  const std::string& setting = "") {
  std::vector<CompareRow> rows;
  for (const DType dtype : report.dtypes) {
    if (!Has(op, dtype)) continue;
    countdown.Next(op.name + " " + setting + (setting.empty() ? "" : " ") + Name(dtype));
    NamedTensors set = In(c.options.tensors, dtype).Load(SpecsBesideQkv(op));
    std::vector<std::string> assumed;
    const std::vector<std::string> missing = Complete(ctx, op, set, assumed);
    if (!missing.empty()) {
      throw FileError(set.file + ": no " + Enumerate(missing) + ", expected beside q, k and v");
    }
    const MechanismCall call(ctx, op, set.file, set.tensors, std::nullopt);
    const Reference& reference = c.For(ctx, call.plan().causal);
    rows.push_back(
        RowOf(ctx, op, dtype, c.roofs.at(dtype), call, call.Outputs(set.batched)[0].tensor, reference.expected.o()));
    rows.back().kind = KindOf(op, assumed);
    rows.back().assumed = assumed;
    rows.back().selector = setting;
  }
  report.rows.insert(report.rows.end(), rows.begin(), rows.end());
}

// A file without q, k and v: the mechanism is compared with itself in f64.
void AddAlone(Context& ctx, const TensorOptions& tensors, const OpEntry& op, Countdown& countdown,
              CompareReport& report) {
  const NamedTensors wide = In(tensors, DType::kF64).Load(op.inputs);
  const MechanismCall expected(ctx, op, wide.file, wide.tensors, std::nullopt);
  expected.Forward(ctx);
  for (const DType dtype : report.dtypes) {
    if (!Has(op, dtype)) continue;
    countdown.Next(op.name + " " + Name(dtype));
    const NamedTensors set = In(tensors, dtype).Load(op.inputs);
    const MechanismCall call(ctx, op, set.file, set.tensors, std::nullopt);
    report.rows.push_back(RowOf(ctx, op, dtype, RoofOf(ctx, dtype), call, call.o(), expected.o()));
    if (dtype == DType::kF64) report.rows.back().error = {std::nan(""), std::nan("")};
  }
}

// The reason of an error, without the names of the file and the mechanism before it.
std::string Reason(const std::string& what, const std::string& file, const OpEntry& op) {
  std::string reason = what;
  for (const std::string& prefix : {file + ": ", op.name + "::Explain: ", op.name + ": "}) {
    if (reason.starts_with(prefix)) reason.erase(0, prefix.size());
  }
  return reason;
}

// Adds rows with `add`, or records the reason why not. A mechanism that is named on the command line must work.
template <class Add>
void TryToAdd(const CompareOptions& options, const OpEntry& op, const std::string& file, CompareReport& report,
              const Add& add) {
  try {
    add();
  } catch (const FileError& e) {
    if (!options.mechanisms.empty()) throw;
    report.skipped.emplace_back(op.name, Reason(e.what(), file, op));
  }
}

std::string ProblemOf(const LayerOfFile& set, const std::vector<NamedTensor>& tensors) {
  std::string text = std::string(Name(set.file_dtype)) + " in the file";
  for (const NamedTensor& x : tensors) text += "  " + x.name + " " + x.tensor.ShapeString();
  return text;
}

std::string MachineOf(const Context& ctx) {
  return Format("{}, {}, {} thread{}", os::CpuName(), TargetName(ctx.allowed_targets()), ctx.num_threads(),
                ctx.num_threads() == 1 ? "" : "s");
}

CompareReport CompareQkv(Context& ctx, const CompareOptions& options, const std::vector<OpEntry>& chosen,
                         CompareReport report) {
  const TensorSet wide = In(options.tensors, DType::kF64).Load();
  Comparison c{options, wide, {}, options.math.Resolve(wide, report.notes), {}, {}, {}};
  c.full = c.typed;
  if (options.math.HasWindow()) c.full.window = {};
  c.full.pattern = {};
  for (const DType dtype : report.dtypes) {
    c.sets.emplace(dtype, In(options.tensors, dtype).Load());
    c.roofs.emplace(dtype, RoofOf(ctx, dtype));
  }
  report.problem = ProblemOf(wide, {{"q", wide.q}, {"k", wide.k}, {"v", wide.v}});
  report.file = wide.file;
  report.layer = wide.layer;
  report.tokens = wide.k.size(1);

  std::vector<Variant> variants =
      Variants(c.full, c.typed, options.math.HasWindow() || options.math.HasPattern(), wide);
  if (chosen.size() > 1 && !c.full.causal) {  // what causal mechanisms stand beside
    Variant causal = {Kind::kExact, c.full};
    causal.options.causal = true;
    variants.insert(variants.begin() + 1, causal);
  }
  size_t lines = variants.size() + chosen.size();
  for (const OpEntry& op : chosen) lines += op.settings.size();
  Countdown countdown(lines * report.dtypes.size());
  for (const OpEntry& op : chosen) {
    if (op.name == "attention") {
      for (const Variant& variant : variants) {
        AddAttention(ctx, c, variant, countdown, report);
      }
    } else if (op.call != nullptr) {
      TryToAdd(options, op, wide.file, report, [&] { AddMechanism(ctx, c, op, countdown, report); });
      for (const auto& [setting, call] : op.settings) {
        OpEntry other = op;
        other.call = call;
        TryToAdd(options, other, wide.file, report, [&] { AddMechanism(ctx, c, other, countdown, report, setting); });
      }
    }
  }
  report.reference = c.For(ctx, c.full.causal).text + (c.references.size() > 1 ? ", causal where the row is" : "");
  return report;
}

// The number of tokens of the first input that has tokens.
int64_t TokensOf(const OpEntry& op, const NamedTensors& set) {
  for (const InputSpec& spec : op.inputs) {
    const size_t axis = spec.axes.find('T');
    const auto tensor = set.tensors.find(spec.name);
    if (axis != spec.axes.npos && tensor != set.tensors.end()) return tensor->second.size(static_cast<int>(axis));
  }
  return 0;
}

CompareReport CompareAlone(Context& ctx, const CompareOptions& options, const std::vector<OpEntry>& chosen,
                           CompareReport report) {
  report.reference = "each mechanism itself in float64, as the file has no q, k and v";
  Countdown countdown(chosen.size() * report.dtypes.size());
  for (const OpEntry& op : chosen) {
    const bool fits = op.call != nullptr && options.tensors.Hold(op.inputs);
    if (!fits && !options.mechanisms.empty()) {  // throws, because a named mechanism must work
      op.call == nullptr ? void(options.tensors.Load()) : void(options.tensors.Load(op.inputs));
    }
    if (!fits) {
      report.skipped.emplace_back(op.name, "not all of its inputs are in the file");
      continue;
    }
    const NamedTensors set = options.tensors.Load(op.inputs);
    std::vector<NamedTensor> tensors;
    for (const auto& [name, x] : set.tensors) tensors.push_back({name, x});
    report.problem = ProblemOf(set, tensors);
    report.file = set.file;
    report.layer = set.layer;
    report.tokens = TokensOf(op, set);
    TryToAdd(options, op, set.file, report, [&] { AddAlone(ctx, options.tensors, op, countdown, report); });
  }
  // Throws, and names the tensors that are there and those that are missing.
  if (report.rows.empty()) (void)options.tensors.Load();
  return report;
}

void Compare(const CompareOptions& options) {
  const std::vector<OpEntry> chosen =
      options.mechanisms.empty() ? AllOps() : ChooseOps(SplitAtCommas(options.mechanisms));
  if (!options.html.empty()) {
    options.tensors.CheckNotInput("--html", options.html);
  }
  options.math.Check();
  Context ctx(options.machine.Threads());
  options.machine.Apply(ctx);
  CompareReport report;
  report.full = options.all || !options.mechanisms.empty();
  report.machine = MachineOf(ctx);
  report.dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
  if (!options.tensors.dtype.empty()) {
    report.dtypes = {ParseDType(options.tensors.dtype)};
  }
  const bool qkv = options.tensors.Hold({{"q", "BTHK"}, {"k", "BTHK"}, {"v", "BTHV"}});
  if (!options.html.empty()) pages::CheckWritable(options.html);
  report =
      qkv ? CompareQkv(ctx, options, chosen, std::move(report)) : CompareAlone(ctx, options, chosen, std::move(report));
  if (!options.html.empty()) WritePage(options.html, report);
  options.json ? PrintJson(ToJson(report)) : Print(ToText(report));
}

}  // namespace

void AddCompare(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "compare", "every mechanism on these tensors: time, memory, error", kFooter);
  const auto options = std::make_shared<CompareOptions>();
  options->tensors.Register(verb);
  AddText(verb, "-m,--mechanisms", options->mechanisms, "only these, by name; default all", "A,B,C");
  AddFlag(verb, "--all", options->all, "every table, and which mechanisms are left out, and why");
  AddText(verb, "--html", options->html, "also writes a picture and the table as a page", "F");
  options->math.Register(verb);
  options->machine.Register(verb);
  AddFlag(verb, "--json", options->json, "one JSON document");
  OnChosen(verb, [options] { Compare(*options); });
}

}  // namespace heed::cli

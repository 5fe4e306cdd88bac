// heed verify: compares every mechanism with its float64 reference, on every SIMD target of this machine and in every
// dtype.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/format.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/token_ids.h"
#include "cli/verbs.h"
#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/case.h"
#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/patterns/pattern.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "A row is many problems: awkward sizes, and random ones with random options.\n"
    "Its error and tolerance are of the element that came closest to its tolerance.\n"
    "--pattern verifies attention alone, with one pattern in every problem that it fits.\n\n"
    "Example:\n  heed verify attention --isa AVX2";

constexpr int64_t kRandomCases = 150;  // per mechanism, target and dtype

// Sizes one below, at and above a vector, primes, and sizes that are multiples of nothing.
constexpr Sizes kSizes[] = {
    {1, 1, 1, 1, 1, 1, 1},     {2, 7, 9, 4, 2, 20, 36},    {1, 17, 17, 3, 3, 3, 5},
    {1, 65, 65, 2, 1, 64, 64}, {1, 1, 131, 4, 4, 128, 64}, {1, 129, 257, 2, 2, 80, 80},
};

struct VerifyOptions {
  std::vector<std::string> mechanisms;
  std::string dtype, pattern, random;
  int64_t num_random = kRandomCases;
  bool json = false;
  MachineOptions machine;
};

struct Row {
  std::string mechanism, pass, target;
  DType dtype;
  bool ok = true;
  double error = 0, tolerance = 0, worst_ratio = -1;
  std::string message;  // of the first failure
};

void Add(const Comparison& c, Row& row) {
  if (!c.ok && row.ok) row.message = c.message;
  row.ok = row.ok && c.ok;
  if (c.worst_ratio > row.worst_ratio) {
    row.worst_ratio = c.worst_ratio;
    row.error = c.error;
    row.tolerance = c.tolerance;
  }
}

// The targets for a dtype that the cap of --isa or HEED_ISA allows.
std::vector<std::string> Targets(DType dtype, int64_t allowed) {
  std::vector<std::string> targets;
  for (const std::string& name : AvailableTargets(dtype)) {
    if ((TargetsUpTo(name) & ~allowed) == 0) targets.push_back(name);
  }
  return targets;
}

// The mechanisms that were named; only attention has patterns.
std::vector<OpEntry> Chosen(const VerifyOptions& options) {
  if (options.pattern.empty()) return ChooseOps(options.mechanisms);
  for (const OpEntry& op : ChooseOps(options.mechanisms)) {
    if (!options.mechanisms.empty() && op.name != "attention") {
      throw UsageError("--pattern is not an option of " + op.name + ", expected attention alone");
    }
  }
  return ChooseOps({"attention"});
}

// Problems of a mechanism in one dtype. Those of attention use the pattern on the command line.
std::vector<std::function<Case()>> Problems(const OpEntry& op, DType dtype, const VerifyOptions& options) {
  const std::string& expression = options.pattern;
  const std::string pattern = expression.empty() ? "" : "pattern=" + expression;
  std::vector<std::function<Case()>> problems;
  for (const std::string& pass : op.passes) {
    for (const Sizes& sizes : kSizes) {
      problems.push_back([=] { return op.make_case({sizes, dtype, 1, pass, pattern}); });
      if (!HasVariant(op, "causal")) continue;
      const std::string causal = pattern.empty() ? "causal" : "causal+" + pattern;
      problems.push_back([=] { return op.make_case({sizes, dtype, 2, pass, causal}); });
    }
  }
  for (uint64_t seed = 1; seed <= static_cast<uint64_t>(options.num_random); ++seed) {
    problems.push_back([=, expression = expression] {
      if (pattern.empty()) return op.random_case(dtype, seed);
      return attention::MakeRandomCase(dtype, seed, Pattern::Parse(expression));
    });
  }
  return problems;
}

// The number of problems to which the pattern does not apply, and the reason for the last one.
struct LeftOut {
  size_t count = 0;
  std::string reason;
};

// Returns no case if the pattern does not apply to the problem.
std::optional<Case> Make(const std::function<Case()>& problem, bool has_pattern, LeftOut& left_out) {
  try {
    return problem();
  } catch (const InvalidArgument& e) {
    if (!has_pattern) throw;
    const std::string what = e.what();
    left_out = {left_out.count + 1, what.substr(what.find("pattern "))};
    return std::nullopt;
  }
}

using Parts = std::vector<std::pair<OpEntry, DType>>;

// Throws UsageError if the pattern on the command line applies to no problem.
void CheckFitsSome(const Parts& parts, const VerifyOptions& options) {
  LeftOut left_out;
  for (const auto& [op, dtype] : parts) {
    for (const auto& problem : Problems(op, dtype, options)) {
      if (Make(problem, /*has_pattern=*/true, left_out)) return;
    }
  }
  throw UsageError(Format("--pattern: {}, and fits none of {} problems", left_out.reason, left_out.count));
}

// All targets run the same problems, so that each reference is computed once.
std::vector<Row> VerifyOp(const OpEntry& op, const std::vector<std::string>& targets, DType dtype,
                          const VerifyOptions& options, Context& ctx, Countdown& countdown, LeftOut& left_out) {
  std::map<std::string, std::map<std::string, Row>> rows;  // by target and pass
  for (const std::function<Case()>& problem : Problems(op, dtype, options)) {
    countdown.Next(Format("{} {}", op.name, Name(dtype)));
    const std::optional<Case> made = Make(problem, !options.pattern.empty(), left_out);
    if (!made) continue;
    const Case& c = *made;
    const Expected expected = ExpectedOf(c);
    for (const std::string& target : targets) {
      ctx.set_isa(target);
      Row& row = rows[target][c.pass];
      if (row.worst_ratio < 0) {
        row = {op.name, c.pass, target, dtype, true, 0, 0, 0, ""};
      }
      Add(Compare(c, ctx, expected), row);
    }
  }
  std::vector<Row> list;
  for (const std::string& target : targets) {
    for (const std::string& pass : op.passes) {
      const Row& row = rows[target][pass];
      if (row.worst_ratio >= 0) list.push_back(row);
    }
  }
  return list;
}

Json RowToJson(const Row& row) {
  return {
      {"mechanism", row.mechanism}, {"pass", row.pass},           {"target", row.target}, {"dtype", Name(row.dtype)},
      {"max_error", row.error},     {"tolerance", row.tolerance}, {"ok", row.ok}};
}

void Verify(const VerifyOptions& options) {
  if (!options.pattern.empty()) ParsePattern(options.pattern);
  Context ctx(options.machine.Threads());
  options.machine.Apply(ctx);
  const int64_t allowed = ctx.allowed_targets();
  const std::vector<OpEntry> ops = Chosen(options);
  Parts parts;
  size_t problems = 0;
  for (const OpEntry& op : ops) {
    for (const DType dtype : op.dtypes) {
      if (!options.dtype.empty() && ParseDType(options.dtype) != dtype) continue;
      parts.emplace_back(op, dtype);
      problems += Problems(op, dtype, options).size();
    }
  }
  if (!options.pattern.empty() && !parts.empty()) CheckFitsSome(parts, options);
  std::optional<StreamedTable> table;
  if (!options.json) {
    table.emplace(std::vector<std::string>{"<mechanism", "<pass", "<target", "<dtype", "error", "tolerance", "<ok"},
                  std::vector<std::string>{LongestName(ops), "backward", "AVX3_ZEN4", "bf16", "1.2e-07"});
  }
  Json list = Json::array();
  size_t failures = 0;
  std::string message;  // of the first failure
  LeftOut left_out;
  {
    Countdown countdown(problems);
    for (const auto& [op, dtype] : parts) {
      for (const Row& row : VerifyOp(op, Targets(dtype, allowed), dtype, options, ctx, countdown, left_out)) {
        if (!row.ok && failures++ == 0) message = row.message;
        list.push_back(RowToJson(row));
        if (!table) continue;
        table->Add({row.mechanism, row.pass, row.target, Name(row.dtype), ErrorSize(row.error),
                    ErrorSize(row.tolerance), row.ok ? "ok" : "FAILED"});
      }
    }
  }
  Json document = {{"ok", failures == 0}, {"rows", list}};
  if (!options.pattern.empty()) {
    document["pattern"] = ParsePattern(options.pattern).ToString();
    document["left_out"] = left_out.count;
  }
  if (options.json) PrintJson(document);
  if (table && left_out.count > 0) {
    Print(Format("left out: {} of {} problems, the last as its {}\n", left_out.count, problems, left_out.reason));
  }
  if (failures != 0) {
    throw std::runtime_error(Format("verify: {} of {} rows failed, expected 0; {}", failures, list.size(), message));
  }
}

}  // namespace

void AddVerify(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "verify", "every mechanism against its float64 reference on this machine", kFooter);
  const auto options = std::make_shared<VerifyOptions>();
  AddMechanisms(verb, options->mechanisms);
  AddText(verb, "--dtype", options->dtype, "only this dtype", "f32|bf16|f16|f64");
  AddPattern(verb, options->pattern);
  AddText(verb, "--random", options->random, "random problems of each mechanism and dtype, default 150", "N");
  options->machine.Register(verb);
  AddFlag(verb, "--json", options->json, "one JSON document");
  OnChosen(verb, [options] {
    options->num_random = ParseInteger("--random", options->random, 0, 1'000'000, kRandomCases);
    Verify(*options);
  });
}

}  // namespace heed::cli

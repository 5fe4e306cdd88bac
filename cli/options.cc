// Options: every value is parsed here, so that all errors have the same form.
#include "cli/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "CLI/CLI.hpp"

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/core/path.h"
#include "heed/patterns/pattern_internal.h"

namespace heed::cli {
namespace {

constexpr int kMaxThreads = 4096;

template <class T>
std::optional<T> ParseNumber(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

std::optional<double> ParseFinite(std::string_view text) {
  const std::optional<double> value = ParseNumber<double>(text);
  return value && std::isfinite(*value) ? value : std::nullopt;
}

std::optional<attention::Window> ParseWindow(const std::string& text) {
  const std::vector<std::string> parts = SplitAtCommas(text);
  if (parts.size() != 2) return std::nullopt;
  const auto left = ParseNumber<int64_t>(parts[0]);
  const auto right = ParseNumber<int64_t>(parts[1]);
  if (!left || !right || *left < -1 || *right < -1) return std::nullopt;
  return attention::Window{*left, *right};
}

std::optional<double> ParseSoftcap(const std::string& text) {
  const std::optional<double> value = ParseFinite(text);
  return value && *value >= 0 ? value : std::nullopt;
}

std::optional<bool> ParseBool(const std::string& text) {
  if (text == "true" || text == "True" || text == "1") return true;
  if (text == "false" || text == "False" || text == "0") return false;
  return std::nullopt;
}

constexpr char kWindowForm[] = "L,R: keys to the left and right of a query, each -1 (unlimited) or more";

// The value on the command line, else the file's, else none.
template <class T, class Parse>
std::optional<T> Fact(const TensorSet& tensors, const char* name, const std::string& typed, const char* expected,
                      Parse parse, std::vector<std::string>& notes) {
  if (!typed.empty()) {
    const std::optional<T> value = parse(typed);
    if (!value) BadOption(std::string("--") + name, typed, expected);
    return value;
  }
  const auto fact = tensors.facts.find(name);
  if (fact == tensors.facts.end()) return std::nullopt;
  const std::optional<T> value = parse(fact->second);
  if (!value) {
    throw FileError(tensors.file + ": metadata " + name + " is '" + fact->second + "', expected " + expected);
  }
  notes.push_back(std::string(name) + " " + fact->second + " from the file");
  return value;
}

// Throws UsageError if the pattern does not apply to calls on these tensors.
void CheckFits(const Pattern& pattern, const TensorSet& set) {
  PatternCall call = {set.q.size(1), set.k.size(1), set.q.size(2), set.k.size(2), {}};
  call.batches = set.q.size(0);
  try {
    patterns::CheckPattern("--pattern", pattern, call);
  } catch (const InvalidArgument& e) {
    throw UsageError(e.what());
  }
}

}  // namespace

void BadOption(const std::string& option, const std::string& value, const std::string& expected) {
  throw UsageError(option + " is '" + value + "', expected " + expected);
}

std::vector<std::string> SplitAtCommas(const std::string& text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (;;) {
    const size_t end = text.find(',', begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

DType ParseDType(const std::string& text) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    if (text == Name(dtype)) return dtype;
  }
  BadOption("--dtype", text, "f64, f32, bf16 or f16");
}

std::vector<OpEntry> ChooseOps(const std::vector<std::string>& names) {
  if (names.empty()) return AllOps();
  std::vector<OpEntry> ops;
  for (const std::string& name : names) {
    try {
      ops.push_back(FindOp(name));
    } catch (const InvalidArgument& e) {
      throw UsageError(e.what());
    }
  }
  return ops;
}

std::string LongestName(const std::vector<OpEntry>& ops) {
  std::string longest;
  for (const OpEntry& op : ops) {
    if (op.name.size() > longest.size()) longest = op.name;
  }
  return longest;
}

bool HasVariant(const OpEntry& op, const std::string& variant) {
  return std::find(op.variants.begin(), op.variants.end(), variant) != op.variants.end();
}

CLI::App& AddVerb(CLI::App& app, const std::string& name, const std::string& description, const std::string& footer) {
  CLI::App& verb = *app.add_subcommand(name, description);
  verb.footer(footer);
  return verb;
}

void OnChosen(CLI::App& verb, std::function<void()> run) { verb.callback(std::move(run)); }

void AddFlag(CLI::App& verb, const std::string& name, bool& value, const std::string& help) {
  verb.add_flag(name, value, help);
}

void AddMechanisms(CLI::App& verb, std::vector<std::string>& names) {
  verb.add_option("MECHANISM", names, "only these; default all")->type_name("");
}

void AddText(CLI::App& verb, const std::string& name, std::string& value, const std::string& help,
             const std::string& type, Need need) {
  CLI::Option* option = verb.add_option(name, value, help)->type_name(type);
  option->check([](const std::string& text) { return std::string(text.empty() ? "is empty, expected a value" : ""); });
  option->required(need == Need::kRequired);
}

void AddPattern(CLI::App& verb, std::string& value) {
  AddText(verb, "--pattern", value,
          "the kept pairs, as an expression of Python: \"longformer(512, [0]) | dilated(8, 64)\"", "EXPRESSION");
}

Pattern ParsePattern(const std::string& expression) {
  constexpr std::string_view kParser = "pattern: ";  // begins what(), unless a builder speaks
  try {
    return Pattern::Parse(expression);
  } catch (const InvalidArgument& e) {
    std::string what = e.what();
    if (what.starts_with(kParser)) what.erase(0, kParser.size());
    throw UsageError("--pattern: " + what);
  }
}

void CheckEnvironment() {
  try {
    Context ctx(1);
  } catch (const std::exception& e) {  // what() is "isa is 'X', ..."
    throw UsageError(std::string("HEED_ISA: ") + e.what());
  }
}

void MachineOptions::Register(CLI::App& verb) {
  AddText(verb, "--threads", threads, "threads, 1 to 4096; default all CPUs", "N");
  AddText(verb, "--isa", isa,
          "cap of the SIMD target: avx512, avx2, sse2, neon or a name that `heed info` has; tiles for none", "TARGET");
}

int MachineOptions::Threads() const {
  if (threads.empty()) return os::NumUsableCpus();
  const std::optional<int> n = ParseNumber<int>(threads);
  if (!n || *n < 1 || *n > kMaxThreads) {
    BadOption("--threads", threads, "1 to " + std::to_string(kMaxThreads));
  }
  return *n;
}

void MachineOptions::Apply(Context& ctx) const {
  if (isa.empty()) return;
  try {
    ctx.set_isa(isa);
  } catch (const std::exception& e) {  // what() is "isa is 'X', ..."
    throw UsageError(std::string("--") + e.what());
  }
}

void TensorOptions::Register(CLI::App& verb, const std::string& default_layer) {
  AddText(verb, "FILE", file, "tensors q, k, v, or layers.0.q and so on", ".safetensors");
  AddText(verb, "--q", q, "q instead of FILE", "FILE.npy");
  AddText(verb, "--k", k, "k", "FILE.npy");
  AddText(verb, "--v", v, "v", "FILE.npy");
  AddText(verb, "--layer", layer, "layer by name or index; default " + default_layer, "NAME-OR-INDEX");
  AddText(verb, "--heads", heads, "query heads by index; default all", "A,B");
  AddText(verb, "--dtype", dtype, "dtype to compute in; default f32 for 16-bit files, else the file's",
          "f32|bf16|f16|f64");
}

void TensorOptions::CheckPaths() const {
  const int arrays = !q.empty() + !k.empty() + !v.empty();
  if (file.empty() && arrays == 0) {
    throw UsageError("no tensors, expected FILE or --q --k --v");
  }
  if (!file.empty() && arrays != 0) {
    throw UsageError("both FILE and --q --k --v, expected one of them");
  }
  if (file.empty() && arrays != 3) {
    throw UsageError(std::string(q.empty()   ? "--q"
                                 : k.empty() ? "--k"
                                             : "--v") +
                     " is missing, expected --q, --k and --v together");
  }
}

TensorChoice TensorOptions::Choice() const {
  TensorChoice choice{layer, heads, {}};
  if (!dtype.empty()) choice.dtype = ParseDType(dtype);
  return choice;
}

TensorSet TensorOptions::Load() const {
  CheckPaths();
  const TensorChoice choice = Choice();
  try {
    return LoadTensors({file, q, k, v}, choice);
  } catch (const InvalidArgument& e) {
    throw UsageError(e.what());
  }
}

NamedTensors TensorOptions::Load(const std::vector<InputSpec>& inputs, std::optional<int64_t> tokens) const {
  CheckPaths();
  TensorChoice choice = Choice();
  choice.tokens = tokens;
  try {
    return LoadNamed({file, q, k, v}, inputs, choice);
  } catch (const InvalidArgument& e) {
    throw UsageError(e.what());
  }
}

bool TensorOptions::Hold(const std::vector<InputSpec>& inputs) const {
  CheckPaths();
  return Holds({file, q, k, v}, inputs);
}

void TensorOptions::CheckNotInput(const std::string& option, const std::string& path) const {
  for (const std::string& input : {file, q, k, v}) {
    std::error_code error;
    if (!input.empty() && std::filesystem::equivalent(ToPath(path), ToPath(input), error)) {
      BadOption(option, path, "another file than the input");
    }
  }
}

void MathOptions::Register(CLI::App& verb) {
  AddFlag(verb, "--causal", causal, "only keys up to the query's own position");
  AddFlag(verb, "--no-causal", not_causal, "all keys, even if the file says causal");
  AddText(verb, "--window", window, "only so many keys left and right of a query", "L,R");
  AddText(verb, "--scale", scale, "factor of the logits; default 1/sqrt(D)", "S");
  AddText(verb, "--softcap", softcap, "logits s become C tanh(s / C); 0 is none", "C");
  AddPattern(verb, pattern);
}

void MathOptions::Check() const {
  if (causal && not_causal) {
    throw UsageError("both --causal and --no-causal, expected one of them");
  }
  std::vector<std::string> notes;
  Resolve(TensorSet(), notes);
}

std::optional<double> MathOptions::ScaleAlone(const std::string& mechanism) const {
  const auto refuse = [&](const std::string& option) {
    throw UsageError(option + " is not an option of " + mechanism + ", expected --scale alone");
  };
  if (causal) refuse("--causal");
  if (not_causal) refuse("--no-causal");
  if (!window.empty()) refuse("--window");
  if (!softcap.empty()) refuse("--softcap");
  if (HasPattern()) refuse("--pattern");
  if (scale.empty()) return std::nullopt;
  const std::optional<double> value = ParseFinite(scale);
  if (!value) BadOption("--scale", scale, "a finite number");
  return value;
}

attention::Options MathOptions::Resolve(const TensorSet& tensors, std::vector<std::string>& notes) const {
  attention::Options options;
  options.scale = Fact<double>(tensors, "scale", scale, "a finite number", ParseFinite, notes);
  options.softcap =
      Fact<double>(tensors, "softcap", softcap, "a finite number, 0 or more", ParseSoftcap, notes).value_or(0);
  options.window =
      Fact<attention::Window>(tensors, "window", window, kWindowForm, ParseWindow, notes).value_or(attention::Window{});
  const std::string typed = causal ? "true" : not_causal ? "false" : "";
  options.causal = Fact<bool>(tensors, "causal", typed, "true or false", ParseBool, notes).value_or(false);
  if (HasPattern()) {
    options.pattern = ParsePattern(pattern);
    if (tensors.q) CheckFits(options.pattern, tensors);
  }
  if (const auto missing = tensors.facts.find("not_recorded"); missing != tensors.facts.end()) {
    notes.push_back("the model also used " + missing->second + ", which the file does not hold");
  }
  return options;
}

}  // namespace heed::cli

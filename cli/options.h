// Options that several verbs share: how they are spelled, checked and
// explained.
#ifndef CLI_OPTIONS_H_
#define CLI_OPTIONS_H_

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/dtype.h"
#include "heed/harness/case.h"
#include "heed/harness/tensor_file.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/sparse/common/pattern.h"

// CLI11's headers take four seconds of each file that includes them; what verbs need of them is below.
namespace CLI {
class App;
}

namespace heed::cli {

// What the user typed is wrong, option values included: exit status 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// --threads, --isa.
struct MachineOptions {
  std::string threads, isa;

  void Register(CLI::App& verb);
  int Threads() const;             // default: one per usable CPU
  void Apply(Context& ctx) const;  // the cap of --isa
};

// FILE or --q --k --v, --layer, --heads, --dtype.
struct TensorOptions {
  std::string file, q, k, v, layer, heads, dtype;

  void Register(CLI::App& verb, const std::string& default_layer = "the first");
  // Throws UsageError for what the user chose, FileError for the file.
  TensorSet Load() const;
  NamedTensors Load(const std::vector<InputSpec>& inputs, std::optional<int64_t> tokens = {}) const;
  bool Hold(const std::vector<InputSpec>& inputs) const;
  // Throws UsageError if `path`, the value of `option`, is one of the inputs.
  void CheckNotInput(const std::string& option, const std::string& path) const;

 private:
  void CheckPaths() const;
  TensorChoice Choice() const;
};

// --causal, --window, --scale, --softcap, --pattern: absent means not typed.
struct MathOptions {
  bool causal = false, not_causal = false;
  std::string window, scale, softcap, pattern;

  void Register(CLI::App& verb);

  // Throws UsageError for what was typed, before any file is opened.
  void Check() const;

  // What was typed, else what the file says of its layer; a pattern is typed. `notes` receives a
  // line for each fact taken from the file.
  attention::Options Resolve(const TensorSet& tensors, std::vector<std::string>& notes) const;
  bool HasWindow() const { return !window.empty(); }
  bool HasPattern() const { return !pattern.empty(); }

  // For a mechanism that has but a scale: the typed one. Throws UsageError.
  std::optional<double> ScaleAlone(const std::string& mechanism) const;
};

// A verb of the program. `run` is called once the whole command line has been read.
CLI::App& AddVerb(CLI::App& app, const std::string& name, const std::string& description, const std::string& footer);
void OnChosen(CLI::App& verb, std::function<void()> run);

// An option without a value.
void AddFlag(CLI::App& verb, const std::string& name, bool& value, const std::string& help);

enum class Need { kOptional, kRequired };

// An option with one value, which is not empty.
void AddText(CLI::App& verb, const std::string& name, std::string& value, const std::string& help,
             const std::string& type, Need need = Need::kOptional);

// MECHANISM...: any number of names.
void AddMechanisms(CLI::App& verb, std::vector<std::string>& names);

// --pattern.
void AddPattern(CLI::App& verb, std::string& value);

// The set that an expression says. Throws UsageError that says where in it what was expected.
Pattern ParsePattern(const std::string& expression);

// Throws UsageError if HEED_ISA names no target of this machine.
void CheckEnvironment();

// A dtype that has kernels. Throws UsageError.
DType ParseDType(const std::string& text);

// The mechanisms of these names; all for none. Throws UsageError.
std::vector<OpEntry> ChooseOps(const std::vector<std::string>& names);

// The longest name of some, for the width of a column.
std::string LongestName(const std::vector<OpEntry>& ops);

bool HasVariant(const OpEntry& op, const std::string& variant);

// "a,b,c"; empty parts are kept.
std::vector<std::string> SplitAtCommas(const std::string& text);

// The only way an option's value is found wrong: "--threads is '0', expected
// 1 to 4096".
[[noreturn]] void BadOption(const std::string& option, const std::string& value, const std::string& expected);

}  // namespace heed::cli

#endif  // CLI_OPTIONS_H_

// Options that several verbs share: spelling, checks and help.
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
#include "heed/patterns/pattern.h"

// CLI11's headers take four seconds in each file that includes them; the functions below are all that verbs need.
namespace CLI {
class App;
}

namespace heed::cli {

// Wrong input of the user, option values included: exit status 2.
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
  // Throws UsageError for the user's choices, FileError for the file.
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

  // Checks the options before any file is opened. Throws UsageError.
  void Check() const;

  // Options from the command line, else from the file's metadata of its layer; a pattern comes from the command line
  // only. `notes` receives a line for each fact from the file.
  attention::Options Resolve(const TensorSet& tensors, std::vector<std::string>& notes) const;
  bool HasWindow() const { return !window.empty(); }
  bool HasPattern() const { return !pattern.empty(); }

  // The scale on the command line, for a mechanism that has no other option. Throws UsageError.
  std::optional<double> ScaleAlone(const std::string& mechanism) const;
};

// Adds a verb of the program. `run` is called after the whole command line has been parsed.
CLI::App& AddVerb(CLI::App& app, const std::string& name, const std::string& description, const std::string& footer);
void OnChosen(CLI::App& verb, std::function<void()> run);

// Adds an option without a value.
void AddFlag(CLI::App& verb, const std::string& name, bool& value, const std::string& help);

enum class Need { kOptional, kRequired };

// Adds an option with one value, which must not be empty.
void AddText(CLI::App& verb, const std::string& name, std::string& value, const std::string& help,
             const std::string& type, Need need = Need::kOptional);

// Adds MECHANISM...: any number of names.
void AddMechanisms(CLI::App& verb, std::vector<std::string>& names);

// Adds --pattern.
void AddPattern(CLI::App& verb, std::string& value);

// The pattern of an expression. Throws UsageError with the place of an error and what was expected there.
Pattern ParsePattern(const std::string& expression);

// Throws UsageError if HEED_ISA is not a target of this machine.
void CheckEnvironment();

// Parses a dtype that has kernels. Throws UsageError.
DType ParseDType(const std::string& text);

// The mechanisms with these names, or all if there are none. Throws UsageError.
std::vector<OpEntry> ChooseOps(const std::vector<std::string>& names);

// The longest name, for the width of a column.
std::string LongestName(const std::vector<OpEntry>& ops);

bool HasVariant(const OpEntry& op, const std::string& variant);

// Splits "a,b,c"; empty parts are kept.
std::vector<std::string> SplitAtCommas(const std::string& text);

// Throws the error of a wrong option value: "--threads is '0', expected 1 to 4096".
[[noreturn]] void BadOption(const std::string& option, const std::string& value, const std::string& expected);

}  // namespace heed::cli

#endif  // CLI_OPTIONS_H_

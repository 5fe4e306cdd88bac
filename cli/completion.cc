// heed completion: scripts that complete verbs, options and their values in a shell.
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "CLI/CLI.hpp"

#include "cli/format.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/verbs.h"
#include "heed/core/dispatch.h"
#include "heed/harness/case.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "For this shell:\n  source <(heed completion bash)\n"
    "  source <(heed completion zsh)       after compinit\n"
    "cmake --install puts both where new shells find them.\n\n"
    "Example:\n  heed completion bash";

// The possible values at a place of the command line.
struct Values {
  std::vector<std::string> words;  // empty: not known
  bool files = false;
  bool list = false;  // several words, with commas between
};

std::vector<std::string> Mechanisms() {
  std::vector<std::string> names;
  for (const OpEntry& op : AllOps()) names.push_back(op.name);
  return names;
}

std::vector<std::string> Targets() {
  std::vector<std::string> names = {"avx512", "avx2", "sse2"};
  for (const std::string& name : AvailableTargets()) names.push_back(name);
  return names;
}

// An option's type text describes its values: "f32|bf16" lists them, ".npy" or "OUT" is a file.
Values ValuesOf(const CLI::Option& option) {
  const std::string name = option.get_name(), type = option.get_type_name();
  if (name == "MECHANISM") return {Mechanisms()};
  if (name == "--mechanisms") return {Mechanisms(), false, true};
  if (name == "--isa") return {Targets()};
  Values values;
  for (size_t begin = 0; type.find('|') != std::string::npos;) {
    const size_t end = type.find('|', begin);
    values.words.push_back(type.substr(begin, end - begin));
    if (end == std::string::npos) break;
    begin = end + 1;
  }
  values.files = type.find('.') != std::string::npos || type == "OUT" || type == "F";
  return values;
}

bool TakesValue(const CLI::Option& option) { return option.get_items_expected_max() > 0; }

bool TakesSeveral(const CLI::Option& option) { return option.get_items_expected_max() > 1; }

// "-o" and "--output".
std::vector<std::string> Spellings(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  return names;
}

std::vector<const CLI::App*> Verbs(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

std::string Quoted(const std::string& text) {  // in single quotes
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

// bash.

// `values` has the completions by verb and place: words, which follow a comma if several may be joined by commas, or
// files.
constexpr std::string_view kBashBegin = R"(# bash completion of heed; made by `heed completion bash`.
_heed() {
  local -A values=(
)";

constexpr std::string_view kBashEnd = R"(  )
  local current=${COMP_WORDS[COMP_CWORD]} verb= place=0 option= word key before=
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    if [[ $option ]]; then option=
    elif [[ $word == -* ]]; then [[ ${values["$verb $word"]+x} ]] && option=$word
    elif [[ ! $verb ]]; then verb=$word
    else ((++place)); fi
  done
  if [[ $option ]]; then key="$verb $option"
  elif [[ $current == -* ]]; then key="$verb -"
  elif [[ ${values["$verb $place"]+x} ]]; then key="$verb $place"
  else key="$verb all"; fi
  local known=${values["$key"]}
  case $known in
    @files)
      compopt -o filenames 2>/dev/null
      mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
    ,*)
      [[ $current == *,* ]] && before=${current%,*},
      COMPREPLY=($(compgen -P "$before" -W "${known#,}" -- "${current##*,}")) ;;
    *) COMPREPLY=($(compgen -W "$known" -- "$current")) ;;
  esac
}
complete -F _heed heed
)";

std::string BashEntry(const std::string& verb, const std::string& place, const Values& values) {
  const std::string known =
      values.files ? "@files" : Format("{}{}", values.list ? "," : "", fmt::join(values.words, " "));
  return Format("    [{}]={}\n", Quoted(verb + " " + place), Quoted(known));
}

// zsh.

// Escapes text of a description of _arguments, which ends at a bracket or a colon.
std::string ZshText(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string ZshAction(const Values& values) {
  if (values.list) return Format("_values -s , mechanism {}", fmt::join(values.words, " "));
  if (!values.words.empty()) return Format("({})", fmt::join(values.words, " "));
  return values.files ? "_files" : " ";
}

std::string ZshSpec(const CLI::Option& option) {
  const std::string action = ZshAction(ValuesOf(option));
  if (option.get_positional()) {
    return Quoted(Format("{}:{}:{}", TakesSeveral(option) ? "*" : "", ZshText(option.get_name()), action));
  }
  const std::vector<std::string> names = Spellings(option);
  const std::string text = Format("[{}]{}", ZshText(option.get_description()),
                                  TakesValue(option) ? ":" + ZshText(option.get_type_name()) + ":" + action : "");
  if (names.size() == 1) return Quoted(names[0] + text);
  return Format("{}{{{}}}{}", Quoted(Format("({})", fmt::join(names, " "))), fmt::join(names, ","), Quoted(text));
}

std::string BashCompletion(const CLI::App& app) {
  std::string entries;
  Values verbs;
  for (const CLI::App* verb : Verbs(app)) {
    const std::string& name = verb->get_name();
    verbs.words.push_back(name);
    Values options;
    int place = 0;
    for (const CLI::Option* option : verb->get_options()) {
      if (option->get_positional()) {
        entries += BashEntry(name, TakesSeveral(*option) ? "all" : std::to_string(place++), ValuesOf(*option));
      }
      for (const std::string& spelling : Spellings(*option)) {
        options.words.push_back(spelling);
        if (TakesValue(*option)) entries += BashEntry(name, spelling, ValuesOf(*option));
      }
    }
    entries += BashEntry(name, "-", options);
  }
  entries += BashEntry("", "0", verbs) + BashEntry("", "-", {{"--help", "--version"}});
  return std::string(kBashBegin) + entries + std::string(kBashEnd);
}

std::string ZshCompletion(const CLI::App& app) {
  std::string verbs, cases;
  for (const CLI::App* verb : Verbs(app)) {
    verbs += "    " + Quoted(verb->get_name() + ":" + verb->get_description()) + "\n";
    std::string specs;
    for (const CLI::Option* option : verb->get_options()) {
      specs += " \\\n        " + ZshSpec(*option);
    }
    cases += Format("    {})\n      _arguments{} ;;\n", verb->get_name(), specs);
  }
  return Format(R"(#compdef heed
# zsh completion of heed; made by `heed completion zsh`.
_heed() {{
  local -a verbs
  verbs=(
{}  )
  if (( CURRENT == 2 )); then
    _describe verb verbs
    _arguments '--help[help]' '--version[version]'
    return
  fi
  local verb=$words[2]
  shift words
  (( --CURRENT ))
  case $verb in
{}  esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _heed "$@"
else
  compdef _heed heed
fi
)",
                verbs, cases);
}

void Complete(const CLI::App& app, const std::string& shell) {
  if (shell == "bash") return Print(BashCompletion(app));
  if (shell == "zsh") return Print(ZshCompletion(app));
  throw UsageError("shell is '" + shell + "', expected bash or zsh");
}

}  // namespace

void AddCompletion(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "completion", "a completion script for bash or zsh", kFooter);
  const auto shell = std::make_shared<std::string>();
  AddText(verb, "SHELL", *shell, "bash or zsh", "bash|zsh", Need::kRequired);
  OnChosen(verb, [&app, shell] { Complete(app, *shell); });
}

}  // namespace heed::cli

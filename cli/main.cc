// heed: the command line. It parses arguments, runs one verb, and turns an error into one line and an exit status: 2
// for wrong usage, option values included, 1 for a failure.
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"

#include "cli/options.h"
#include "cli/print.h"
#include "cli/verbs.h"
#include "heed/core/error.h"
#include "heed/core/os.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "Example:\n  heed run attention data/minilm_alice.safetensors --layer 2\n\n"
    "heed VERB --help explains a verb. Every verb but completion takes --json: "
    "one JSON\n"
    "document on standard output. HEED_ISA in the environment acts as --isa.";

// "list, info or run".
std::string VerbNames(const CLI::App& app) {
  const auto verbs = app.get_subcommands([](const CLI::App*) { return true; });
  std::string text;
  for (size_t i = 0; i < verbs.size(); ++i) {
    text += (i == 0 ? "" : i + 1 < verbs.size() ? ", " : " or ") + verbs[i]->get_name();
  }
  return text;
}

int Main(const std::vector<std::string>& arguments) {
  CLI::App app("Attention on CPUs: run it, check it, compare it, time it.", "heed");
  app.footer(kFooter);
  app.set_version_flag("--version", "heed " HEED_VERSION);
  app.require_subcommand(1);
  AddList(app);
  AddInfo(app);
  AddRun(app);
  AddCompare(app);
  AddAdvise(app);
  AddView(app);
  AddVerify(app);
  AddBench(app);
  AddGenerate(app);
  AddEmbed(app);
  AddCompletion(app);
  app.parse_complete_callback(&CheckEnvironment);  // before the verb runs
  try {
    std::vector<const char*> texts;
    for (const std::string& argument : arguments) texts.push_back(argument.c_str());
    app.parse(static_cast<int>(texts.size()), texts.data());  // runs the verb
    return 0;
  } catch (const CLI::CallForHelp&) {
    Print(app.help());  // help of the named verb, if there is one
    return 0;
  } catch (const CLI::CallForVersion& e) {
    Print(std::string(e.what()) + "\n");
    return 0;
  } catch (const CLI::RequiredError&) {
    const auto chosen = app.get_subcommands();
    if (!chosen.empty()) throw;
    const std::string got = arguments.size() > 1 ? "verb is '" + arguments[1] + "'" : "no verb";
    throw UsageError(got + ", expected " + VerbNames(app));
  }
}

// Prints one line per kind of failure.
int Guarded(const std::vector<std::string>& arguments) {
  try {
    return Main(arguments);
  } catch (const CLI::ParseError& e) {
    PrintError(std::string(e.what()) + " (see heed --help)");
    return 2;
  } catch (const UsageError& e) {
    PrintError(e.what());
    return 2;
  } catch (const std::bad_alloc&) {
    PrintError("out of memory");
  } catch (const InternalError& e) {
    PrintError(std::string("internal error, please report it: ") + e.what());
  } catch (const std::exception& e) {
    PrintError(e.what());
  }
  return 1;
}

}  // namespace
}  // namespace heed::cli

int main(int argc, char** argv) {
  heed::os::PrepareStandardStreams();
  return heed::cli::Guarded(heed::os::Arguments(argc, argv));
}

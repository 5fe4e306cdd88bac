// The verbs of the program. Each function adds a subcommand, which runs when it is chosen.
#ifndef CLI_VERBS_H_
#define CLI_VERBS_H_

namespace CLI {
class App;
}

namespace heed::cli {

void AddList(CLI::App& app);
void AddInfo(CLI::App& app);
void AddRun(CLI::App& app);
void AddCompare(CLI::App& app);
void AddAdvise(CLI::App& app);
void AddView(CLI::App& app);
void AddVerify(CLI::App& app);
void AddBench(CLI::App& app);
void AddGenerate(CLI::App& app);
void AddEmbed(CLI::App& app);
void AddCompletion(CLI::App& app);

}  // namespace heed::cli

#endif  // CLI_VERBS_H_

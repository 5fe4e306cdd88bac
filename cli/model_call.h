// What the verbs that run a model of a folder have in common: options, reading it, what they print.
#ifndef CLI_MODEL_CALL_H_
#define CLI_MODEL_CALL_H_

#include <string>
#include <string_view>
#include <vector>

#include "cli/format.h"
#include "cli/options.h"
#include "cli/print.h"
#include "heed/model/model.h"

namespace heed::cli {

struct ModelCall {
  std::string folder;
  bool json = false;
  MachineOptions machine;

  // FOLDER, before a verb's own options; --threads, --isa and --json, behind them.
  void RegisterFolder(CLI::App& verb);
  void RegisterRest(CLI::App& verb);

  Model Open() const;  // with progress

  // With --json one document, `own` behind what all have; else `text`.
  void Print(const Model& model, double seconds, const Json& own, const std::string& text) const;
};

// One line per row, its elements apart by `between`.
template <class Row>
std::string Lines(const std::vector<Row>& rows, std::string_view between) {
  std::string text;
  for (const Row& row : rows) text += Format("{}\n", fmt::join(row, between));
  return text;
}

}  // namespace heed::cli

#endif  // CLI_MODEL_CALL_H_

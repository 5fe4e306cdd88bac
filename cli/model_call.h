// The common part of the verbs that run a model from a folder: options, loading, output.
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

  // RegisterFolder adds FOLDER before a verb's own options; RegisterRest adds --threads, --isa and --json after them.
  void RegisterFolder(CLI::App& verb);
  void RegisterRest(CLI::App& verb);

  Model Open() const;  // shows progress

  // Prints one document with --json, with `own` after the common members; else prints `text`.
  void Print(const Model& model, double seconds, const Json& own, const std::string& text) const;
};

// One line per row, with `between` between its elements.
template <class Row>
std::string Lines(const std::vector<Row>& rows, std::string_view between) {
  std::string text;
  for (const Row& row : rows) text += Format("{}\n", fmt::join(row, between));
  return text;
}

}  // namespace heed::cli

#endif  // CLI_MODEL_CALL_H_

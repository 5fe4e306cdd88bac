// Options and output of the verbs that run a model from a folder.
#include "cli/model_call.h"

namespace heed::cli {

void ModelCall::RegisterFolder(CLI::App& verb) {
  AddText(verb, "FOLDER", folder, "a model as Transformers saves it", "", Need::kRequired);
}

void ModelCall::RegisterRest(CLI::App& verb) {
  machine.Register(verb);
  AddFlag(verb, "--json", json, "one JSON document");
}

Model ModelCall::Open() const {
  Progress("reading " + folder);
  return Model::Open(folder);
}

void ModelCall::Print(const Model& model, double seconds, const Json& own, const std::string& text) const {
  if (!json) return cli::Print(text);
  Json document = {{"folder", folder}, {"family", model.family()}, {"seconds", seconds}};
  document.update(own);
  PrintJson(document);
}

}  // namespace heed::cli

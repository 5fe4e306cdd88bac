// heed list: every mechanism of this build, and its cost.
#include <memory>
#include <string>

#include "cli/format.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/verbs.h"
#include "heed/harness/case.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "Formulas are in B sequences, Tq queries, Tk keys, Hq query and Hkv key "
    "heads,\n"
    "D key and Dv value channels; pairs counts the (query, key) pairs that are "
    "kept.\n\n"
    "Example:\n  heed list --json";

void List(bool json) {
  Json document = Json::array();
  std::string text;
  for (const OpEntry& op : AllOps()) {
    std::string passes, dtypes;
    Json dtype_names = Json::array();
    for (const std::string& pass : op.passes) passes += ", " + pass;
    for (const DType dtype : op.dtypes) {
      dtypes += std::string(dtypes.empty() ? "in " : " ") + Name(dtype);
      dtype_names.push_back(Name(dtype));
    }
    text += Format("{}: {}{} {}\n  flops  {}\n  bytes  {}\n  state  {}\n", op.name, op.family, passes, dtypes, op.flops,
                   op.bytes, op.state);
    document.push_back({{"name", op.name},
                        {"family", op.family},
                        {"passes", op.passes},
                        {"dtypes", dtype_names},
                        {"flops", op.flops},
                        {"bytes", op.bytes},
                        {"state", op.state}});
  }
  json ? PrintJson(document) : Print(text);
}

}  // namespace

void AddList(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "list", "mechanisms: family, passes, dtypes, cost formulas", kFooter);
  const auto json = std::make_shared<bool>(false);
  AddFlag(verb, "--json", *json, "one JSON document");
  OnChosen(verb, [json] { List(*json); });
}

}  // namespace heed::cli

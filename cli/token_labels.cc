// The tokens in a file of tensors.
#include "cli/token_labels.h"

#include <algorithm>
#include <string_view>

#include "cli/format.h"
#include "heed/core/error.h"
#include "heed/pages/view_layer.h"

namespace heed::cli {

Json TokenLabels(const TensorSet& tensors, std::vector<std::string>& notes) {
  const auto fact = tensors.facts.find("tokens");
  if (fact == tensors.facts.end()) {
    notes.push_back("no tokens in the file: labels are positions");
    return nullptr;
  }
  const Json list = Json::parse(fact->second, nullptr, false);
  const bool strings = list.is_array() && std::ranges::all_of(list, [](const Json& x) { return x.is_string(); });
  if (!strings) {
    const std::string_view text = fact->second;
    throw FileError(Format("{}: metadata tokens is '{}{}', expected a JSON list of strings", tensors.file,
                           text.substr(0, 40), text.size() > 40 ? "..." : ""));
  }
  if (static_cast<int64_t>(list.size()) != tensors.k.size(1)) {
    notes.push_back(Format("{} tokens for {} keys in the file: labels are positions", list.size(), tensors.k.size(1)));
    return nullptr;
  }
  return pages::Labels(list.get<std::vector<std::string>>());
}

}  // namespace heed::cli

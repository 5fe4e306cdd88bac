// The tokens in a file of tensors, as labels of a page.
#ifndef CLI_TOKEN_LABELS_H_
#define CLI_TOKEN_LABELS_H_

#include <string>
#include <vector>

#include "cli/print.h"
#include "heed/harness/tensor_file.h"

namespace heed::cli {

// Labels of a layer's keys: the metadata key `tokens`. Null if the file has no tokens or not one per key; `notes` then
// says so. Throws FileError if they are not a JSON list of strings.
Json TokenLabels(const TensorSet& tensors, std::vector<std::string>& notes);

}  // namespace heed::cli

#endif  // CLI_TOKEN_LABELS_H_

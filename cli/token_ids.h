// Parsers of token ids, on the command line or in a text file, and of numeric option values.
#ifndef CLI_TOKEN_IDS_H_
#define CLI_TOKEN_IDS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cli/print.h"
#include "heed/core/tensor.h"

namespace heed::cli {

using Sequences = std::vector<std::vector<int64_t>>;

// "1,2,3;4,5": sequences of ids, which must not be empty unless `empty_allowed`. Throws UsageError.
Sequences ParseIds(const std::string& option, const std::string& text, bool empty_allowed);

// Reads a text file of one sequence per line, ids separated by commas or blanks. Throws FileError.
Sequences ReadIds(const std::string& path);

// Sequences of any lengths as one batch [B, T] with zeros after their ends, and their lengths [B].
struct Padded {
  explicit Padded(const Sequences& sequences);

  std::vector<int64_t> memory, counts;
  ConstTensorView ids, lengths;
};

// Parse the value of an option; `fallback` if it is absent. Throw UsageError.
int64_t ParseInteger(const std::string& option, const std::string& text, int64_t least, int64_t most, int64_t fallback);
double ParseReal(const std::string& option, const std::string& text, double least, double most, double fallback);

// Checks before any computation that OUT can be written as one tensor. Throws UsageError.
void CheckOut(const std::string& option, const std::string& out);

// Writes one tensor as .npy, or under `name` as .safetensors. Returns its {shape, dtype, path, sha256}.
Json WriteOut(const std::string& out, const std::string& name, const ConstTensorView& x);

}  // namespace heed::cli

#endif  // CLI_TOKEN_IDS_H_

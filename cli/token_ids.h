// Token ids as they are typed or stand in a text file, and numbers of options.
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

// "1,2,3;4,5": sequences of ids, none empty unless that is allowed. Throws UsageError.
Sequences ParseIds(const std::string& option, const std::string& text, bool empty_allowed);

// A text file of one sequence per line, ids apart by commas or blanks. Throws FileError.
Sequences ReadIds(const std::string& path);

// Sequences of any lengths as one batch [B, T], zeros behind them, and [B] of lengths.
struct Padded {
  explicit Padded(const Sequences& sequences);

  std::vector<int64_t> memory, counts;
  ConstTensorView ids, lengths;
};

// The value of an option; `fallback` where nothing is typed. Throws UsageError.
int64_t ParseInteger(const std::string& option, const std::string& text, int64_t least, int64_t most, int64_t fallback);
double ParseReal(const std::string& option, const std::string& text, double least, double most, double fallback);

// Before anything is computed: whether OUT can be written as one tensor. Throws UsageError.
void CheckOut(const std::string& option, const std::string& out);

// One tensor as .npy, or under `name` as .safetensors; {shape, dtype, path, sha256} of it.
Json WriteOut(const std::string& out, const std::string& name, const ConstTensorView& x);

}  // namespace heed::cli

#endif  // CLI_TOKEN_IDS_H_

// Token ids: numbers separated by commas, lines of a file.
#include "cli/token_ids.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "cli/format.h"
#include "cli/options.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/io/npy.h"
#include "heed/io/safetensors.h"
#include "heed/pages/sha256.h"

namespace heed::cli {
namespace {

template <class T>
bool Parse(std::string_view text, T& value) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && stop == text.data() + text.size();
}

std::vector<std::string_view> Split(std::string_view text, std::string_view at) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0;;) {
    const size_t end = text.find_first_of(at, begin);
    parts.push_back(text.substr(begin, end == std::string_view::npos ? end : end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

}  // namespace

Sequences ParseIds(const std::string& option, const std::string& text, bool empty_allowed) {
  Sequences sequences;
  for (const std::string_view sequence : Split(text, ";")) {
    std::vector<int64_t>& ids = sequences.emplace_back();
    if (sequence.empty() && empty_allowed) continue;
    for (const std::string_view part : Split(sequence, ",")) {
      if (!Parse(part, ids.emplace_back()) || ids.back() < 0)
        BadOption(option, text, "token ids such as 1,2,3, with ';' between sequences");
    }
  }
  return sequences;
}

Sequences ReadIds(const std::string& path) {
  const os::MappedFile file(path);
  std::string_view text(reinterpret_cast<const char*>(file.data()), file.num_bytes());
  if (text.ends_with('\n')) text.remove_suffix(1);
  Sequences sequences;
  for (const std::string_view line : Split(text, "\n")) {
    std::vector<int64_t>& ids = sequences.emplace_back();
    for (const std::string_view part : Split(line, ", \t\r")) {
      if (part.empty()) continue;
      if (!Parse(part, ids.emplace_back()) || ids.back() < 0) {
        throw FileError(path + ": line " + std::to_string(sequences.size()) +
                        " has no token ids, expected numbers apart by commas or blanks");
      }
    }
    if (ids.empty())
      throw FileError(path + ": line " + std::to_string(sequences.size()) + " is empty, expected token ids");
  }
  return sequences;
}

Padded::Padded(const Sequences& sequences) {
  int64_t longest = 0;
  for (const auto& sequence : sequences) longest = std::max<int64_t>(longest, std::ssize(sequence));
  const int64_t B = std::ssize(sequences);
  memory.assign(static_cast<size_t>(B * longest), 0);
  for (int64_t b = 0; b < B; ++b) {
    const auto& sequence = sequences[static_cast<size_t>(b)];
    std::ranges::copy(sequence, memory.begin() + b * longest);
    counts.push_back(std::ssize(sequence));
  }
  ids = ConstTensorView(memory.data(), DType::kI64, {B, longest});
  lengths = ConstTensorView(counts.data(), DType::kI64, {B});
}

int64_t ParseInteger(const std::string& option, const std::string& text, int64_t least, int64_t most,
                     int64_t fallback) {
  if (text.empty()) return fallback;
  int64_t value = 0;
  if (!Parse(text, value) || value < least || value > most)
    BadOption(option, text, std::to_string(least) + " to " + std::to_string(most));
  return value;
}

double ParseReal(const std::string& option, const std::string& text, double least, double most, double fallback) {
  if (text.empty()) return fallback;
  double value = 0;
  if (!Parse(text, value) || !(value >= least && value <= most))
    BadOption(option, text, Format("{} to {}", least, most));
  return value;
}

void CheckOut(const std::string& option, const std::string& out) {
  if (!out.empty() && !out.ends_with(".safetensors") && !out.ends_with(".npy")) {
    BadOption(option, out, "a name that ends in .safetensors or .npy");
  }
}

Json WriteOut(const std::string& out, const std::string& name, const ConstTensorView& x) {
  if (out.ends_with(".npy")) {
    WriteNpy(out, x);
  } else {
    WriteSafetensors(out, std::vector<NamedTensor>{{name, x}});
  }
  Json shape = Json::array();
  for (const int64_t size : x.sizes()) shape.push_back(size);
  return {{"shape", shape},
          {"dtype", Name(x.dtype())},
          {"path", out},
          {"sha256", pages::Sha256({x.as<uint8_t>(), static_cast<size_t>(x.num_elements()) * SizeOf(x.dtype())})}};
}

}  // namespace heed::cli

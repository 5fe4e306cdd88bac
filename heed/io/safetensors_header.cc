// The JSON header of a safetensors file. The parser calls back per token and does not recurse; any unexpected token
// ends it.
#include "heed/io/safetensors_header_internal.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "heed/core/error.h"
#include "heed/io/bytes_internal.h"

namespace heed {
namespace {

using nlohmann::json;
using Entry = SafetensorsFile::Entry;

constexpr char kMetadata[] = "__metadata__";
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

struct FormatDType {
  std::string_view name;
  int64_t bits;
};

constexpr FormatDType kDTypes[] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
};

// Checks the tokens of a header against the only structure that is valid.
class HeaderReader : public json::json_sax_t {
 public:
  HeaderReader(const std::string& path, SafetensorsHeader& header) : path_(path), header_(header) {}

  bool null() override { return Scalar("null"); }
  bool boolean(bool value) override { return Scalar(value ? "true" : "false"); }
  bool number_integer(int64_t value) override { return Scalar(std::to_string(value)); }
  bool number_float(double, const std::string& text) override { return Scalar(Quote(text)); }
  bool binary(json::binary_t&) override { return Scalar("binary"); }

  bool number_unsigned(uint64_t value) override {
    if ((where_ != kShape && where_ != kOffsets) || value > static_cast<uint64_t>(kMaxInt64)) {
      return Scalar(std::to_string(value));
    }
    std::vector<int64_t>& list = where_ == kShape ? entry_.sizes : offsets_;
    const size_t limit = where_ == kShape ? kMaxSafetensorsRank : 2;
    if (list.size() == limit) {
      Fail(Tensor() + " has " + field_ + " of more than " + std::to_string(limit) + " numbers, expected at most that");
    }
    list.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(std::string& value) override {
    if (where_ == kMetadataMap) {
      header_.metadata.emplace(key_, value);
      return true;
    }
    if (where_ != kTensor || field_ != "dtype") return Scalar(Quote(value));
    entry_.dtype = value;
    return true;
  }

  bool start_object(size_t) override {
    if (where_ == kStart) {
      where_ = kTop;
    } else if (where_ == kTop && key_ == kMetadata) {
      where_ = kMetadataMap;
    } else if (where_ == kTop) {
      where_ = kTensor;
      entry_ = {};
      entry_.name = key_;
      offsets_.clear();
      has_dtype_ = has_shape_ = has_offsets_ = false;
    } else {
      return Scalar("an object");
    }
    return true;
  }

  bool key(std::string& key) override {
    if (where_ == kTensor) return Field(key);
    CheckName(key);
    if (where_ == kMetadataMap && header_.metadata.contains(key)) {
      Fail("metadata has the key " + Quote(key) + " twice, expected once");
    }
    if (where_ == kTop && key == kMetadata && std::exchange(has_metadata_, true)) {
      Fail("header has __metadata__ twice, expected once");
    }
    key_ = std::move(key);
    return true;
  }

  bool end_object() override {
    if (where_ == kTensor) FinishTensor();
    where_ = where_ == kTop ? kEnd : kTop;
    return true;
  }

  bool start_array(size_t) override {
    if (where_ != kTensor || field_ == "dtype") return Scalar("an array");
    where_ = field_ == "shape" ? kShape : kOffsets;
    return true;
  }

  bool end_array() override {
    where_ = kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const json::exception&) override {
    Fail("header is not JSON at its byte " + std::to_string(position) + ", expected one object in UTF-8");
  }

 private:
  enum Where { kStart, kTop, kMetadataMap, kTensor, kShape, kOffsets, kEnd };

  [[noreturn]] void Fail(const std::string& what) const { throw FileError(path_ + ": " + what); }

  std::string Tensor() const { return "tensor " + Quote(entry_.name); }

  // Handles a scalar at a place where another kind of value is expected.
  bool Scalar(const std::string& value) const {
    switch (where_) {
      case kMetadataMap: Fail("metadata " + Quote(key_) + " is " + value + ", expected a string");
      case kTensor:
        Fail(Tensor() + " has " + field_ + " " + value + ", expected " +
             (field_ == "dtype" ? "a string" : "an array of integers"));
      case kShape:
      case kOffsets: Fail(Tensor() + " has " + value + " in its " + field_ + ", expected integers from 0 to 2^63 - 1");
      case kTop:
        if (key_ == kMetadata) {
          Fail("__metadata__ is " + value + ", expected an object");
        }
        Fail("tensor " + Quote(key_) + " is " + value + ", expected an object with dtype, shape and data_offsets");
      default: Fail("header is " + value + ", expected an object");
    }
  }

  void CheckName(const std::string& name) const {
    if (name.size() > kMaxSafetensorsNameBytes) {
      Fail("header has a name of " + std::to_string(name.size()) + " bytes, expected at most " +
           std::to_string(kMaxSafetensorsNameBytes));
    }
    if (name.find('\0') != std::string::npos) {
      Fail("header has the name " + Quote(name) + ", expected no NUL in it");
    }
  }

  bool Field(const std::string& field) {
    bool* const seen = field == "dtype"          ? &has_dtype_
                       : field == "shape"        ? &has_shape_
                       : field == "data_offsets" ? &has_offsets_
                                                 : nullptr;
    if (seen == nullptr || *seen) {
      Fail(Tensor() + " has the field " + Quote(field) + (seen == nullptr ? "" : " twice") +
           ", expected dtype, shape and data_offsets");
    }
    *seen = true;
    field_ = field;
    return true;
  }

  void FinishTensor() {
    if (!has_dtype_ || !has_shape_ || !has_offsets_) {
      Fail(Tensor() + " has no " +
           (!has_dtype_   ? "dtype"
            : !has_shape_ ? "shape"
                          : "data_offsets") +
           ", expected dtype, shape and data_offsets");
    }
    if (offsets_.size() != 2 || offsets_[0] > offsets_[1]) {
      Fail(Tensor() + " has data_offsets " + ShapeString(offsets_) + ", expected [begin,end]");
    }
    entry_.begin_bytes = offsets_[0];
    entry_.num_bytes = offsets_[1] - offsets_[0];
    CheckSize();
    header_.entries.push_back(std::move(entry_));
  }

  void CheckSize() const {
    const auto dtype =
        std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& d) { return d.name == entry_.dtype; });
    if (dtype == std::end(kDTypes)) {
      Fail(Tensor() + " has dtype " + Quote(entry_.dtype) + ", expected one of the format, such as F32 or BF16");
    }
    // Zeros count as ones, so that strides cannot overflow either.
    int64_t bits = dtype->bits;
    bool fits = true, empty = false;
    for (const int64_t size : entry_.sizes) {
      empty = empty || size == 0;
      fits = fits && !__builtin_mul_overflow(bits, std::max<int64_t>(size, 1), &bits);
    }
    if (!fits) {
      Fail(Tensor() + " has shape " + ShapeString(entry_.sizes) + ", expected fewer than 2^63 bits");
    }
    if (empty) bits = 0;
    if (bits % 8 != 0 || bits / 8 != entry_.num_bytes) {
      Fail(Tensor() + " has " + std::to_string(entry_.num_bytes) + " bytes, expected " + std::to_string(bits / 8) +
           (bits % 8 == 0 ? "" : " and a fraction") + " for " + entry_.dtype + " " + ShapeString(entry_.sizes));
    }
  }

  const std::string& path_;
  SafetensorsHeader& header_;
  Where where_ = kStart;
  std::string key_;    // at the top level or in the metadata
  std::string field_;  // in a tensor
  Entry entry_;
  std::vector<int64_t> offsets_;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  bool has_metadata_ = false;
};

void CheckUniqueNames(const std::string& path, const std::vector<Entry>& entries) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const Entry& entry : entries) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    throw FileError(path + ": tensor " + Quote(*twice) + " is there twice, expected once");
  }
}

// Checks that the entries, sorted by offset, follow each other without a gap or an overlap.
void CheckTiling(const std::string& path, const std::vector<Entry>& entries, uint64_t data_bytes) {
  std::vector<size_t> order(entries.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(entries[a].begin_bytes, entries[a].num_bytes) <
           std::pair(entries[b].begin_bytes, entries[b].num_bytes);
  });
  int64_t end = 0;
  for (const size_t i : order) {
    const Entry& entry = entries[i];
    if (entry.begin_bytes != end) {
      throw FileError(path + ": tensor " + Quote(entry.name) + " begins at byte " + std::to_string(entry.begin_bytes) +
                      " of the data, expected " + std::to_string(end) + ", where the tensor before it ends");
    }
    end += entry.num_bytes;
  }
  if (static_cast<uint64_t>(end) != data_bytes) {
    throw FileError(
        path + ": has " + std::to_string(data_bytes) + " bytes of data, expected " + std::to_string(end) +
        (static_cast<uint64_t>(end) > data_bytes ? ": the file is cut short" : ", the end of the last tensor"));
  }
}

std::string JsonText(const std::string& text, const char* what) {
  try {
    return json(text).dump();
  } catch (const json::exception&) {
    throw InvalidArgument(std::string("WriteSafetensors: ") + what + " " + Quote(text) +
                          " is not UTF-8, expected UTF-8");
  }
}

std::string JsonName(const std::string& name, const char* what) {
  if (name.size() > kMaxSafetensorsNameBytes) {
    throw InvalidArgument(std::string("WriteSafetensors: ") + what + " " + Quote(name) + " has " +
                          std::to_string(name.size()) + " bytes, expected at most " +
                          std::to_string(kMaxSafetensorsNameBytes));
  }
  if (name.find('\0') != std::string::npos) {
    throw InvalidArgument(std::string("WriteSafetensors: ") + what + " " + Quote(name) + " has a NUL, expected none");
  }
  return JsonText(name, what);
}

}  // namespace

SafetensorsHeader ParseSafetensorsHeader(const std::string& path, std::span<const uint8_t> file) {
  const auto fail = [&](const std::string& what) { throw FileError(path + ": " + what); };
  uint64_t length = 0;
  if (file.size() < sizeof(length) + 2) {
    fail("has " + std::to_string(file.size()) + " bytes, expected at least 10 for a safetensors header");
  }
  std::memcpy(&length, file.data(), sizeof(length));
  const uint64_t rest = file.size() - sizeof(length);
  const uint64_t limit = std::min(rest, kMaxSafetensorsHeaderBytes);
  const char* const begin = reinterpret_cast<const char*>(file.data());
  const char* const text = begin + sizeof(length);
  const bool fits = length >= 2 && length <= limit;
  if (!fits && *text != '{') {  // the bytes are neither a length nor a header
    fail(std::string(std::string_view(begin, 10).starts_with("\x93NUMPY") ? "is an npy file"
                                                                          : "not a safetensors or npy file") +
         ", expected a safetensors file");
  }
  if (!fits) {
    fail("safetensors header has " + std::to_string(length) + " bytes, expected 2 to " + std::to_string(limit) +
         (limit == rest ? ", the rest of the file" : ""));
  }
  if (*text != '{') {
    fail("safetensors header begins with " + Quote({text, 1}) + ", expected '{'");
  }
  // The parser would stop at a NUL, whatever follows it.
  if (const void* nul = std::memchr(text, 0, length)) {
    fail("header has a NUL at its byte " + std::to_string(static_cast<const char*>(nul) - text + 1) +
         ", expected text");
  }
  SafetensorsHeader header;
  header.data_begin = sizeof(length) + length;
  HeaderReader reader(path, header);
  if (!json::sax_parse(text, text + length, &reader)) {
    fail("header is not JSON, expected one object in UTF-8");
  }
  CheckUniqueNames(path, header.entries);
  CheckTiling(path, header.entries, file.size() - header.data_begin);
  return header;
}

std::string MakeSafetensorsHeader(std::span<const Entry> entries, const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  const auto separate = [&] {
    if (text.back() != '{') text += ',';
  };
  if (!metadata.empty()) {
    text += std::string("\"") + kMetadata + "\":{";
    for (const auto& [key, value] : metadata) {
      separate();
      text += JsonName(key, "metadata key") + ":" + JsonText(value, "metadata value");
    }
    text += '}';
  }
  for (const Entry& entry : entries) {
    if (entry.name == kMetadata) {
      throw InvalidArgument(
          "WriteSafetensors: tensor is named '__metadata__', expected a name "
          "that the format has not reserved");
    }
    separate();
    text += JsonName(entry.name, "tensor name") + ":{\"dtype\":\"" + entry.dtype +
            "\",\"shape\":" + ShapeString(entry.sizes) + ",\"data_offsets\":" +
            ShapeString(std::vector<int64_t>{entry.begin_bytes, entry.begin_bytes + entry.num_bytes}) + "}";
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t length = text.size();
  if (length > kMaxSafetensorsHeaderBytes) {
    throw InvalidArgument("WriteSafetensors: header has " + std::to_string(length) + " bytes, expected at most " +
                          std::to_string(kMaxSafetensorsHeaderBytes));
  }
  std::string prefix(sizeof(length), '\0');
  std::memcpy(prefix.data(), &length, sizeof(length));
  return prefix + text;
}

}  // namespace heed

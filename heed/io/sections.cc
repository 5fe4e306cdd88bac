// Sections of safetensors files: prefixes of names for SafetensorsFile and WriteSafetensors.
#include "heed/io/sections_internal.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "heed/core/error.h"
#include "heed/io/bytes_internal.h"

namespace heed {

struct SectionWriter::Draft {
  std::vector<NamedTensor> tensors;
  std::map<std::string, std::string> metadata;
  std::vector<AlignedBytes> memory;
};

SectionWriter::SectionWriter() : draft_(std::make_shared<Draft>()) {}

SectionWriter SectionWriter::At(std::string_view prefix) const {
  SectionWriter section = *this;
  section.prefix_ += prefix;
  return section;
}

void SectionWriter::Set(const std::string& key, const std::string& value) const {
  draft_->metadata[prefix_ + key] = value;
}

void SectionWriter::Add(const std::string& name, const ConstTensorView& tensor) const {
  draft_->tensors.push_back({prefix_ + name, tensor});
}

void SectionWriter::Add(const std::string& name, std::span<const int64_t> list) const {
  Add(name, ConstTensorView(list.data(), DType::kI64, {std::ssize(list)}));
}

std::byte* SectionWriter::Make(const std::string& name, DType dtype, std::span<const int64_t> sizes) const {
  const size_t num_bytes = static_cast<size_t>(ConstTensorView(nullptr, dtype, sizes).num_elements()) * SizeOf(dtype);
  AlignedBytes memory(os::AllocateAligned(num_bytes));
  std::memset(memory.get(), 0, num_bytes);
  Add(name, ConstTensorView(memory.get(), dtype, sizes));
  draft_->memory.push_back(std::move(memory));
  return static_cast<std::byte*>(draft_->memory.back().get());
}

void SectionWriter::Write(const std::string& path) const { WriteSafetensors(path, draft_->tensors, draft_->metadata); }

SectionReader::SectionReader(const std::string& path)
    : path_(path), file_(std::make_shared<const SafetensorsFile>(path)), metadata_(file_->metadata()) {}

SectionReader SectionReader::At(std::string_view prefix) const {
  SectionReader section = *this;
  section.prefix_ += prefix;
  section.metadata_.clear();
  const std::string begin(prefix);
  for (auto it = metadata_.lower_bound(begin); it != metadata_.end() && it->first.starts_with(begin); ++it) {
    section.metadata_[it->first.substr(begin.size())] = it->second;
  }
  return section;
}

void SectionReader::Fail(const std::string& what) const { throw FileError(path_ + ": " + what); }

const std::string& SectionReader::Text(const std::string& key, const char* expected) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) Fail("metadata has no '" + prefix_ + key + "', expected " + expected);
  return found->second;
}

int64_t SectionReader::Number(const std::string& key) const {
  const std::string& text = Text(key, "a number");
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) Fail(Key(key) + " is " + Quote(text) + ", expected a number");
  return value;
}

void SectionReader::Expect(const std::string& key, const std::string& expected, const char* why) const {
  const std::string& text = Text(key, expected.c_str());
  if (text != expected) Fail(Key(key) + " is " + Quote(text) + ", expected " + expected + why);
}

ConstTensorView SectionReader::Tensor(const std::string& name, DType dtype, std::span<const int64_t> sizes) const {
  const ConstTensorView tensor = file_->tensor(prefix_ + name);
  if (tensor.dtype() != dtype) {
    Fail(Name(name) + " has dtype " + heed::Name(tensor.dtype()) + ", expected " + heed::Name(dtype));
  }
  if (!std::ranges::equal(tensor.sizes(), sizes)) {
    Fail(Name(name) + " has shape " + tensor.ShapeString() + ", expected " + ShapeString(sizes));
  }
  return tensor;
}

std::vector<int64_t> SectionReader::Integers(const std::string& name, int64_t count) const {
  const ConstTensorView list = Tensor(name, DType::kI64, std::vector{count});
  return {list.as<int64_t>(), list.as<int64_t>() + count};
}

int64_t SectionReader::DefaultMaxBytes() const {
  constexpr int64_t kLeast = int64_t{1} << 36;
  int64_t sum = 0;  // below 2^63, because the file contains them
  for (const auto& entry : file_->entries()) sum += entry.num_bytes;
  return std::max(kLeast, sum < (int64_t{1} << 59) ? 8 * sum : sum);
}

}  // namespace heed

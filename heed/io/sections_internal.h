// Sections of a safetensors file: tensors and metadata whose names share a prefix. Several owners write their sections
// into one file, and each reads its own.
#ifndef HEED_IO_SECTIONS_INTERNAL_H_
#define HEED_IO_SECTIONS_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/io/safetensors.h"

namespace heed {

// The content of a file to be written. Copies and sections of a writer share one content.
class SectionWriter {
 public:
  SectionWriter();

  SectionWriter At(std::string_view prefix) const;

  void Set(const std::string& key, const std::string& value) const;  // metadata
  void Set(const std::string& key, int64_t value) const { Set(key, std::to_string(value)); }

  // The elements must live until Write().
  void Add(const std::string& name, const ConstTensorView& tensor) const;
  void Add(const std::string& name, std::span<const int64_t> list) const;

  // Adds zeros that the writer owns; the caller fills them.
  std::byte* Make(const std::string& name, DType dtype, std::span<const int64_t> sizes) const;

  // Writes the whole file. Throws as WriteSafetensors() does.
  void Write(const std::string& path) const;

 private:
  struct Draft;
  std::shared_ptr<Draft> draft_;
  std::string prefix_;
};

// A file from an untrusted source: tensors must have the requested dtype and shape, else FileError "PATH: got,
// expected" is thrown. Copies and sections read the same file, and views live as long as one of them.
class SectionReader {
 public:
  explicit SectionReader(const std::string& path);

  SectionReader At(std::string_view prefix) const;

  [[noreturn]] void Fail(const std::string& what) const;

  // The metadata of this section, without its prefix.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& Text(const std::string& key, const char* expected) const;
  int64_t Number(const std::string& key) const;

  // Throws unless metadata `key` is `expected`; `why` may follow in the message.
  void Expect(const std::string& key, const std::string& expected, const char* why = "") const;

  ConstTensorView Tensor(const std::string& name, DType dtype, std::span<const int64_t> sizes) const;
  std::vector<int64_t> Integers(const std::string& name, int64_t count) const;

  // The names of metadata and tensors in messages.
  std::string Key(const std::string& key) const { return "metadata '" + prefix_ + key + "'"; }
  std::string Name(const std::string& name) const { return "tensor '" + prefix_ + name + "'"; }

  // The default limit of loaders: 64 GiB, or 8 times the tensors of the whole file if that is more.
  int64_t DefaultMaxBytes() const;

 private:
  std::string path_, prefix_;
  std::shared_ptr<const SafetensorsFile> file_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace heed

#endif  // HEED_IO_SECTIONS_INTERNAL_H_

// A file that appears under its name when it is complete, or not at all.
#ifndef HEED_IO_ATOMIC_FILE_INTERNAL_H_
#define HEED_IO_ATOMIC_FILE_INTERNAL_H_

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

#include "heed/core/tensor.h"

namespace heed {

// Writes a temporary file beside `path`, or beside the target if `path` is a symbolic link, and removes it unless
// Commit succeeded. All functions throw FileError.
class AtomicFile {
 public:
  // Refuses to replace anything but a regular file.
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void Write(std::string_view bytes);

  // Writes all elements in row-major order, bools as 0 and 1.
  void WriteRowMajor(const ConstTensorView& tensor);

  void Commit();

 private:
  [[noreturn]] void Fail() const;
  void WriteBools(std::string_view bytes);

  std::string path_, target_, temporary_;
  std::FILE* file_ = nullptr;
  bool committed_ = false;
};

}  // namespace heed

#endif  // HEED_IO_ATOMIC_FILE_INTERNAL_H_

// safetensors files: named tensors behind a JSON header, memory-mapped.
//
//   u64 N, N bytes of JSON, data. The JSON maps each name to its dtype, shape
//   and [begin, end) in the data, and "__metadata__" to a map of strings.
//
// Source: https://github.com/huggingface/safetensors (format description and
// reference implementation).
#ifndef HEED_IO_SAFETENSORS_H_
#define HEED_IO_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/export.h"
#include "heed/core/tensor.h"

namespace heed {

// A file open for reading. Everything that the header says is checked when the file is opened: a hostile file gives one
// FileError "PATH: got, expected" and never a crash. Memory is proportional to the header's length only.
//
// Several threads may call const members at once. If the file is truncated while it is mapped, reading its data faults,
// as with any memory map.
class HEED_API SafetensorsFile {
 public:
  // One tensor as the header describes it.
  struct Entry {
    std::string name;
    std::string dtype;           // the format's name: "F32", "BF16", "F8_E4M3"
    std::vector<int64_t> sizes;  // rank 0 to 64
    int64_t begin_bytes = 0;     // offset in the data
    int64_t num_bytes = 0;
  };

  explicit SafetensorsFile(const std::string& path);

  // Reads bytes in memory as a file: they are not copied and must outlive the object. `path` is used in messages only.
  SafetensorsFile(const std::string& path, std::span<const uint8_t> bytes);

  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  // The entries in the order of the header.
  const std::vector<Entry>& entries() const;
  std::vector<std::string> names() const;
  bool Contains(std::string_view name) const;

  // A row-major view into the map, or into an aligned copy if the file misaligns the data, valid while this object (or
  // one that it was moved into) lives. Throws FileError if there is no such tensor, if heed has no DType for it, if its
  // rank is above kMaxRank, or if a BOOL is neither 0 nor 1.
  ConstTensorView tensor(std::string_view name) const;

  // "__metadata__"; empty if none exists.
  const std::map<std::string, std::string>& metadata() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct NamedTensor {
  std::string name;
  ConstTensorView tensor;
};

// Writes the bytes of the reference implementation: by descending dtype, then by name, data at a multiple of 8. Views
// of any strides are written row-major. The file appears under `path` when it is complete, or not at all; the views may
// point into the file that it replaces. Other threads must not write into them.
//
// Throws InvalidArgument for an absent tensor, one that is not in CPU memory, a duplicate name, "__metadata__" as a
// name, and a name or metadata key with a NUL, of more than 4096 bytes or not in UTF-8 (values may contain NUL and be
// long); throws FileError if writing fails.
HEED_API void WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors,
                               const std::map<std::string, std::string>& metadata = {});

}  // namespace heed

#endif  // HEED_IO_SAFETENSORS_H_

// NPY files: NumPy's format for one array, memory-mapped.
//
//   "\x93NUMPY", version, header length, a Python dict literal with exactly
//   descr, fortran_order and shape, data.
//
// Source: NumPy Enhancement Proposal 1 and numpy/lib/format.py.
#ifndef HEED_IO_NPY_H_
#define HEED_IO_NPY_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "heed/core/export.h"
#include "heed/core/tensor.h"

namespace heed {

// A file open for reading, versions 1.0, 2.0 and 3.0, little-endian. Dtypes: <f8 <f4 <f2 <i8 <i4 |b1. Everything is
// checked when the file is opened: a hostile file gives one FileError "PATH: got, expected", never a crash.
//
// Several threads may call const members at once. If the file is truncated while it is mapped, reading its data faults,
// as with any memory map.
class HEED_API NpyFile {
 public:
  explicit NpyFile(const std::string& path);

  // Reads bytes in memory as a file: they are not copied and must outlive the object. `path` is used in messages only.
  NpyFile(const std::string& path, std::span<const uint8_t> bytes);

  ~NpyFile();
  NpyFile(NpyFile&&) noexcept;
  NpyFile& operator=(NpyFile&&) noexcept;

  // A view into the map, or into an aligned copy if the file misaligns the data, valid while this object (or one that
  // it was moved into) lives. In Fortran order the first axis has stride 1, else the last.
  ConstTensorView tensor() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Writes version 1.0, with the bytes of numpy.save, row-major whatever the view's strides. The file appears under
// `path` when it is complete, or not at all; the view may point into the file that it replaces. Other threads must not
// write into the view.
//
// Throws InvalidArgument for bf16, for which NPY has no name (use safetensors), for an absent tensor, and for one that
// is not in CPU memory; throws FileError if writing fails.
HEED_API void WriteNpy(const std::string& path, const ConstTensorView& tensor);

}  // namespace heed

#endif  // HEED_IO_NPY_H_

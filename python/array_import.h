// Reads the description of an array from an object, by the buffer protocol or by DLPack.
#ifndef HEED_PYTHON_ARRAY_IMPORT_H_
#define HEED_PYTHON_ARRAY_IMPORT_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>

#include "heed/core/dtype.h"
#include "heed/core/tensor.h"
#include "python/arguments.h"
#include "python/buffer.h"
#include "python/dlpack.h"

namespace heed::python {

inline constexpr char kArrayExpected[] = "an array on the CPU with DLPack or the buffer protocol";

// An exporter's description of an array: sizes, strides in bytes, and an element type that heed has, or its name.
struct ArrayLayout {
  void* data = nullptr;
  int rank = 0;
  int64_t sizes[kMaxRank];
  int64_t byte_strides[kMaxRank];
  DType dtype = DType::kF32;
  Device device;
  std::string unknown_dtype;
  std::string refusal;  // the exporter's reason for a refusal
};

// Owns the memory of one array; releases it with the GIL held.
struct ArrayHolder {
  ArrayHolder() = default;
  ArrayHolder(const ArrayHolder&) = delete;
  ArrayHolder& operator=(const ArrayHolder&) = delete;
  ~ArrayHolder();

  Buffer buffer;
  DLManagedTensor* tensor = nullptr;
  DLManagedTensorVersioned* versioned = nullptr;
  std::unique_ptr<char[]> copy;
};

// Return false if `value` does not support the protocol or refuses; in the latter case `layout.refusal` has the reason.
// Both throw InvalidArgument for an array that heed cannot use.
bool ImportBuffer(const Argument& argument, nb::handle value, bool writable, ArrayHolder& holder, ArrayLayout& layout);
bool ImportDlpack(const Argument& argument, bool writable, ArrayHolder& holder, ArrayLayout& layout);

// Fills `layout` from DLPack's description of an array, which may be on a CUDA device if `devices`.
void ReadDlTensor(const Argument& argument, const DLTensor& tensor, bool devices, ArrayLayout& layout);

[[noreturn]] void FailRank(const Argument& argument, int64_t rank);

}  // namespace heed::python

#endif  // HEED_PYTHON_ARRAY_IMPORT_H_

// Reads the description of an array from an object: formats, capsules, devices.
#include "python/array_import.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "python/gil.h"

namespace heed::python {
namespace {

static_assert(std::endian::native == std::endian::little, "formats are read as little-endian");

// The element type of a buffer: `format` in the notation of Python's struct module.
void ParseFormat(const char* format, int64_t item_bytes, DType& dtype, std::string& unknown) {
  if (format == nullptr) format = "B";
  const char* code = format;
  const bool swapped = *code == '>' || *code == '!';
  if (*code != '\0' && std::strchr("@=<>!", *code) != nullptr) ++code;
  const auto is = [&](const char* codes, int64_t bytes) {
    return std::strchr(codes, *code) != nullptr && item_bytes == bytes;
  };
  if (*code == 'Z') {
    unknown = "c" + std::to_string(8 * item_bytes);
  } else if (*code == '\0' || code[1] != '\0') {
    unknown = std::string("'") + format + "'";
  } else if (is("f", 4)) {
    dtype = DType::kF32;
  } else if (is("d", 8)) {
    dtype = DType::kF64;
  } else if (is("e", 2)) {
    dtype = DType::kF16;
  } else if (is("ilq", 4)) {
    dtype = DType::kI32;
  } else if (is("ilq", 8)) {
    dtype = DType::kI64;
  } else if (is("?", 1)) {
    dtype = DType::kBool;
  } else if (std::strchr("bhilq", *code) != nullptr) {
    unknown = "i" + std::to_string(8 * item_bytes);
  } else if (std::strchr("BHILQ", *code) != nullptr) {
    unknown = "u" + std::to_string(8 * item_bytes);
  } else if (std::strchr("efdg", *code) != nullptr) {
    unknown = "f" + std::to_string(8 * item_bytes);
  } else {
    unknown = std::string("'") + format + "'";
  }
  if (swapped && item_bytes > 1) unknown = std::string("big-endian '") + format + "'";
}

// Converts a DLPack type to a dtype.
void ParseDlType(DLDataType type, DType& dtype, std::string& unknown) {
  const auto is = [&](uint8_t code, uint8_t bits) { return type.code == code && type.bits == bits && type.lanes == 1; };
  if (is(kDLFloat, 32)) {
    dtype = DType::kF32;
  } else if (is(kDLFloat, 64)) {
    dtype = DType::kF64;
  } else if (is(kDLFloat, 16)) {
    dtype = DType::kF16;
  } else if (is(kDLBfloat, 16)) {
    dtype = DType::kBF16;
  } else if (is(kDLInt, 32)) {
    dtype = DType::kI32;
  } else if (is(kDLInt, 64)) {
    dtype = DType::kI64;
  } else if (is(kDLBool, 8)) {
    dtype = DType::kBool;
  } else {
    const char* family = "DLPack type ";
    if (type.code == kDLInt) family = "i";
    if (type.code == kDLUInt) family = "u";
    if (type.code == kDLFloat) family = "f";
    if (type.code == kDLComplex) family = "c";
    if (*family == 'D')
      unknown = family + std::to_string(type.code) + " of bits ";
    else
      unknown = family;
    unknown += std::to_string(type.bits);
    if (type.lanes != 1) unknown += "x" + std::to_string(type.lanes);
  }
}

bool IsOnCpu(int64_t type) { return type == kDLCPU || type == kDLCUDAHost || type == kDLROCMHost; }

[[noreturn]] void FailDevice(const Argument& argument, int64_t type) {
  Fail(argument.operation, argument.name,
       "is on DLPack device type " + std::to_string(type) + (type == kDLCUDA ? " (CUDA)" : ""), "an array on the CPU");
}

// Strides of a row-major array of `sizes`, which exporters may leave out.
void FillRowMajor(ArrayLayout& layout, int64_t item_bytes) {
  int64_t stride = item_bytes;
  for (int i = layout.rank; i-- > 0;) {
    layout.byte_strides[i] = stride;
    // On overflow the stride is 0; the view refuses such sizes.
    if (__builtin_mul_overflow(stride, layout.sizes[i], &stride)) stride = 0;
  }
}

// True for PyTorch's zero tensors, which occupy no memory. The address of a slice of one is its offset, and a process
// has little else below these addresses.
bool IsZeroTensor(nb::handle value, const void* data) {
  constexpr uint64_t kLow = uint64_t{1} << 32;
  return reinterpret_cast<uintptr_t>(data) < kLow && nb::hasattr(value, "_is_zerotensor") &&
         nb::cast<bool>(value.attr("_is_zerotensor")());
}

// True for PyTorch's views that are lazily negated: DLPack does not report this.
bool IsNegated(nb::handle value) {
  return nb::hasattr(value, "is_neg") && nb::bool_(value.attr("is_neg")()).ptr() == Py_True;
}

// Reads the pending Python error as text and clears it. Interrupts and exits are rethrown.
std::string TakeError() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();
  const nb::python_error error;
  return nb::cast<std::string>(nb::str(error.value()));
}

}  // namespace

ArrayHolder::~ArrayHolder() {
  if (tensor != nullptr && tensor->deleter != nullptr) tensor->deleter(tensor);
  if (versioned != nullptr && versioned->deleter != nullptr) versioned->deleter(versioned);
}

void FailRank(const Argument& argument, int64_t rank) {
  Fail(argument.operation, argument.name, "has rank " + std::to_string(rank), "at most " + std::to_string(kMaxRank));
}

bool ImportBuffer(const Argument& argument, nb::handle value, bool writable, ArrayHolder& holder, ArrayLayout& layout) {
  if (!Buffer::Has(value)) return false;
  if (!holder.buffer.Get(value, Buffer::kStrided | Buffer::kFormat)) {
    layout.refusal = TakeError();
    return false;
  }
  const BufferView& buffer = *holder.buffer;
  if (writable && buffer.readonly) {
    Fail(argument.operation, argument.name, "is read-only", "a writable array");
  }
  if (buffer.ndim > kMaxRank) {
    FailRank(argument, buffer.ndim);
  }
  layout.data = buffer.buf;
  layout.rank = buffer.ndim;
  std::copy_n(buffer.shape, buffer.ndim, layout.sizes);
  if (buffer.strides != nullptr) {
    std::copy_n(buffer.strides, buffer.ndim, layout.byte_strides);
  } else {  // ctypes gives none
    FillRowMajor(layout, buffer.itemsize);
  }
  ParseFormat(buffer.format, buffer.itemsize, layout.dtype, layout.unknown_dtype);
  return true;
}

bool ImportDlpack(const Argument& argument, bool writable, ArrayHolder& holder, ArrayLayout& layout) {
  const nb::handle value = argument.value;
  const auto fail = [&](const std::string& got, const char* expected) {
    Fail(argument.operation, argument.name, got, expected);
  };
  nb::object capsule;
  try {
    if (!nb::hasattr(value, "__dlpack__")) return false;
    if (nb::hasattr(value, "__dlpack_device__")) {
      const nb::object device = RunPython([&] { return value.attr("__dlpack_device__")(); });
      const auto type = nb::cast<int64_t>(device[0]);
      if (!IsOnCpu(type)) FailDevice(argument, type);
    }
    if (IsNegated(value)) fail("is a negated view", "resolve_neg() of it");
    const nb::tuple version = nb::make_tuple(1, 0);
    try {
      capsule = RunPython([&] { return value.attr("__dlpack__")(nb::arg("max_version") = version); });
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;  // a producer from before DLPack 1.0
      capsule = RunPython([&] { return value.attr("__dlpack__")(); });
    }
  } catch (nb::python_error& error) {
    error.restore();
    layout.refusal = TakeError();
    return false;
  } catch (const nb::cast_error&) {
    fail("has a __dlpack_device__ that is not a pair of ints", "an array on the CPU");
  }

  const DLTensor* tensor = nullptr;
  uint64_t flags = 0;
  PyObject* const p = capsule.ptr();
  if (PyCapsule_IsValid(p, "dltensor_versioned")) {
    auto* versioned = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(p, "dltensor_versioned"));
    if (versioned->version.major != 1) {
      fail("has DLPack version " + std::to_string(versioned->version.major), "1");
    }
    PyCapsule_SetName(p, "used_dltensor_versioned");
    holder.versioned = versioned;
    tensor = &versioned->dl_tensor;
    flags = versioned->flags;
  } else if (PyCapsule_IsValid(p, "dltensor")) {
    holder.tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(p, "dltensor"));
    PyCapsule_SetName(p, "used_dltensor");
    tensor = &holder.tensor->dl_tensor;
  } else {
    fail("has a __dlpack__ that returns no new DLPack capsule", kArrayExpected);
  }
  if (writable && (flags & kDLReadOnly) != 0) fail("is read-only", "a writable array");
  if (writable && (flags & kDLIsCopied) != 0) fail("is exported as a copy", "the array itself");
  ReadDlTensor(argument, *tensor, /*devices=*/false, layout);
  return true;
}

void ReadDlTensor(const Argument& argument, const DLTensor& tensor, bool devices, ArrayLayout& layout) {
  if (devices && tensor.device.device_type == kDLCUDA) {
    layout.device = {DeviceType::kCuda, tensor.device.device_id};
  } else if (!IsOnCpu(tensor.device.device_type)) {
    FailDevice(argument, tensor.device.device_type);
  }
  if (tensor.ndim < 0 || tensor.ndim > kMaxRank) {
    FailRank(argument, tensor.ndim);
  }
  ParseDlType(tensor.dtype, layout.dtype, layout.unknown_dtype);
  layout.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  if (IsZeroTensor(argument.value, layout.data)) layout.data = nullptr;
  layout.rank = tensor.ndim;
  const int64_t item_bytes = tensor.dtype.bits / 8;
  std::copy_n(tensor.shape, tensor.ndim, layout.sizes);
  if (tensor.strides == nullptr) return FillRowMajor(layout, item_bytes);
  for (int i = 0; i < tensor.ndim; ++i) {
    if (__builtin_mul_overflow(tensor.strides[i], item_bytes, &layout.byte_strides[i])) {
      Fail(argument.operation, argument.name, "has stride " + std::to_string(tensor.strides[i]),
           "fewer than 2^63 bytes");
    }
  }
}

}  // namespace heed::python

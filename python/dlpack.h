// DLPack's structs, as far as a consumer of arrays needs them.
//
// Source: DLPack 1.x, dlpack.h (github.com/dmlc/dlpack). Both the layout before 1.0 and the versioned one are in use
// today.
#ifndef HEED_PYTHON_DLPACK_H_
#define HEED_PYTHON_DLPACK_H_

#include <cstdint>

namespace heed::python {

enum : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLROCMHost = 11 };  // all but the second are CPU memory
enum : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLComplex = 5, kDLBool = 6 };
enum : uint64_t { kDLReadOnly = 1, kDLIsCopied = 2 };  // flags

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null means row-major
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

struct DLManagedTensorVersioned {
  struct {
    uint32_t major;
    uint32_t minor;
  } version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned*);
  uint64_t flags;
  DLTensor dl_tensor;
};

// The table of functions in a type's __dlpack_c_exchange_api__, a capsule named "dlpack_exchange_api" (DLPack 1.3).
// heed calls two of its functions, by position.
struct DLPackExchangeAPI {
  struct {
    uint32_t major;
    uint32_t minor;
  } version;
  DLPackExchangeAPI* previous;
  void (*managed_tensor_allocator)();
  void (*managed_tensor_from_py_object_no_sync)();
  void (*managed_tensor_to_py_object_no_sync)();
  // Lends an array. Returns 0, or sets a Python error. May be null.
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
  // The framework's current stream of the calling thread on a device. Errors are reported in the same way.
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace heed::python

#endif  // HEED_PYTHON_DLPACK_H_

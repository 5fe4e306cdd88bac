// The interface of libheed_cuda, which holds the GPU kernels. It is loaded when the first view is on a GPU, so that
// libheed needs no driver.
//
// Only plain structs cross the interface: a host that contains heed's code, such as the Python module, loads the same
// file.
#ifndef HEED_CUDA_LIBRARY_H_
#define HEED_CUDA_LIBRARY_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace heed::softmax::cuda {
struct Launches;
}  // namespace heed::softmax::cuda
namespace heed::recurrence::cuda {
struct Launches;
}  // namespace heed::recurrence::cuda
namespace heed::ssd::cuda {
struct Launches;
}  // namespace heed::ssd::cuda
namespace heed::scan::cuda {
struct Launches;
}  // namespace heed::scan::cuda

namespace heed::cuda {

// Properties of a device.
struct DeviceFacts {
  int32_t major = 0, minor = 0;  // compute capability
  int64_t shared_bytes = 0;      // largest per block
  int32_t num_sms = 0;
};

// A tensor of 16-bit rows that a tensor map describes, and the tensor map itself, a CUtensorMap.
struct TensorMapSource {
  const void* data = nullptr;  // 16-byte aligned, as all rows are
  int64_t channels = 0, tokens = 0, heads = 0, batches = 0;
  int64_t token_stride = 0, head_stride = 0, batch_stride = 0;  // in elements
};
struct alignas(64) TensorMap {
  std::byte bytes[128];
};

// Device, stream and grid of a launch.
struct Launch {
  int32_t device = 0;
  void* stream = nullptr;  // a CUDA stream; null is the default stream
  int32_t blocks[3] = {1, 1, 1};
};

// The functions of libheed_cuda. They return null, or an error message in static storage.
struct Library {
  const char* version;  // the version of heed it was built with
  const char* (*examine)(int32_t device, DeviceFacts* facts);
  const char* (*check_stream)(int32_t device, void* stream);  // "is of another device"
  // Allocates device memory from the stream's pool, in stream order; free() returns it in stream order.
  const char* (*allocate)(int32_t device, void* stream, size_t num_bytes, void** memory);
  void (*free)(int32_t device, void* stream, void* memory);
  // Copies a multiple of 8 bytes from the host, in stream order. The host's bytes are read before it returns.
  const char* (*upload)(int32_t device, void* stream, void* to, const void* from, size_t num_bytes);
  // Encodes a tensor map for TMA loads of 64 rows by 64 channels into a SharedTile (shared_tile.h).
  const char* (*encode_tensor_map)(int32_t device, const TensorMapSource& rows, TensorMap* map);
  const softmax::cuda::Launches* softmax;
  const recurrence::cuda::Launches* recurrence;
  const ssd::cuda::Launches* ssd;
  const scan::cuda::Launches* scan;
};

// Returns the library, or null and the reason if this version of it is missing.
const Library* Find(std::string* why_not);

// Replaces the library from now on; null restores the installed one. For tests, while nothing runs.
void Replace(const Library* library);

// The file is next to libheed, or where the loader finds it. It exports `const Library* heed_cuda_library()`.
inline constexpr char kLibraryFile[] = "libheed_cuda.so";
inline constexpr char kLibrarySymbol[] = "heed_cuda_library";

}  // namespace heed::cuda

#endif  // HEED_CUDA_LIBRARY_H_

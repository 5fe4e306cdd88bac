// libheed_cuda, which holds kernels for GPUs: loaded when the first view is on one, so that libheed needs no driver.
//
// Only plain structs go between the two: a host that has heed's code inside it, as the Python module has, uses the same
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

// What kernels need to know of a device.
struct DeviceFacts {
  int32_t major = 0, minor = 0;  // compute capability
  int64_t shared_bytes = 0;      // that a block may have
  int32_t num_sms = 0;
};

// Rows of 16 bits as bulk copies of Hopper read them, and what such copies are given: a CUtensorMap.
struct TensorMapSource {
  const void* data = nullptr;  // at a multiple of 16 bytes, as rows are
  int64_t channels = 0, tokens = 0, heads = 0, batches = 0;
  int64_t token_stride = 0, head_stride = 0, batch_stride = 0;  // in elements
};
struct alignas(64) TensorMap {
  std::byte bytes[128];
};

// Where and how a kernel is launched.
struct Launch {
  int32_t device = 0;
  void* stream = nullptr;  // a CUDA stream; null: the default one
  int32_t blocks[3] = {1, 1, 1};
};

// What libheed_cuda offers. Functions return null, or words of static storage that say what is wrong.
struct Library {
  const char* version;  // of the heed that it was built with
  const char* (*examine)(int32_t device, DeviceFacts* facts);
  const char* (*check_stream)(int32_t device, void* stream);  // "is of another device"
  // Memory of a device for kernels of a stream, from its pool; free() takes it back when what the stream has so far is
  // done.
  const char* (*allocate)(int32_t device, void* stream, size_t num_bytes, void** memory);
  void (*free)(int32_t device, void* stream, void* memory);
  // Copies bytes of the host, whole words of 8, in the order of the stream; they are read before it returns.
  const char* (*upload)(int32_t device, void* stream, void* to, const void* from, size_t num_bytes);
  // Of copies of 64 rows by 64 channels into a SharedTile (shared_tile.h).
  const char* (*encode_tensor_map)(int32_t device, const TensorMapSource& rows, TensorMap* map);
  const softmax::cuda::Launches* softmax;
  const recurrence::cuda::Launches* recurrence;
  const ssd::cuda::Launches* ssd;
  const scan::cuda::Launches* scan;
};

// The library; null, and why, where there is none of this version.
const Library* Find(std::string* why_not);

// Takes another library from now on; null: the one that is installed. For tests, while nothing runs.
void Replace(const Library* library);

// Beside libheed, or where the loader finds it; it exports one function, `const Library* heed_cuda_library()`.
inline constexpr char kLibraryFile[] = "libheed_cuda.so";
inline constexpr char kLibrarySymbol[] = "heed_cuda_library";

}  // namespace heed::cuda

#endif  // HEED_CUDA_LIBRARY_H_

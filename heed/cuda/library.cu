// The table of functions that libheed_cuda exports.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "heed/cuda/launch.h"
#include "heed/cuda/library.h"

namespace heed::softmax::cuda {
extern const Launches kLaunches;
}  // namespace heed::softmax::cuda
namespace heed::recurrence::cuda {
extern const Launches kLaunches;
}  // namespace heed::recurrence::cuda
namespace heed::ssd::cuda {
extern const Launches kLaunches;
}  // namespace heed::ssd::cuda
namespace heed::scan::cuda {
extern const Launches kLaunches;
}  // namespace heed::scan::cuda

namespace heed::cuda {
namespace {

const char* Examine(int32_t device, DeviceFacts* facts) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count)) return cudaGetErrorString(error);
  if (device < 0 || device >= count) return "there is no device of this index";
  int major, minor, shared_bytes, num_sms;
  for (const auto& [to, attribute] : {std::pair{&major, cudaDevAttrComputeCapabilityMajor},
                                      {&minor, cudaDevAttrComputeCapabilityMinor},
                                      {&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                                      {&num_sms, cudaDevAttrMultiProcessorCount}}) {
    if (const cudaError_t error = cudaDeviceGetAttribute(to, attribute, device)) return cudaGetErrorString(error);
  }
  *facts = {major, minor, shared_bytes, num_sms};
  return nullptr;
}

const char* CheckStream(int32_t device, void* stream) {
  if (stream == nullptr) return nullptr;
  int of_stream = 0;
  if (const cudaError_t error = cudaStreamGetDevice(static_cast<cudaStream_t>(stream), &of_stream)) {
    return cudaGetErrorString(error);
  }
  return of_stream == device ? nullptr : "is of another device";
}

const char* Allocate(int32_t device, void* stream, size_t num_bytes, void** memory) {
  const ScopedDevice scoped(device);
  cudaError_t error = scoped.error();
  if (error == cudaSuccess) error = cudaMallocAsync(memory, num_bytes, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

void Free(int32_t device, void* stream, void* memory) {
  const ScopedDevice scoped(device);
  cudaFreeAsync(memory, static_cast<cudaStream_t>(stream));
}

// Data is uploaded in kernel arguments, so that the host does not wait and a CUDA graph that captures the stream keeps
// it. A copy from host memory would read it when the graph is launched.
struct Words {
  uint64_t* to;
  int32_t count;
  uint64_t at[4000];
};
static_assert(sizeof(Words) <= 32764, "a launch takes no more arguments");
constexpr int kUploadThreads = 128;

__global__ void __launch_bounds__(kUploadThreads) UploadKernel(const __grid_constant__ Words words) {
  const int i = static_cast<int>(blockIdx.x) * kUploadThreads + static_cast<int>(threadIdx.x);
  if (i < words.count) words.to[i] = words.at[i];
}

const char* Upload(int32_t device, void* stream, void* to, const void* from, size_t num_bytes) {
  constexpr size_t kMost = std::size(Words().at);
  const size_t count = num_bytes / sizeof(uint64_t);
  Words words;
  for (size_t first = 0; first < count; first += kMost) {
    words.to = static_cast<uint64_t*>(to) + first;
    words.count = static_cast<int32_t>(std::min(kMost, count - first));
    std::memcpy(words.at, static_cast<const uint64_t*>(from) + first, words.count * sizeof(uint64_t));
    const Launch launch = {
        .device = device, .stream = stream, .blocks = {(words.count + kUploadThreads - 1) / kUploadThreads, 1, 1}};
    if (const char* error = LaunchKernel(launch, kUploadThreads, 0, &UploadKernel, words)) return error;
  }
  return nullptr;
}

// Calls cuTensorMapEncodeTiled through the runtime, so that nothing links to the driver.
const char* EncodeTensorMap(int32_t device, const TensorMapSource& rows, TensorMap* map) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  const ScopedDevice scoped(device);
  if (scoped.error() != cudaSuccess) return cudaGetErrorString(scoped.error());
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (found != cudaDriverEntryPointSuccess) return "the driver has no cuTensorMapEncodeTiled";
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(rows.channels), static_cast<cuuint64_t>(rows.tokens),
                              static_cast<cuuint64_t>(rows.heads), static_cast<cuuint64_t>(rows.batches)};
  const cuuint64_t strides[] = {2 * static_cast<cuuint64_t>(rows.token_stride),
                                2 * static_cast<cuuint64_t>(rows.head_stride),
                                2 * static_cast<cuuint64_t>(rows.batch_stride)};  // bytes
  constexpr cuuint32_t kBox[] = {64, 64, 1, 1}, kSteps[] = {1, 1, 1, 1};
  CUtensorMap encoded;
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &encoded, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(rows.data), sizes, strides, kBox, kSteps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return "the driver encodes no tensor map of these rows";
  std::memcpy(map, &encoded, sizeof(encoded));
  return nullptr;
}

const Library kLibrary = {.version = HEED_VERSION,
                          .examine = &Examine,
                          .check_stream = &CheckStream,
                          .allocate = &Allocate,
                          .free = &Free,
                          .upload = &Upload,
                          .encode_tensor_map = &EncodeTensorMap,
                          .softmax = &softmax::cuda::kLaunches,
                          .recurrence = &recurrence::cuda::kLaunches,
                          .ssd = &ssd::cuda::kLaunches,
                          .scan = &scan::cuda::kLaunches};

}  // namespace

extern "C" __attribute__((visibility("default"))) const Library* heed_cuda_library() { return &kLibrary; }

}  // namespace heed::cuda

// What libheed_cuda exports.
#include <cuda_runtime.h>

#include <utility>

#include "heed/cuda/launch.h"
#include "heed/cuda/library.h"

namespace heed::softmax::cuda {
extern const Launches kLaunches;
}  // namespace heed::softmax::cuda
namespace heed::recurrence::cuda {
extern const Launches kLaunches;
}  // namespace heed::recurrence::cuda
namespace heed::scan::cuda {
extern const Launches kLaunches;
}  // namespace heed::scan::cuda

namespace heed::cuda {
namespace {

const char* Examine(int32_t device, DeviceFacts* facts) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count)) return cudaGetErrorString(error);
  if (device < 0 || device >= count) return "there is no device of this index";
  int major, minor, shared_bytes, multiprocessors;
  for (const auto& [to, attribute] : {std::pair{&major, cudaDevAttrComputeCapabilityMajor},
                                      {&minor, cudaDevAttrComputeCapabilityMinor},
                                      {&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                                      {&multiprocessors, cudaDevAttrMultiProcessorCount}}) {
    if (const cudaError_t error = cudaDeviceGetAttribute(to, attribute, device)) return cudaGetErrorString(error);
  }
  *facts = {major, minor, shared_bytes, multiprocessors};
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

const Library kLibrary = {.version = HEED_VERSION,
                          .examine = &Examine,
                          .check_stream = &CheckStream,
                          .allocate = &Allocate,
                          .free = &Free,
                          .softmax = &softmax::cuda::kLaunches,
                          .recurrence = &recurrence::cuda::kLaunches,
                          .scan = &scan::cuda::kLaunches};

}  // namespace

extern "C" __attribute__((visibility("default"))) const Library* heed_cuda_library() { return &kLibrary; }

}  // namespace heed::cuda

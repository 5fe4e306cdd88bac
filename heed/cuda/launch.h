// Kernel launches. Every kernel of the library is launched here.
#ifndef HEED_CUDA_LAUNCH_H_
#define HEED_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstddef>

#include "heed/cuda/library.h"

namespace heed::cuda {

// Makes a device current for the calling thread in its scope.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && device != before_) error_ = cudaSetDevice(device);
  }
  ~ScopedDevice() { cudaSetDevice(before_); }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  cudaError_t error_;
};

// Enqueues a kernel on the stream without waiting. Returns null, or an error message.
template <class Params>
const char* LaunchKernel(const Launch& launch, int threads, size_t shared_bytes, void (*kernel)(Params),
                         const Params& params) {
  const ScopedDevice device(launch.device);
  if (device.error() != cudaSuccess) return cudaGetErrorString(device.error());
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes))) {
    return cudaGetErrorString(error);
  }
  const dim3 blocks(static_cast<unsigned>(launch.blocks[0]), static_cast<unsigned>(launch.blocks[1]),
                    static_cast<unsigned>(launch.blocks[2]));
  kernel<<<blocks, static_cast<unsigned>(threads), shared_bytes, static_cast<cudaStream_t>(launch.stream)>>>(params);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace heed::cuda

#endif  // HEED_CUDA_LAUNCH_H_

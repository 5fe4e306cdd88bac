// A GPU as a test device.
#include <cuda_runtime.h>

#include <new>
#include <stdexcept>

#include "tests/cuda/device.h"

namespace heed::cuda {
namespace {

class GpuDevice : public TestDevice {
 public:
  const char* name() const override { return "gpu"; }
  std::string WhyNot() const override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    return error == cudaSuccess ? "" : cudaGetErrorString(error);
  }
  const Library* library() const override { return nullptr; }
  std::shared_ptr<void> Allocate(size_t num_bytes) const override {
    void* memory = nullptr;
    if (cudaMalloc(&memory, num_bytes) != cudaSuccess) throw std::bad_alloc();
    return {memory, [](void* at) { cudaFree(at); }};
  }
  void Upload(void* to, const void* from, size_t num_bytes) const override { Copy(to, from, num_bytes); }
  void Download(void* to, const void* from, size_t num_bytes) const override { Copy(to, from, num_bytes); }

 private:
  static void Copy(void* to, const void* from, size_t num_bytes) {
    cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess) error = cudaMemcpy(to, from, num_bytes, cudaMemcpyDefault);
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  }
};

}  // namespace

const TestDevice& Gpu() {
  static const GpuDevice device;
  return device;
}

}  // namespace heed::cuda

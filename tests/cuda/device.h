// A test device: its memory, and the library that computes there. Emulated devices are always available, a GPU may be.
#ifndef HEED_TESTS_CUDA_DEVICE_H_
#define HEED_TESTS_CUDA_DEVICE_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/cuda/library.h"

namespace heed::cuda {

class TestDevice {
 public:
  virtual ~TestDevice() = default;

  virtual const char* name() const = 0;
  // The reason why the device is unavailable; empty if it is available.
  virtual std::string WhyNot() const = 0;
  // Null: the installed library.
  virtual const Library* library() const = 0;

  virtual std::shared_ptr<void> Allocate(size_t num_bytes) const = 0;
  // Both wait for earlier launches.
  virtual void Upload(void* to, const void* from, size_t num_bytes) const = 0;
  virtual void Download(void* to, const void* from, size_t num_bytes) const = 0;
};

// The seed determines the order in which threads of a grid run.
const TestDevice& EmulatedDevice();
const TestDevice& EmulatedHopper();  // compute capability 9.0 instead of 8.0
void SetEmulatedSeed(uint64_t seed);
void SetEmulatedSms(int32_t count);  // 2 by default

// A GPU, if tests are built with CUDA.
const TestDevice& Gpu();

// A host tensor on a device, with the same strides and, up to 16 bytes, the same alignment.
class DeviceTensor {
 public:
  DeviceTensor(const TestDevice& device, const ConstTensorView& host);

  const TensorView& view() const { return view_; }
  // Copies to the host memory that it came from, including gaps.
  void Download(const TensorView& host) const;

 private:
  const TestDevice& device_;
  std::shared_ptr<void> memory_;
  ptrdiff_t below_ = 0;  // bytes from the lowest element to element 0
  size_t num_bytes_ = 0;
  char* lowest_ = nullptr;
  TensorView view_;
};

}  // namespace heed::cuda

#endif  // HEED_TESTS_CUDA_DEVICE_H_

// The limits of a GPU that kernels are compared with.
#ifndef BENCHMARKS_CUDA_LIMITS_H_
#define BENCHMARKS_CUDA_LIMITS_H_

#include <cstddef>
#include <functional>
#include <string>

namespace heed::bench {

// A device with its clock.
class Timed {
 public:
  virtual ~Timed() = default;
  virtual std::string name() const = 0;
  // Seconds on the device from the first to the last of the operations that `f` enqueues in its default stream.
  virtual double Seconds(const std::function<void()>& f) const = 0;
  // Copy() enqueues a copy within the device's memory. Multiply() enqueues products of bf16 matrices and nothing else:
  // by mma.sync, or by WGMMA where the device has it.
  virtual void Copy(void* to, const void* from, size_t num_bytes) const = 0;
  virtual void Multiply() const = 0;
  virtual double multiply_flops() const = 0;
};

// The GPU, in builds with CUDA. Throws std::runtime_error without a GPU.
const Timed& TimedGpu();

}  // namespace heed::bench

#endif  // BENCHMARKS_CUDA_LIMITS_H_

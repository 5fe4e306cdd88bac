// Attainable limits of a GPU, by which kernels are measured.
#ifndef BENCHMARKS_CUDA_LIMITS_H_
#define BENCHMARKS_CUDA_LIMITS_H_

#include <cstddef>
#include <functional>
#include <string>

namespace heed::bench {

// A device with a clock.
class Timed {
 public:
  virtual ~Timed() = default;
  virtual std::string name() const = 0;
  // Seconds on the device from the first to the last operation that `f` enqueues on the default stream.
  virtual double Seconds(const std::function<void()>& f) const = 0;
  // Enqueue a copy within device memory, and bf16 products alone: by mma.sync, or by WGMMA on Hopper.
  virtual void Copy(void* to, const void* from, size_t num_bytes) const = 0;
  virtual void Multiply() const = 0;
  virtual double multiply_flops() const = 0;
};

// Defined if benchmarks are built with CUDA. Throws std::runtime_error without a GPU.
const Timed& TimedGpu();

}  // namespace heed::bench

#endif  // BENCHMARKS_CUDA_LIMITS_H_

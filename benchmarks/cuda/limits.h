// What a GPU attains without us: the limits that kernels are measured by.
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
  // Seconds of the device from the first to the last of what `f` puts into its default stream.
  virtual double Seconds(const std::function<void()>& f) const = 0;
  // Puts a copy within the device's memory into it, and products of matrices of bf16, nothing else: by mma.sync, or
  // by groups of warps where the device has such products.
  virtual void Copy(void* to, const void* from, size_t num_bytes) const = 0;
  virtual void Multiply() const = 0;
  virtual double multiply_flops() const = 0;
};

// Where benchmarks are built with CUDA. Throws std::runtime_error without a GPU.
const Timed& TimedGpu();

}  // namespace heed::bench

#endif  // BENCHMARKS_CUDA_LIMITS_H_

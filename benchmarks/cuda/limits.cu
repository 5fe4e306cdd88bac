// Measured limits of a GPU: copies, and bf16 products by mma.sync.
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>

#include "benchmarks/cuda/limits.h"
#include "heed/cuda/gpu_machine.h"

namespace heed::bench {

#if defined(HEED_WITH_HOPPER)
// wgmma_limit.cu
const char* LaunchWgmma(int num_sms);
double WgmmaFlops(int num_sms);
#else
const char* LaunchWgmma(int) { return nullptr; }
double WgmmaFlops(int) { return 0; }
#endif

namespace {

void Check(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
}
void Check(cudaError_t error) { Check(error == cudaSuccess ? nullptr : cudaGetErrorString(error)); }

constexpr int kWarps = 8, kSums = 8, kSteps = 4096;  // warps per block; independent sums per warp; steps

// Independent chains of mma.sync.
__global__ void __launch_bounds__(kWarps * 32) Products(float* out) {
  const heed::cuda::GpuMachine machine(nullptr);
  const uint32_t one = 0x3F803F80u;  // two bf16
  const uint32_t a[4] = {one, one, one, one}, b[2] = {one, one};
  float sums[kSums][4] = {};
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i][0] = static_cast<float>(i);  // different, or the compiler merges them
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) machine.MmaSync<DType::kBF16>(a, b, sums[i]);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kSums; ++i) sum += sums[i][0];
  if (sum == 1) *out = sum;  // never true, which the compiler does not know
}

class GpuClock : public Timed {
 public:
  GpuClock() {
    Check(cudaGetDeviceProperties(&facts_, 0));
    Check(cudaEventCreate(&first_));
    Check(cudaEventCreate(&last_));
  }
  std::string name() const override { return facts_.name; }
  double Seconds(const std::function<void()>& f) const override {
    Check(cudaEventRecord(first_));
    f();
    Check(cudaEventRecord(last_));
    Check(cudaEventSynchronize(last_));
    float milliseconds;
    Check(cudaEventElapsedTime(&milliseconds, first_, last_));
    return milliseconds / 1e3;
  }
  void Copy(void* to, const void* from, size_t num_bytes) const override {
    Check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice));
  }
  void Multiply() const override {
    if (has_wgmma()) return Check(LaunchWgmma(facts_.multiProcessorCount));
    Products<<<blocks(), kWarps * 32>>>(nullptr);
    Check(cudaGetLastError());
  }
  double multiply_flops() const override {
    return has_wgmma() ? WgmmaFlops(facts_.multiProcessorCount)
                       : 2.0 * 16 * 8 * 16 * kSums * kSteps * kWarps * blocks();
  }

 private:
  int blocks() const { return 2 * facts_.multiProcessorCount; }
  bool has_wgmma() const { return facts_.major == 9 && WgmmaFlops(1) > 0; }

  cudaDeviceProp facts_;
  cudaEvent_t first_ = nullptr, last_ = nullptr;
};

}  // namespace

const Timed& TimedGpu() {
  static const GpuClock clock;
  return clock;
}

}  // namespace heed::bench

// The machine (machine.h) of an NVIDIA GPU of compute capability 8.0 or later: one thread of a grid.
#ifndef HEED_CUDA_GPU_MACHINE_H_
#define HEED_CUDA_GPU_MACHINE_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"

namespace heed::cuda {

class GpuMachine {
 public:
  __device__ explicit GpuMachine(char* shared) : shared_(shared) {}

  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int num_threads() const { return static_cast<int>(blockDim.x); }
  __device__ int block(int axis) const {
    return static_cast<int>(axis == 0 ? blockIdx.x : axis == 1 ? blockIdx.y : blockIdx.z);
  }
  __device__ char* shared() const { return shared_; }

  __device__ void Sync() const { __syncthreads(); }
  __device__ bool SyncOr(bool flag) const { return __syncthreads_or(flag) != 0; }
  __device__ bool Any(bool flag) const { return __any_sync(0xFFFFFFFFu, flag) != 0; }
  __device__ float ShuffleXor(float x, int mask) const { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
  __device__ float Shuffle(float x, int lane) const { return __shfl_sync(0xFFFFFFFFu, x, lane); }

  __device__ void CopyAsync(void* to, const void* from, bool exists) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(Address(to)), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
  }
  __device__ void CommitCopies() const { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int kPending>
  __device__ void WaitCopies() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  }

  template <bool kTransposed>
  __device__ void LdMatrix(const void* row, uint32_t (&r)[4]) const {
    if constexpr (kTransposed) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(Address(row))
                   : "memory");
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(Address(row))
                   : "memory");
    }
  }
  template <DType kDType>
  __device__ void MmaSync(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&c)[4]) const {
    if constexpr (kDType == DType::kBF16) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
          "%2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
          "%2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
  template <DType kDType>
  static __device__ uint32_t Pack(float low, float high) {
    uint32_t pair;
    if constexpr (kDType == DType::kBF16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
  }
  template <DType kDType>
  static __device__ float Widen(uint16_t bits) {
    if constexpr (kDType == DType::kBF16) return __bfloat162float(__ushort_as_bfloat16(bits));
    return __half2float(__ushort_as_half(bits));
  }
  static __device__ float Exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

 protected:
  static __device__ uint32_t Address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }

 private:
  char* const shared_;
};

}  // namespace heed::cuda

#endif  // HEED_CUDA_GPU_MACHINE_H_

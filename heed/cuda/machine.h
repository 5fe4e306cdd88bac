// The interface that GPU kernels are written against: a machine.
//
// A kernel is a function template `void Kernel(M& m, const Params& p)` that one thread runs. M is `GpuMachine`
// (gpu_machine.h), a thread of an NVIDIA GPU of compute capability 8.0 or later, or `EmulatedMachine` (tests/cuda), a
// thread of a grid that runs on the CPU, so that kernels are tested without a GPU. Both offer
//
//   thread(), num_threads()          the thread's index in its block, and the block's size
//   block(axis)                      the block's index in the grid, of three axes
//   shared()                         the block's shared memory, 16-byte aligned
//   Sync()                           __syncthreads
//   SyncOr(flag)                     __syncthreads_or
//   Any(flag)                        __any_sync over the warp
//   ShuffleXor(x, mask)              __shfl_xor_sync
//   Shuffle(x, lane)                 __shfl_sync
//   CopyAsync(to, from, exists)      cp.async of 16 bytes from global to shared memory; zeros unless `exists`
//   CommitCopies()                   cp.async.commit_group
//   WaitCopies<kPending>()           cp.async.wait_group
//   LdMatrix<kTransposed>(row, r)    ldmatrix of four 8 x 8 matrices of 16-bit elements
//   MmaSync<kDType>(a, b, c)         mma.sync m16n8k16: c += a b, of 16-bit operands and f32 sums
//   Pack<kDType>(low, high)          two floats rounded to 16 bits each
//   Widen<kDType>(bits)              the float of 16 bits
//   Exp2(x)                          2^x within 2 ulp; exactly 1 at 0; may be 0 below -126
//
// Every thread of a warp or block calls the functions that concern its warp or block.
//
// Fragments have the layout of PTX. With g = lane / 4 and t = lane % 4, thread `lane` of a warp holds
//
//   a[i]   rows g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next          of 16 x 16, row by column
//   b[i]   rows 2 t + 8 i and the next, column g                             of 16 x 8
//   c[i]   row g + 8 (i / 2), column 2 t + i % 2                             of 16 x 8
//   r[i]   of matrix i: row g, columns 2 t and the next; transposed: rows 2 t and the next, column g
//
// LdMatrix takes the address of row lane % 8 of matrix lane / 8.
//
// Hopper (compute capability 9.0, hopper_machine.h) has WGMMA: each of the four warps of a warpgroup brings 16 rows of
// a, b is in shared memory, and products run asynchronously. A machine with WGMMA and TMA also offers
//
//   FenceProxyAsync()                fence.proxy.async: before a barrier, makes the thread's writes to shared memory
//                                    visible to WGMMA
//   WgmmaFence(x...)                 wgmma.fence: before the first Wgmma() on registers x
//   Wgmma<kDType, kTransposed>(a, b, c, adds)
//                                    wgmma.mma_async of k = 16: c[j] = a b, or c[j] += a b if `adds`, for 8 columns of
//                                    b per j. b is K-major, or MN-major if transposed. a is in registers, or in shared
//                                    memory, where it is the 64 rows of the warpgroup
//   WgmmaCommit()                    wgmma.commit_group
//   WgmmaWait<kPending>(c...)        wgmma.wait_group; then sums c may be read
//   MbarrierInit(barrier)            mbarrier.init of 8 bytes of shared memory, by one thread, before a barrier
//   MbarrierExpectTx(barrier, bytes) mbarrier.arrive.expect_tx: one thread says how many bytes complete the
//                                    phase. Phases alternate between 0 and 1, from 0 on
//   TmaLoad(map, c, t, h, b, to, barrier)
//                                    TMA load of channels [c, c + 64) of 64 tokens from t on, of head h and batch entry
//                                    b; zeros outside of the tensor
//   MbarrierWait(barrier, phase)     mbarrier.try_wait until the phase completes; its data is visible to WGMMA too
#ifndef HEED_CUDA_MACHINE_H_
#define HEED_CUDA_MACHINE_H_

#include <cstdint>
#include <type_traits>
#include <utility>

#include "heed/core/dtype.h"
#include "heed/cuda/library.h"

#if defined(__CUDACC__)
#define HEED_DEVICE __device__ __forceinline__
#define HEED_HOST_DEVICE __host__ __device__ __forceinline__
#define HEED_DEVICE_UNROLL _Pragma("unroll")
#define HEED_DEVICE_ROLL _Pragma("unroll 1")
#else
#define HEED_DEVICE inline
#define HEED_HOST_DEVICE inline
#define HEED_DEVICE_UNROLL
#define HEED_DEVICE_ROLL
#endif

namespace heed::cuda {

inline constexpr int kWarp = 32;

// Calls f(0), f(1), ... with integral constants. Arrays that these index stay in registers, whatever their size.
template <class F, int... kIndices>
HEED_DEVICE void ForEachOf(const F& f, std::integer_sequence<int, kIndices...>) {
  (f(std::integral_constant<int, kIndices>()), ...);
}
template <int kCount, class F>
HEED_DEVICE void Unrolled(const F& f) {
  ForEachOf(f, std::make_integer_sequence<int, kCount>());
}

// A WGMMA operand in shared memory with 128-byte swizzle (SharedTile): its address, and the descriptor's leading byte
// offset, the distance of swizzle atoms along the row.
struct WgmmaOperand {
  const void* at;
  int leading_bytes;
};
inline constexpr int kStrideBytes = 8 * 128;

// Loads element `i` of a float tensor.
template <class M>
HEED_DEVICE float LoadFloat(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kF64) return static_cast<float>(static_cast<const double*>(data)[i]);
  if (dtype == DType::kF32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return dtype == DType::kBF16 ? M::template Widen<DType::kBF16>(bits) : M::template Widen<DType::kF16>(bits);
}

// Stores element `i` of a float tensor.
template <class M>
HEED_DEVICE void StoreFloat(void* data, DType dtype, int64_t i, float x) {
  if (dtype == DType::kF64) {
    static_cast<double*>(data)[i] = x;
  } else if (dtype == DType::kF32) {
    static_cast<float*>(data)[i] = x;
  } else {
    const uint32_t bits =
        dtype == DType::kBF16 ? M::template Pack<DType::kBF16>(x, 0) : M::template Pack<DType::kF16>(x, 0);
    static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(bits);
  }
}

}  // namespace heed::cuda

#endif  // HEED_CUDA_MACHINE_H_

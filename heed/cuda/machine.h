// What a kernel for GPUs is written against: a machine, of which there are two.
//
// A kernel is a function template `void Kernel(M& m, const Params& p)` that one thread runs. `GpuMachine`
// (gpu_machine.h) is a thread of an NVIDIA GPU from compute capability 8.0 on; `EmulatedMachine` (tests/cuda) one of a
// grid that runs on the CPU, with which kernels are tested where there is no GPU. Both offer
//
//   thread(), num_threads()          in its block
//   block(axis)                      in the grid, of three axes
//   shared()                         memory of the block, 16-byte aligned
//   Sync()                           of all threads of the block
//   SyncOr(flag)                     that, and whether any of them says so
//   Any(flag)                        whether any thread of the warp says so
//   ShuffleXor(x, mask)              the x of the thread of the warp whose number differs by mask
//   Shuffle(x, lane)                 that of thread `lane` of the warp
//   CopyAsync(to, from, exists)      16 bytes of shared memory from global memory, or zeros where `from` does not exist
//   CommitCopies()                   the copies since the last one are a group
//   WaitCopies<kPending>()           until no more than these groups are under way
//   LdMatrix<kTransposed>(row, r)  four matrices of 8 x 8 elements of 16 bits from shared memory
//   MmaSync<kDType>(a, b, c)         c += a b, of 16 x 16 and 16 x 8 elements of 16 bits
//   Pack<kDType>(low, high)          two numbers rounded to 16 bits
//   Widen<kDType>(bits)              the number that they are
//   Exp2(x)                          within 2 ulp, of 0 exactly 1, below -126 maybe 0
//
// All threads of a warp, or a block, call those that concern it together.
//
// Fragments are those of PTX. With g = lane / 4 and t = lane % 4, thread `lane` of a warp holds
//
//   a[i]   rows g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next          of 16 x 16, row by column
//   b[i]   rows 2 t + 8 i and the next, column g                             of 16 x 8
//   c[i]   row g + 8 (i / 2), column 2 t + i % 2                             of 16 x 8
//   r[i]   of matrix i: row g, columns 2 t and the next; transposed: rows 2 t and the next, column g
//
// LdMatrix takes the address of row lane % 8 of matrix lane / 8.
//
// Groups of four warps have products of their own on Hopper (compute capability 9.0, hopper_machine.h): each warp
// brings 16 rows, the second operand is in shared memory, and sums are there when they are waited for. A machine that
// has them offers
//
//   FenceProxyAsync()                  what the thread has put into shared memory is there for products, once all have
//   met WgmmaFence(x...)              products may have these operands and sums, from here until they are waited for
//   Wgmma<kDType, kTransposed>(a, b, c, adds)  c[j] = a b, or += where it adds, b being 16 rows by 8 columns
//   per j, of a
//                                    tile's columns by its rows or, transposed, as they stand. a may be in shared
//                                    memory too, 64 rows of the group
//   WgmmaCommit()                 the products since the last one are a group
//   MbarrierInit(barrier)             8 bytes of shared memory, by one thread, before all meet
//   MbarrierExpectTx(barrier, bytes)        one thread says how many bytes of copies end its phase, 0 at first, then 1,
//   0, ... TmaLoad(map, c, t, h, b, to, barrier)  channels [c, c + 64) of 64 tokens from t on, head h, batch entry b;
//   what does not exist is 0 MbarrierWait(barrier, phase)         until that phase has ended: what it copied is there,
//   for products too WgmmaWait<kPending>(c...)     until no more than these groups are under way, and not these sums
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

// f(0), f(1), ... as integral constants: arrays that these index stay in registers, however many they are.
template <class F, int... kIndices>
HEED_DEVICE void ForEachOf(const F& f, std::integer_sequence<int, kIndices...>) {
  (f(std::integral_constant<int, kIndices>()), ...);
}
template <int kCount, class F>
HEED_DEVICE void Unrolled(const F& f) {
  ForEachOf(f, std::make_integer_sequence<int, kCount>());
}

// Where an operand of a group's product begins in shared memory: rows of 128 bytes, turned as SharedTile turns them,
// and further columns so many bytes behind 64 of them.
struct WgmmaOperand {
  const void* at;
  int leading_bytes;
};
inline constexpr int kStrideBytes = 8 * 128;

// Element `i` of a tensor of floats.
template <class M>
HEED_DEVICE float LoadFloat(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kF64) return static_cast<float>(static_cast<const double*>(data)[i]);
  if (dtype == DType::kF32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return dtype == DType::kBF16 ? M::template Widen<DType::kBF16>(bits) : M::template Widen<DType::kF16>(bits);
}

// The same of one that is written.
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

// The machine (machine.h) of a Hopper GPU (compute capability 9.0), with WGMMA and TMA.
//
// Instructions and descriptors come from CUTLASS. Code that includes this file is compiled for `sm_90a`.
#ifndef HEED_CUDA_HOPPER_MACHINE_H_
#define HEED_CUDA_HOPPER_MACHINE_H_

#include <cstdint>
#include <type_traits>
#include <utility>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "heed/core/dtype.h"
#include "heed/cuda/gpu_machine.h"
#include "heed/cuda/machine.h"

namespace heed::cuda {

class HopperMachine : public GpuMachine {
 public:
  using GpuMachine::GpuMachine;

  __device__ void FenceProxyAsync() const { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
  // Pins the registers, because the compiler does not know that WGMMA reads and writes them asynchronously.
  template <class... Registers>
  __device__ void WgmmaFence(Registers&... registers) const {
    (Pin(registers), ...);
    cute::warpgroup_arrive();
  }
  __device__ void WgmmaCommit() const { cute::warpgroup_commit_batch(); }
  template <int kPending, class... Registers>
  __device__ void WgmmaWait(Registers&... sums) const {
    cute::warpgroup_wait<kPending>();
    (Pin(sums), ...);
  }

  __device__ void MbarrierInit(uint64_t* barrier) const {
    cute::initialize_barrier(*barrier);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ void MbarrierExpectTx(uint64_t* barrier, int bytes) const {
    cute::set_barrier_transaction_bytes(*barrier, static_cast<uint32_t>(bytes));
  }
  __device__ void TmaLoad(const TensorMap& map, int channel, int token, int head, int batch, void* to,
                          uint64_t* barrier) const {
    cute::SM90_TMA_LOAD_4D::copy(&map, barrier, kEvictNormal, to, channel, token, head, batch);
  }
  __device__ void MbarrierWait(uint64_t* barrier, int phase) const {
    cute::wait_barrier(*barrier, phase);
    asm volatile("" ::: "memory");
  }

  template <DType kDType, bool kTransposed, int kTiles>
  __device__ __forceinline__ void Wgmma(const uint32_t (&a)[4], const WgmmaOperand& b, float (&c)[kTiles][4],
                                        bool adds) const {
    const uint64_t of_b = Descriptor(b);
    ForSums(c, [&](auto&... sums) {
      Product<kDType, kTransposed, kTiles>::fma(a[0], a[1], a[2], a[3], of_b, sums...,
                                                adds ? ScaleOut::One : ScaleOut::Zero);
    });
  }
  template <DType kDType, bool kTransposed, int kTiles>
  __device__ __forceinline__ void Wgmma(const WgmmaOperand& a, const WgmmaOperand& b, float (&c)[kTiles][4],
                                        bool adds) const {
    const uint64_t of_a = Descriptor(a), of_b = Descriptor(b);
    ForSums(c, [&](auto&... sums) {
      SharedProduct<kDType, kTransposed, kTiles>::fma(of_a, of_b, sums..., adds ? ScaleOut::One : ScaleOut::Zero);
    });
  }

 private:
  static constexpr auto kEvictNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  using ScaleOut = cute::SM90::GMMA::ScaleOut;  // whether the earlier sums count

  template <class Register>
  static __device__ __forceinline__ void Pin(Register& x) {
    if constexpr (std::is_array_v<Register>) {
      HEED_DEVICE_UNROLL
      for (auto& each : x) Pin(each);
    } else {
      cute::warpgroup_fence_operand(x);
    }
  }

  // The instructions by dtype and columns: RS takes a from registers, SS from shared memory.
  template <DType kDType, bool kTransposed, int kTiles>
  static auto ProductOf() {
    using namespace cute::SM90::GMMA;  // NOLINT: the names of its instructions
    constexpr Major kOfB = kTransposed ? Major::MN : Major::K;
    static_assert(kTiles == 8 || kTiles == 16);
    if constexpr (kDType == DType::kBF16 && kTiles == 8) {
      return std::pair<MMA_64x64x16_F32BF16BF16_RS<Major::K, kOfB>, MMA_64x64x16_F32BF16BF16_SS<Major::K, kOfB>>();
    } else if constexpr (kDType == DType::kBF16) {
      return std::pair<MMA_64x128x16_F32BF16BF16_RS<Major::K, kOfB>, MMA_64x128x16_F32BF16BF16_SS<Major::K, kOfB>>();
    } else if constexpr (kTiles == 8) {
      return std::pair<MMA_64x64x16_F32F16F16_RS<Major::K, kOfB>, MMA_64x64x16_F32F16F16_SS<Major::K, kOfB>>();
    } else {
      return std::pair<MMA_64x128x16_F32F16F16_RS<Major::K, kOfB>, MMA_64x128x16_F32F16F16_SS<Major::K, kOfB>>();
    }
  }
  template <DType kDType, bool kTransposed, int kTiles>
  using Product = typename decltype(ProductOf<kDType, kTransposed, kTiles>())::first_type;
  template <DType kDType, bool kTransposed, int kTiles>
  using SharedProduct = typename decltype(ProductOf<kDType, kTransposed, kTiles>())::second_type;

  static __device__ uint64_t Descriptor(const WgmmaOperand& b) {
    cute::GmmaDescriptor descriptor;
    descriptor.bitfield.start_address_ = static_cast<uint16_t>(Address(b.at) >> 4);
    descriptor.bitfield.leading_byte_offset_ = static_cast<uint16_t>(b.leading_bytes >> 4);
    descriptor.bitfield.stride_byte_offset_ = kStrideBytes >> 4;
    descriptor.bitfield.layout_type_ = static_cast<uint8_t>(cute::SM90::GMMA::LayoutType::B128);
    return descriptor;
  }

  // f(c[0][0], c[0][1], ...).
  template <int kTiles, class F>
  static __device__ __forceinline__ void ForSums(float (&c)[kTiles][4], const F& f) {
    [&]<int... kSums>(std::integer_sequence<int, kSums...>) {
      f(c[kSums / 4][kSums % 4]...);
    }(std::make_integer_sequence<int, 4 * kTiles>());
  }
};

}  // namespace heed::cuda

#endif  // HEED_CUDA_HOPPER_MACHINE_H_

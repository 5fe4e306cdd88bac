// The kernels that there are: by key channels, which zeros fill up, with and without a delta rule, of bf16 and f16.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_LAUNCHES_H_
#define HEED_ENGINES_RECURRENCE_CUDA_LAUNCHES_H_

#include <cstdint>
#include <type_traits>

#include "heed/core/dtype.h"
#include "heed/cuda/library.h"
#include "heed/engines/recurrence/cuda/chunk_block.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

inline constexpr int64_t kMostKeys = 256;

// f(ChunkShape<...>()) of the smallest shape that keys of so many channels, at most kMostKeys, fit.
template <class F>
auto WithShape(int64_t keys, bool by_channel, const F& f) {
  const auto with = [&](auto size) {
    return by_channel ? f(ChunkShape<size.value, true>()) : f(ChunkShape<size.value, false>());
  };
  if (keys <= 64) return with(std::integral_constant<int, 64>());
  if (keys <= 128) return with(std::integral_constant<int, 128>());
  return with(std::integral_constant<int, 256>());
}
inline bool IsByChannel(const ChunkParams& p) {
  return p.decay == DecayKind::kKey || p.query_map != Map::kIdentity || p.key_map != Map::kIdentity;
}

// f(shape, dtype, whether it is a delta rule), the last two as integral constants.
template <class F>
auto WithKernel(DType dtype, bool delta, const ChunkParams& p, const F& f) {
  return WithShape(p.key_size, IsByChannel(p), [&](auto shape) {
    const auto with_dtype = [&](auto of) { return delta ? f(shape, of, std::true_type()) : f(shape, of, std::false_type()); };
    if (dtype == DType::kBF16) return with_dtype(std::integral_constant<DType, DType::kBF16>());
    return with_dtype(std::integral_constant<DType, DType::kF16>());
  });
}

// What libheed_cuda does for this engine.
struct Launches {
  const char* (*forward)(const heed::cuda::Launch& launch, DType dtype, bool delta, const ChunkParams& params);
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_LAUNCHES_H_

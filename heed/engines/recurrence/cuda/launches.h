// The kernels that there are, of bf16: by key channels, which zeros fill up, with and without a delta rule.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_LAUNCHES_H_
#define HEED_ENGINES_RECURRENCE_CUDA_LAUNCHES_H_

#include <cstdint>
#include <type_traits>

#include "heed/cuda/library.h"
#include "heed/engines/recurrence/cuda/chunk_block.h"
#include "heed/engines/recurrence/cuda/gradient_blocks.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

inline constexpr int64_t kMostKeys = 128;  // of a walk: more are several, whose outputs are summed

// f(ChunkShape<...>()) of the smallest shape that keys of so many channels fit, or kMostKeys of them.
template <bool kByChannel, class F>
auto WithShape(int64_t keys, const F& f) {
  if (keys <= 64) return f(ChunkShape<64, kByChannel>());
  return f(ChunkShape<128, kByChannel>());
}
// Whether columns decay or are mapped, or what a walk of gradients has is asked for.
inline bool IsGeneral(const ChunkParams& p) {
  return p.value_decay.data != nullptr || p.value_map != Map::kIdentity || p.late || p.write_scale != 1 ||
         p.kept != nullptr || p.normalizes || p.o.dtype == DType::kF32 || p.o.data == nullptr;
}
inline bool IsByChannel(const ChunkParams& p) {
  return p.decay == DecayKind::kKey || p.query_map != Map::kIdentity || p.key_map != Map::kIdentity;
}

// f(shape, whether it is a delta rule, whether it is general), the last two as integral constants. There are no general kernels
// of delta rules.
template <bool kByChannel, class F>
const char* WithKernel(bool delta, const ChunkParams& p, const F& f) {
  return WithShape<kByChannel>(p.key_size, [&](auto shape) {
    if (delta) return f(shape, std::true_type(), std::false_type());
    return IsGeneral(p) ? f(shape, std::false_type(), std::true_type()) : f(shape, std::false_type(), std::false_type());
  });
}

template <class Shape>
constexpr int SharedBytesOf(bool delta, const ChunkParams& p) {
  return Shape::SharedBytes(delta, p.read_key.data != nullptr, p.value_decay.data != nullptr);
}

// What libheed_cuda does for this engine.
struct Launches {
  const char* (*walk)(const heed::cuda::Launch& launch, bool delta, const ChunkParams& params);
  const char* (*gather)(const heed::cuda::Launch& launch, const GatherParams& params);
  const char* (*decay_gradients)(const heed::cuda::Launch& launch, const DecayGradientParams& params);
  const char* (*token_sums)(const heed::cuda::Launch& launch, const TokenSumParams& params);
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_LAUNCHES_H_

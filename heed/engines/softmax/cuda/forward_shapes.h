// The kernels of attention by dtype, key channels and value channels, and their dispatch. Smaller rows are padded with
// zeros.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_FORWARD_SHAPES_H_
#define HEED_ENGINES_SOFTMAX_CUDA_FORWARD_SHAPES_H_

#include <cstdint>
#include <type_traits>

#include "heed/core/dtype.h"
#include "heed/cuda/library.h"
#include "heed/engines/softmax/cuda/backward_blocks.h"
#include "heed/engines/softmax/cuda/backward_params.h"
#include "heed/engines/softmax/cuda/bias_gradients.h"
#include "heed/engines/softmax/cuda/combine_block.h"
#include "heed/engines/softmax/cuda/forward_block.h"
#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/cuda/term_blocks.h"

namespace heed::softmax::cuda {

inline constexpr int64_t kMostChannels = 256;

// Calls f with the dtype as an integral constant.
template <class F>
auto WithDType(DType dtype, const F& f) {
  if (dtype == DType::kF32) return f(std::integral_constant<DType, DType::kF32>());
  if (dtype == DType::kBF16) return f(std::integral_constant<DType, DType::kBF16>());
  return f(std::integral_constant<DType, DType::kF16>());
}

// Calls f with the smallest ForwardShape that fits these channels, at most kMostChannels.
template <class F>
auto WithShape(DType dtype, int64_t depth, int64_t value_depth, const F& f) {
  return WithDType(dtype, [&](auto of) {
    if (depth <= 64 && value_depth <= 64) return f(ForwardShape<of.value, 64, 64>());
    if (depth <= 128 && value_depth <= 128) return f(ForwardShape<of.value, 128, 128>());
    if constexpr (of.value != DType::kF32) {
      if (depth <= 192 && value_depth <= 128) return f(ForwardShape<of.value, 192, 128>());
    }
    return f(ForwardShape<of.value, 256, 256>());
  });
}

// Calls f with the smallest small-M shape. These kernels are general, because they are bound by memory.
template <class F>
auto WithSmallMShape(DType dtype, int64_t depth, int64_t value_depth, const F& f) {
  return WithDType(dtype, [&](auto of) {
    if (depth <= 64 && value_depth <= 64) return f(ForwardShape<of.value, 64, 64, BlockKind::kSmallM>());
    if (depth <= 128 && value_depth <= 128) return f(ForwardShape<of.value, 128, 128, BlockKind::kSmallM>());
    return f(ForwardShape<of.value, 256, 256, BlockKind::kSmallM>());
  });
}

// Calls f(shape, general) with an integral constant. All f32 kernels are general, because products are their bound.
template <class F>
auto WithKernel(const ForwardParams& p, const F& f) {
  return WithShape(p.dtype, p.depth, p.value_depth, [&](auto shape) {
    if constexpr (shape.kDType != DType::kF32) {
      if (!IsGeneral(p)) return f(shape, std::false_type());
    }
    return f(shape, std::true_type());
  });
}

// Calls f(shape) of the backward kernels. f32 has fewer channels: four wider tiles do not fit shared memory.
inline constexpr int64_t kMostWideChannels = 128;
template <class F>
auto WithBackwardShape(DType dtype, int64_t depth, int64_t value_depth, const F& f) {
  return WithDType(dtype, [&](auto of) {
    if (depth <= 64 && value_depth <= 64) return f(BackwardShape<of.value, 64, 64>());
    if constexpr (of.value != DType::kF32) {
      if (depth > 128 || value_depth > 128) return f(BackwardShape<of.value, 256, 256>());
    }
    return f(BackwardShape<of.value, 128, 128>());
  });
}

// Calls f(shape, general) of the backward kernels; those of f32 and f16 are all general.
template <class F>
auto WithBackwardKernel(const ForwardParams& p, const F& f) {
  return WithBackwardShape(p.dtype, p.depth, p.value_depth, [&](auto shape) {
    if constexpr (shape.kDType == DType::kBF16) {
      if (!IsGeneral(p)) return f(shape, std::false_type());
    }
    return f(shape, std::true_type());
  });
}

// Calls f with the smallest shape of the WGMMA kernels, of 16-bit dtypes up to kMostWgmmaChannels. Shape<dtype,
// channels>::Type is the shape.
inline constexpr int64_t kMostWgmmaChannels = 128;
template <template <DType, int> class Shape, class F>
auto WithWgmmaShape(DType dtype, int64_t depth, int64_t value_depth, const F& f) {
  const auto of_dtype = [&](auto of) {
    if (depth <= 64 && value_depth <= 64) return f(typename Shape<of.value, 64>::Type());
    return f(typename Shape<of.value, 128>::Type());
  };
  if (dtype == DType::kBF16) return of_dtype(std::integral_constant<DType, DType::kBF16>());
  return of_dtype(std::integral_constant<DType, DType::kF16>());
}
// Calls f(shape, general) of the WGMMA kernels.
template <template <DType, int> class Shape, class F>
auto WithWgmmaKernel(const ForwardParams& p, const F& f) {
  return WithWgmmaShape<Shape>(p.dtype, p.depth, p.value_depth, [&](auto shape) {
    return IsGeneral(p) ? f(shape, std::true_type()) : f(shape, std::false_type());
  });
}
template <DType kOf, int kChannels>
struct WgmmaShape {
  using Type = ForwardShape<kOf, kChannels, kChannels, BlockKind::kWgmma>;
};
template <DType kOf, int kChannels>
struct BackwardWgmmaShape {
  using Type = BackwardShape<kOf, kChannels, kChannels, /*kWgmma=*/true>;
};

// Launches of large-M blocks and of gradients.
struct BlockLaunches {
  const char* (*forward)(const heed::cuda::Launch& launch, const ForwardParams& params);
  // Gradients of keys and values, and of queries, after `terms`.
  const char* (*key_gradients)(const heed::cuda::Launch& launch, const BackwardParams& params);
  const char* (*query_gradients)(const heed::cuda::Launch& launch, const BackwardParams& params);
};

// The launches that libheed_cuda has for this engine.
struct Launches {
  BlockLaunches mma_sync, wgmma;  // wgmma is null if it is not compiled
  // Small-M blocks, with the same bits as forward's, and the combination of splits.
  const char* (*small_m)(const heed::cuda::Launch& launch, const ForwardParams& params);
  const char* (*combine)(const heed::cuda::Launch& launch, const ForwardParams& params);
  // Terms of rows, which gradients read; gradients of a bias; sums of row terms.
  const char* (*terms)(const heed::cuda::Launch& launch, const BackwardParams& params);
  const char* (*bias_gradients)(const heed::cuda::Launch& launch, const BiasGradientParams& params);
  const char* (*head_sums)(const heed::cuda::Launch& launch, const HeadSumsParams& params);
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_FORWARD_SHAPES_H_

// The kernels that there are: by dtype, channels of keys and channels of values. Smaller rows are filled with zeros.
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

// f() of a dtype, as an integral constant.
template <class F>
auto WithDType(DType dtype, const F& f) {
  if (dtype == DType::kF32) return f(std::integral_constant<DType, DType::kF32>());
  if (dtype == DType::kBF16) return f(std::integral_constant<DType, DType::kBF16>());
  return f(std::integral_constant<DType, DType::kF16>());
}

// f(ForwardShape<...>()) of the smallest shape that rows of so many channels, at most kMostChannels, fit.
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

// The same of blocks of few rows: kernels that are general where a problem is, as what they wait for is memory.
template <class F>
auto WithSmallMShape(DType dtype, int64_t depth, int64_t value_depth, const F& f) {
  return WithDType(dtype, [&](auto of) {
    if (depth <= 64 && value_depth <= 64) return f(ForwardShape<of.value, 64, 64, BlockKind::kSmallM>());
    if (depth <= 128 && value_depth <= 128) return f(ForwardShape<of.value, 128, 128, BlockKind::kSmallM>());
    return f(ForwardShape<of.value, 256, 256, BlockKind::kSmallM>());
  });
}

// f(shape, whether it is general, as an integral constant). So are all of f32, whose time is that of products.
template <class F>
auto WithKernel(const ForwardParams& p, const F& f) {
  return WithShape(p.dtype, p.depth, p.value_depth, [&](auto shape) {
    if constexpr (shape.kDType != DType::kF32) {
      if (!IsGeneral(p)) return f(shape, std::false_type());
    }
    return f(shape, std::true_type());
  });
}

// f(shape) of the backward kernels. Those of f32 have fewer channels: four tiles of more do not fit shared memory.
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

// f(shape, whether it is general) of them. Those of f32 and f16 are.
template <class F>
auto WithBackwardKernel(const ForwardParams& p, const F& f) {
  return WithBackwardShape(p.dtype, p.depth, p.value_depth, [&](auto shape) {
    if constexpr (shape.kDType == DType::kBF16) {
      if (!IsGeneral(p)) return f(shape, std::false_type());
    }
    return f(shape, std::true_type());
  });
}

// f(shape) of blocks whose groups of warps have products of their own: of 16 bits, up to kMostWgmmaChannels.
// Shape<dtype, channels>::Type is a shape.
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
// f(shape, whether it is general).
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

// Kernels of blocks of many rows or keys.
struct BlockLaunches {
  const char* (*forward)(const heed::cuda::Launch& launch, const ForwardParams& params);
  // Of keys and values, and of queries, once there are terms of rows.
  const char* (*key_gradients)(const heed::cuda::Launch& launch, const BackwardParams& params);
  const char* (*query_gradients)(const heed::cuda::Launch& launch, const BackwardParams& params);
};

// What libheed_cuda does for this engine.
struct Launches {
  BlockLaunches mma_sync, wgmma;  // by which products are computed; groups of them are null where they are not compiled
  // The same bits as forward's, by blocks of few rows, and rows of the parts that either of them leaves.
  const char* (*small_m)(const heed::cuda::Launch& launch, const ForwardParams& params);
  const char* (*combine)(const heed::cuda::Launch& launch, const ForwardParams& params);
  // Terms of rows, before gradients; gradients of a bias, and sums of terms of rows.
  const char* (*terms)(const heed::cuda::Launch& launch, const BackwardParams& params);
  const char* (*bias_gradients)(const heed::cuda::Launch& launch, const BiasGradientParams& params);
  const char* (*head_sums)(const heed::cuda::Launch& launch, const HeadSumsParams& params);
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_FORWARD_SHAPES_H_

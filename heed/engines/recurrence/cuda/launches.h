// The kernels of recurrences and their dispatch, by key channels, which are padded with zeros, and by form.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_LAUNCHES_H_
#define HEED_ENGINES_RECURRENCE_CUDA_LAUNCHES_H_

#include <cstdint>
#include <type_traits>

#include "heed/cuda/library.h"
#include "heed/engines/recurrence/cuda/bonus_blocks.h"
#include "heed/engines/recurrence/cuda/chunk_block.h"
#include "heed/engines/recurrence/cuda/chunk_stage.h"
#include "heed/engines/recurrence/cuda/gate_blocks.h"
#include "heed/engines/recurrence/cuda/gradient_blocks.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

inline constexpr int64_t kMostKeys = 128;  // of a sweep; more channels take several sweeps, whose outputs are summed

// Calls f with the smallest ChunkShape that fits these key channels, or kMostKeys of them.
template <bool kByChannel, class F>
auto WithShape(int64_t keys, const F& f) {
  if (keys <= 64) return f(ChunkShape<64, kByChannel>());
  return f(ChunkShape<128, kByChannel>());
}
inline Form FormOf(const ChunkParams& p) {
  if (p.delta != DeltaKind::kNone) return p.delta == DeltaKind::kGradients ? Form::kDeltaGradients : Form::kDelta;
  const bool is_general = p.value_decay.data != nullptr || p.value_map != Map::kIdentity || p.decays_after_update ||
                          p.strict || p.reads_before_decay || p.reads_only || p.write_scale != 1 ||
                          p.block_states != nullptr || p.normalizes || p.beta.data != nullptr ||
                          p.v.dtype != DType::kBF16 || p.skip.data != nullptr || p.output_gate.data != nullptr ||
                          p.o.dtype != DType::kBF16 || p.o.data == nullptr;
  return is_general ? Form::kGeneral : Form::kPlain;
}
// True if operands are computed (channel_operands.h); then q and k may be of any dtype.
inline bool IsByChannel(const ChunkParams& p) {
  return p.decay == DecayKind::kKey || p.query_map != Map::kIdentity || p.key_map != Map::kIdentity ||
         p.q.dtype != DType::kBF16 || p.k.dtype != DType::kBF16;
}

template <Form kForm>
using FormConstant = std::integral_constant<Form, kForm>;

// Calls f(shape, form), with the form as an integral constant.
template <bool kByChannel, class F>
const char* WithKernel(const ChunkParams& p, const F& f) {
  return WithShape<kByChannel>(p.key_size, [&](auto shape) {
    switch (FormOf(p)) {
      case Form::kPlain: return f(shape, FormConstant<Form::kPlain>());
      case Form::kGeneral: return f(shape, FormConstant<Form::kGeneral>());
      case Form::kDelta: return f(shape, FormConstant<Form::kDelta>());
      case Form::kDeltaGradients: return f(shape, FormConstant<Form::kDeltaGradients>());
    }
    return "is of no form";
  });
}

template <class Shape>
constexpr int SharedBytesOf(const ChunkParams& p) {
  return Shape::SharedBytes(p.delta != DeltaKind::kNone, p.read_key.data != nullptr, p.value_decay.data != nullptr,
                            p.v.dtype == DType::kF32);
}

// The launches that libheed_cuda has for this engine.
struct Launches {
  const char* (*sweep)(const heed::cuda::Launch& launch, const ChunkParams& params);
  const char* (*gather)(const heed::cuda::Launch& launch, const GatherParams& params);
  const char* (*decay_gradients)(const heed::cuda::Launch& launch, const DecayGradientParams& params);
  const char* (*products)(const heed::cuda::Launch& launch, const ProductParams& params);
  const char* (*dots)(const heed::cuda::Launch& launch, const DotParams& params);
  const char* (*denormalize)(const heed::cuda::Launch& launch, const DenormalizeParams& params);
  const char* (*copy_states)(const heed::cuda::Launch& launch, const StateCopyParams& params);
  const char* (*token_sums)(const heed::cuda::Launch& launch, const TokenSumParams& params);
  const char* (*gates)(const heed::cuda::Launch& launch, const GateParams& params);
  const char* (*multiply)(const heed::cuda::Launch& launch, const MultiplyParams& params);
  const char* (*split)(const heed::cuda::Launch& launch, const SplitParams& params);
  const char* (*bonus_weights)(const heed::cuda::Launch& launch, const BonusParams& params);
  const char* (*bonus_gradients)(const heed::cuda::Launch& launch, const BonusParams& params);
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_LAUNCHES_H_

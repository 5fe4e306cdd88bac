// The forward recurrence with AMX, or with its emulation in tests.
#define HEED_AMX
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/recurrence/chunk_states.h"
#include "heed/engines/recurrence/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/forward_amx.cc"  // this file
#include "hwy/foreach_target.h"                                      // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/recurrence/amx_chunks-inl.h"
#include "heed/simd/emulated_amx-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

using Unit = hs::AmxTilesOfTarget;

Passes ForwardAmx() { return ForwardPasses<Unit>(); }

ChunkStates AmxStates() { return {&ChunkBuffers::Bytes, &StatesOfChunks<Unit>}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS

#if HWY_ONCE
namespace heed::recurrence {

HEED_EXPORT(Passes, ForwardAmx)
HEED_EXPORT(ChunkStates, AmxStates)

namespace {

// For smaller states packing costs more than AMX saves. The emulation accepts all sizes, for tests.
constexpr int64_t kSmallestForAmx = 64 * 64;

// Accepts bf16 inputs, and decays that all channels share.
Reason Declines(const Context& ctx, const Problem& p) {
  if (p.dtype != DType::kBF16) return engine::DeclinesAllButBF16(p.dtype);
  if (const Reason reason = DeclinesOtherStates(p); !reason.empty()) return reason;
  const bool identity = p.feature == Feature::kIdentity && p.key_feature == Feature::kIdentity;
  if (!identity || p.normalize) return {"computes no feature maps and no normalisers"};
  if (!p.causal || p.key_mask.data != nullptr) return {"computes causal calls without a key mask"};
  if (p.gate == Gate::kKey || p.has_value_decay) return {"computes one decay per head at most"};
  if (p.has_bonus) return {"computes no u term"};
  if (ForwardAmx(ctx).forward == nullptr) return {"needs AMX"};
  const bool emulated = AmxOf(ctx.allowed_targets()) == AmxUnit::kEmulated;
  if (emulated || p.key_size * p.value_size >= kSmallestForAmx) return {};
  return {"is faster only for states of 64 x 64 and larger"};
}

// Single steps use recurrence_f32.
Passes ForwardAndSteps(const Context& ctx) {
  Passes passes = ForwardAmx(ctx);
  passes.step = kRecurrenceF32.forward_passes(ctx).step;
  return passes;
}

}  // namespace

const Kernel kAmx = {
    .name = "recurrence_tiles",
    .why =
        "chunks of 64 tokens with AMX, states and pairs as splits of three bf16; steps and gradients as "
        "recurrence_f32",
    .declines = &Declines,
    .forward_passes = &ForwardAndSteps,
    .backward_passes = &BackwardAmx,
};

}  // namespace heed::recurrence
#endif  // HWY_ONCE

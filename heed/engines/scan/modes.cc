// State spaces of S4D in chunks of tokens, in f32, to which 16-bit tensors are widened, or in f64.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/scan/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/modes.cc"  // this file
#include "hwy/foreach_target.h"                          // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/scan/mode_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

HEED_MODES_OF(, float)
HEED_MODES_OF(, double)

void ModesForward(Context& ctx, const Problem& p) {
  WithCompute(p, [&](auto zero) { ModesRun<decltype(zero)>(ctx, p); });
}

void ModesBackward(Context& ctx, const Problem& p, const Gradients& g) {
  WithCompute(p, [&](auto zero) { ModesBackRun<decltype(zero)>(ctx, p, g); });
}

int64_t ModesBytes(const Problem& p, bool backward) {
  return WithCompute(p, [&](auto zero) { return RowBytes<ModeBuffers<decltype(zero)>>(p, backward); });
}

Passes Modes() {
  return {.forward = &ModesForward,
          .workspace = [](const Context&, const Problem& p) { return ModesBytes(p, false); },
          .backward = &ModesBackward,
          .backward_workspace = [](const Context&, const Problem& p, const Gradients&) -> BackwardBytes {
            return {ModesBytes(p, true), 0};
          }};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HEED_EXPORT(Passes, Modes)

const Kernel kModes = {
    .name = "modes",
    .why =
        "chunks of 16 tokens by tables of a channel's modes, tokens and modes in lanes; 16-bit tensors widened, "
        "rows transposed where channels are contiguous",
    .declines =
        [](const Context&, const Problem& p) {
          const Reason reason = engine::DeclinesAllButFloats(p.dtype);
          return reason.empty() && p.rule != Rule::kModes ? Reason{"computes state spaces"} : reason;
        },
    .forward_passes = &Modes,
    .backward_passes = &Modes,
};

}  // namespace heed::scan
#endif  // HWY_ONCE

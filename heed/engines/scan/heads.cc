// Heads of H3, in f32, to which 16-bit tensors are widened, or in f64.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/scan/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/heads.cc"  // this file
#include "hwy/foreach_target.h"                          // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/scan/heads-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

void HeadsForward(Context& ctx, const Problem& p) {
  WithCompute(p, [&](auto zero) { HeadsRun<decltype(zero)>(ctx, p); });
}

void HeadsBackward(Context& ctx, const Problem& p, const Gradients& g) {
  WithCompute(p, [&](auto zero) { HeadsBackRun<decltype(zero)>(ctx, p, g); });
}

int64_t HeadsBytes(const Problem& p, bool backward) {
  return WithCompute(p, [&](auto zero) { return HeadsScratchBytes<decltype(zero)>(p, backward); });
}

Passes Heads() {
  return {.forward = &HeadsForward,
          .workspace = [](const Context&, const Problem& p) { return HeadsBytes(p, false); },
          .backward = &HeadsBackward,
          .backward_workspace = [](const Context&, const Problem& p, const Gradients&) -> BackwardBytes {
            return {HeadsBytes(p, true), 0};
          }};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HEED_EXPORT(Passes, Heads)

namespace {

Reason Declines(const Context&, const Problem& p) {
  const Reason reason = engine::DeclinesAllButFloats(p.dtype);
  return reason.empty() && p.rule != Rule::kHeads ? Reason{"computes state spaces of products of heads"} : reason;
}

}  // namespace

const Kernel kHeadsConvolution = {
    .name = "heads_convolution",
    .why =
        "products of a head's channels, one pair after another, convolved with the impulse response of its modes; "
        "16-bit tensors widened, rows transposed where channels are contiguous",
    .declines =
        [](const Context& ctx, const Problem& p) {
          const Reason reason = Declines(ctx, p);
          return reason.empty() && !p.has_taps ? Reason{"computes state spaces by convolution"} : reason;
        },
    .forward_passes = &Heads,
    .backward_passes = &Heads,
};

const Kernel kHeads = {
    .name = "heads",
    .why =
        "products of a head's channels, one pair after another, by chunks of 16 tokens and tables of its modes; "
        "16-bit tensors widened, rows transposed where channels are contiguous",
    .declines = &Declines,
    .forward_passes = &Heads,
    .backward_passes = &Heads,
};

}  // namespace heed::scan
#endif  // HWY_ONCE

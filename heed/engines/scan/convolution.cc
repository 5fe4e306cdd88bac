// Convolutions with taps, in f32, to which 16-bit tensors are widened, or in f64.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>

#include "heed/engines/scan/convolution.h"
#include "heed/engines/scan/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/convolution.cc"  // this file
#include "hwy/foreach_target.h"                                // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/scan/convolution-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

HEED_TAPS_OF(, float)
HEED_TAPS_OF(, double)

void ConvolutionForward(Context& ctx, const Problem& p) {
  WithCompute(p, [&](auto zero) { ConvolutionRun<decltype(zero)>(ctx, p); });
}

void ConvolutionBackward(Context& ctx, const Problem& p, const Gradients& g) {
  WithCompute(p, [&](auto zero) { ConvolutionBackRun<decltype(zero)>(ctx, p, g); });
}

int64_t ConvolutionBytes(const Problem& p, bool backward) {
  return WithCompute(p, [&](auto zero) { return RowBytes<ConvolutionBuffers<decltype(zero)>>(p, backward); });
}

Passes Convolution() {
  return {.forward = &ConvolutionForward,
          .workspace = [](const Context&, const Problem& p) { return ConvolutionBytes(p, false); },
          .backward = &ConvolutionBackward,
          .backward_workspace = [](const Context&, const Problem& p, const Gradients&) -> BackwardBytes {
            return {ConvolutionBytes(p, true), 0};
          }};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HEED_EXPORT(Passes, Convolution)

namespace {

Reason Declines(const Context&, const Problem& p) {
  const Reason reason = engine::DeclinesAllButFloats(p.dtype);
  const bool has_taps = p.rule == Rule::kTaps || (p.rule == Rule::kModes && p.has_taps);
  return reason.empty() && !has_taps ? Reason{"computes convolutions with taps"} : reason;
}

}  // namespace

const Kernel kConvolutionFourier = {
    .name = "convolution_fourier",
    .why =
        "by Fourier transforms, of blocks of the least power of two that has all taps, as there are too many to add "
        "up; 16-bit tensors widened, rows transposed where channels are contiguous",
    .declines =
        [](const Context& ctx, const Problem& p) {
          const Reason reason = Declines(ctx, p);
          const bool transformed = std::ranges::any_of(
              p.sequences, [&](const Sequence& s) { return TransformLength(p.num_taps, s.count) > 0; });
          return reason.empty() && !transformed ? Reason{"is faster only for longer sequences and more taps"} : reason;
        },
    .forward_passes = &Convolution,
    .backward_passes = &Convolution,
};

const Kernel kConvolutionDirect = {
    .name = "convolution_direct",
    .why =
        "tap by tap, as transforms would cost more at this length; tokens in lanes, 16-bit tensors widened, rows "
        "transposed where channels are contiguous",
    .declines = &Declines,
    .forward_passes = &Convolution,
    .backward_passes = &Convolution,
};

}  // namespace heed::scan
#endif  // HWY_ONCE

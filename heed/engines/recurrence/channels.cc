// RWKV-4 with f32 states, to which bf16 and f16 tensors are widened, and with f64 states.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/recurrence/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/channels.cc"  // this file
#include "hwy/foreach_target.h"                                   // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/recurrence/channels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

// Calls f.operator()<T>() with the compute type T.
template <class F>
auto WithCompute(const Problem& p, const F& f) {
  return p.dtype == DType::kF64 ? f.template operator()<double>() : f.template operator()<float>();
}

void ChannelsForward(Context& ctx, const Problem& p) {
  WithCompute(p, [&]<class T>() { ChannelForward<T>(ctx, p); });
}

int64_t ChannelsWorkspace(const Context&, const Problem& p) {
  return WithCompute(p, [&]<class T>() { return ChannelBytes<T>(p); });
}

void ChannelsBackward(Context& ctx, const Problem& p, const Gradients& g) {
  WithCompute(p, [&]<class T>() { ChannelBackward<T>(ctx, p, g); });
}

BackwardBytes ChannelsBackwardWorkspace(const Context&, const Problem& p, const Gradients&) {
  return WithCompute(p, [&]<class T>() { return ChannelBackwardBytes<T>(p); });
}

Passes Channels() {
  return {.forward = &ChannelsForward,
          .workspace = &ChannelsWorkspace,
          .step = &ChannelsForward,
          .backward = &ChannelsBackward,
          .backward_workspace = &ChannelsBackwardWorkspace};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HEED_EXPORT(Passes, Channels)

const Kernel kChannels = {
    .name = "recurrence_channels",
    .why = "a weighted mean per channel, channels in lanes, 16-bit tensors widened",
    .declines =
        [](const Context&, const Problem& p) {
          const Reason reason = engine::DeclinesAllButFloats(p.dtype);
          return reason.empty() && !p.channels ? Reason{"computes weighted means per channel"} : reason;
        },
    .forward_passes = &Channels,
    .backward_passes = &Channels,
};

}  // namespace heed::recurrence
#endif  // HWY_ONCE

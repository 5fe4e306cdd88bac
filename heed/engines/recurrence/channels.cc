// RWKV-4 with states of f32, bf16 and f16 tensors widened, and of f64.
#include "heed/core/targets.h"
#include "heed/core/dispatch.h"
#include "heed/engines/recurrence/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/channels.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "heed/engines/recurrence/channels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

// f(T()) with the type that is computed in.
template <class F>
auto WithComputed(const Problem& p, const F& f) {
  return p.dtype == DType::kF64 ? f(double{}) : f(float{});
}

void ChannelsRun(Context& ctx, const Problem& p) {
  WithComputed(p, [&](auto zero) { ChannelForward<decltype(zero)>(ctx, p); });
}

int64_t ChannelsBytes(const Problem& p) {
  return WithComputed(p, [&](auto zero) { return ChannelBytes<decltype(zero)>(p); });
}

void ChannelsBackRun(Context& ctx, const Problem& p, const Gradients& g) {
  WithComputed(p, [&](auto zero) { ChannelBackward<decltype(zero)>(ctx, p, g); });
}

BackwardBytes ChannelsBackBytes(const Problem& p) {
  return WithComputed(p, [&](auto zero) { return ChannelBackwardBytes<decltype(zero)>(p); });
}

}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HWY_EXPORT(ChannelsRun);
HWY_EXPORT(ChannelsBytes);
HWY_EXPORT(ChannelsBackRun);
HWY_EXPORT(ChannelsBackBytes);

void ForwardChannels(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(ChannelsRun)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t ForwardBytesChannels(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(ChannelsBytes)[TargetIndex(ctx.allowed_targets())](problem);
}

void BackwardChannels(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(ChannelsBackRun)[TargetIndex(ctx.allowed_targets())](ctx, problem, gradients);
}

BackwardBytes BackwardBytesChannels(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(ChannelsBackBytes)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::recurrence
#endif  // HWY_ONCE

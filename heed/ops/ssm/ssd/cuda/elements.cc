// SSD on a GPU besides its recurrence: the launches of a call.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "heed/cuda/calls.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/ssm/ssd/cuda/element_blocks_internal.h"
#include "heed/ops/ssm/ssd/ssd_kernels_internal.h"

namespace heed::ssd::cuda {
namespace {

int64_t Blocks(int64_t tokens) { return (tokens + kTokens - 1) / kTokens; }

// A view of [B, T, H], [B, T, H, P], [H] or [H, P].
DeviceView OnDevice(const ConstTensorView& t) {
  if (!t.present()) return {};
  DeviceView v = {.data = const_cast<void*>(t.data()), .dtype = t.dtype()};
  if (t.rank() <= 2) {
    v.head_stride = t.stride(0);
    v.channel_stride = t.rank() == 2 ? t.stride(1) : 0;
  } else {
    v.batch_stride = t.stride(0);
    v.token_stride = t.stride(1);
    v.head_stride = t.stride(2);
  }
  return v;
}

class Launcher {
 public:
  Launcher(const Context& ctx, const Elements& e) : e_(e), call_("ssd_cuda", ctx, e.in.x.device()) {}

  const heed::cuda::Call& call() const { return call_; }
  const Launches& kernels() const { return *call_.library().ssd; }

  // Launches a kernel over blocks of tokens of all heads.
  template <class Params>
  void Run(const char* (*kernel)(const heed::cuda::Launch&, const Params&), const std::vector<Range>& ranges,
           Params params) const {
    for (size_t first = 0; first < ranges.size(); first += kMostRanges) {
      const size_t count = std::min<size_t>(kMostRanges, ranges.size() - first);
      int64_t most = 0;
      for (size_t i = 0; i < count; ++i) {
        params.ranges[i] = ranges[first + i];
        most = std::max(most, Blocks(params.ranges[i].count));
      }
      // At least one block, which prepares skip.
      call_.Check(kernel(call_.Of(std::max<int64_t>(1, most), e_.heads, count), params));
    }
  }
  std::vector<Range> Ranges() const {
    std::vector<Range> ranges;
    int64_t blocks = 0;
    for (const mechanism::TokenRange& of : e_.ranges) {
      ranges.push_back({of.batch, of.begin, of.end - of.begin, blocks});
      blocks += Blocks(ranges.back().count);
    }
    return ranges;
  }
  // Tokens of no sequence.
  std::vector<Range> Others() const {
    std::vector<Range> ranges;
    mechanism::ForOthers(e_.ranges, e_.in.x.size(0), e_.in.x.size(1),
                         [&](int64_t b, int64_t begin, int64_t end) { ranges.push_back({b, begin, end - begin, 0}); });
    return ranges;
  }

 private:
  const Elements& e_;
  const heed::cuda::Call call_;
};

}  // namespace

void ComputeTimeSteps(const Context& ctx, const Elements& e) {
  if (e.heads == 0) return;
  const Launcher launcher(ctx, e);
  launcher.Run(launcher.kernels().steps, launcher.Ranges(),
               StepParams{.dt = OnDevice(e.in.dt),
                          .A = OnDevice(e.in.A),
                          .bias = OnDevice(e.in.dt_bias),
                          .D = OnDevice(e.in.D),
                          .delta = OnDevice(e.delta),
                          .log_decay = OnDevice(e.log_decay),
                          .skip = OnDevice(e.skip),
                          .low = static_cast<float>(e.dt_min),
                          .high = static_cast<float>(e.dt_max),
                          .softplus = e.softplus,
                          .channels = static_cast<int32_t>(e.channels),
                          .ranges = {}});
}

void ComputeGateGradients(const Context& ctx, const Elements& e) {
  if (e.heads == 0) return;
  const Launcher launcher(ctx, e);
  launcher.Run(launcher.kernels().gate, launcher.Ranges(),
               GateParams{.z = OnDevice(e.in.z),
                          .d_o = OnDevice(e.d_o),
                          .y = OnDevice(e.y),
                          .dz = OnDevice(e.out.z),
                          .channels = static_cast<int32_t>(e.channels),
                          .ranges = {}});
}

void FinishGradients(const Context& ctx, const Elements& e) {
  if (e.heads == 0) return;
  const Launcher launcher(ctx, e);
  const std::vector<Range> ranges = launcher.Ranges();
  const int64_t blocks = ranges.empty() ? 0 : ranges.back().first_block + Blocks(ranges.back().count);
  const int64_t shares = std::max<int64_t>(1, blocks * e.heads * (2 + e.channels));
  const heed::cuda::DeviceMemory sums(launcher.call(), static_cast<size_t>(shares) * sizeof(float));
  const auto channels = static_cast<int32_t>(e.channels), heads = static_cast<int32_t>(e.heads);
  launcher.Run(launcher.kernels().finish, ranges,
               FinishParams{.x = OnDevice(e.in.x),
                            .dt = OnDevice(e.in.dt),
                            .A = OnDevice(e.in.A),
                            .bias = OnDevice(e.in.dt_bias),
                            .delta = OnDevice(e.delta),
                            .skip = OnDevice(e.skip),
                            .dy = OnDevice(e.y.present() ? e.y : e.d_o),
                            .dv = OnDevice(e.dv),
                            .d_log_decay = OnDevice(e.d_log_decay),
                            .dx = OnDevice(e.out.x),
                            .ddt = OnDevice(e.out.dt),
                            .sums = static_cast<float*>(sums.data()),
                            .low = static_cast<float>(e.dt_min),
                            .high = static_cast<float>(e.dt_max),
                            .softplus = e.softplus,
                            .channels = channels,
                            .heads = heads,
                            .ranges = {}});
  launcher.Run(launcher.kernels().clear, launcher.Others(),
               ClearParams{.dx = OnDevice(e.out.x),
                           .dz = OnDevice(e.out.z),
                           .ddt = OnDevice(e.out.dt),
                           .channels = channels,
                           .ranges = {}});
  launcher.call().Check(launcher.kernels().total(launcher.call().Of(1, e.heads, 1),
                                                 {.sums = static_cast<const float*>(sums.data()),
                                                  .blocks = blocks,
                                                  .dA = OnDevice(e.out.A),
                                                  .dbias = OnDevice(e.out.dt_bias),
                                                  .dD = OnDevice(e.out.D),
                                                  .by_channel = e.out.D.present() && e.out.D.rank() == 2,
                                                  .channels = channels,
                                                  .heads = heads}));
}

}  // namespace heed::ssd::cuda

// The entry of the GPU kernel in the list of kernels: the problems that it accepts, and its launches.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "heed/core/error.h"
#include "heed/cuda/calls.h"
#include "heed/engines/scan/cuda/launches.h"
#include "heed/engines/scan/kernels.h"

namespace heed::scan {
namespace {

constexpr char kName[] = "scan_cuda";
// Blocks per SM in a backward launch: four at a time, four waves.
constexpr int64_t kEnoughBlocks = 16;

int64_t Blocks(int64_t size, int64_t per_block) { return (size + per_block - 1) / per_block; }

Reason Declines(const Context&, const Problem& p) {
  if (p.rule != Rule::kSelective) return {"computes selective scans"};
  if (const Reason reason = engine::DeclinesAllButF32(p.dtype); !reason.empty()) return reason;
  if (p.states > cuda::kMostStates) return {"computes up to 128 states of a channel"};
  thread_local std::string reason;  // owns the text until the next call
  reason = heed::cuda::Declines(p.device,
                                cuda::WithShape(p.states, [](auto shape) { return int64_t{shape.kForwardBytes}; }));
  return {reason.c_str()};
}

cuda::DeviceTokens OnDevice(const Tokens& t) { return {t.data, t.dtype, t.token, t.column, t.group}; }
cuda::DeviceNumbers OnDevice(const Numbers& n) { return {n.data, n.dtype, n.channel, n.state}; }
cuda::DeviceWeights OnDevice(const Weights& w) { return {OnDevice(w.tokens), OnDevice(w.constants)}; }

int64_t OffsetOf(const Sequence& s, const Tokens& t) { return s.batch * t.batch + s.first * t.token; }
int64_t OffsetOf(const Sequence& s, const Numbers& n) { return s.state * n.sequence; }

// The launches of a call.
class Launcher {
 public:
  Launcher(const Context& ctx, const Problem& p) : p_(p), call_(kName, ctx, p.device) {}

  void Forward() const {
    cuda::ScanParams params = ParamsOf(p_.o, p_.final);
    for (size_t first = 0; first < p_.sequences.size(); first += cuda::kMostSequences) {
      const size_t count = std::min<size_t>(cuda::kMostSequences, p_.sequences.size() - first);
      Place(first, count, p_.o, p_.final, params);
      call_.Check(library().forward(call_.Of(ChannelBlocks(), 1, count), params));
    }
  }

  void Backward(const Gradients& g) const {
    cuda::GradientParams params = {.scan = ParamsOf({}, {}),
                                   .d_o = OnDevice(g.d_o),
                                   .dx = OnDevice(g.dx),
                                   .ddelta = OnDevice(g.ddelta),
                                   .dgate = OnDevice(g.dgate),
                                   .d_final = OnDevice(g.d_final),
                                   .dinitial = OnDevice(g.dinitial),
                                   .tokens = 0};
    const auto sequences = static_cast<int64_t>(p_.sequences.size());
    const heed::cuda::DeviceMemory sums = Memory<heed::cuda::Sum>(sequences * params.rows() * p_.channels);
    params.sums = static_cast<heed::cuda::Sum*>(sums.data());
    const size_t together = SequencesPerLaunch();
    for (size_t first = 0; first < p_.sequences.size(); first += together) {
      BackwardOf(first, std::min(together, p_.sequences.size() - first), g, params);
    }
    const auto store = [&](int row, int64_t states, const Numbers& to) {
      if (to.data == nullptr) return;
      call_.Check(library().constant_sums(call_.Of(Blocks(p_.channels, cuda::kSumThreads), states, 1),
                                          {.from = params.sums + row * p_.channels,
                                           .sequences = sequences,
                                           .rows = params.rows(),
                                           .channels = static_cast<int32_t>(p_.channels),
                                           .to = OnDevice(to)}));
    };
    store(0, p_.states, g.dA);
    store(params.B_row(), p_.states, g.dB.constants);
    store(params.C_row(), p_.states, g.dC.constants);
    store(params.skip_row(), 1, g.dskip);
    store(params.bias_row(), 1, g.dbias);
  }

  // Writes zeros for tokens of no sequence.
  void Clear(const Tokens& to, int64_t columns, int64_t groups) const {
    if (to.data == nullptr || columns == 0) return;
    for (size_t first = 0; first < p_.others.size(); first += cuda::kMostSequences) {
      const size_t count = std::min<size_t>(cuda::kMostSequences, p_.others.size() - first);
      AddUp(std::span(p_.others).subspan(first, count), nullptr, 0, to, columns, groups);
    }
  }

 private:
  const cuda::Launches& library() const { return *call_.library().scan; }
  template <class T>
  heed::cuda::DeviceMemory Memory(int64_t count) const {
    return {call_, static_cast<size_t>(std::max<int64_t>(1, count)) * sizeof(T)};
  }

  template <class F>
  auto WithShape(const F& f) const {
    return cuda::WithShape(p_.states, f);
  }
  int64_t ChannelBlocksOfGroup() const {
    return Blocks(p_.channels / p_.groups, WithShape([](auto shape) { return int64_t{shape.kChannels}; }));
  }
  int64_t ChannelBlocks() const { return p_.groups * ChannelBlocksOfGroup(); }
  // Returns how many sequences keep the device busy. More in one launch would only take more memory.
  size_t SequencesPerLaunch() const {
    heed::cuda::DeviceFacts facts;
    call_.Check(call_.library().examine(p_.device.index, &facts));
    const int64_t enough = Blocks(kEnoughBlocks * facts.num_sms, std::max<int64_t>(1, ChannelBlocks()));
    return static_cast<size_t>(std::clamp<int64_t>(enough, 1, cuda::kMostSequences));
  }

  cuda::ScanParams ParamsOf(const Tokens& o, const Numbers& final) const {
    return {.x = OnDevice(p_.x),
            .delta = OnDevice(p_.delta),
            .gate = OnDevice(p_.gate),
            .o = OnDevice(o),
            .B = OnDevice(p_.B),
            .C = OnDevice(p_.C),
            .A = OnDevice(p_.A),
            .skip = OnDevice(p_.skip),
            .bias = OnDevice(p_.bias),
            .initial = OnDevice(p_.initial),
            .final = OnDevice(final),
            .channels = static_cast<int32_t>(p_.channels),
            .states = static_cast<int32_t>(p_.states),
            .groups = static_cast<int32_t>(p_.groups),
            .channel_blocks = static_cast<int32_t>(ChannelBlocksOfGroup()),
            .softplus = p_.softplus};
  }
  // Sets the offsets of sequences [first, first + count), and returns the number of their tiles.
  int64_t Place(size_t first, size_t count, const Tokens& o, const Numbers& final, cuda::ScanParams& params) const {
    int64_t tiles = 0;
    for (size_t i = 0; i < count; ++i) {
      const Sequence& s = p_.sequences[first + i];
      params.sequences[i] = {.x = OffsetOf(s, p_.x),
                             .delta = OffsetOf(s, p_.delta),
                             .gate = OffsetOf(s, p_.gate),
                             .o = OffsetOf(s, o),
                             .B = OffsetOf(s, p_.B.tokens),
                             .C = OffsetOf(s, p_.C.tokens),
                             .initial = OffsetOf(s, p_.initial),
                             .final = OffsetOf(s, final),
                             .tokens = s.count,
                             .first_tile = tiles};
      tiles += Blocks(s.count, cuda::kTokens);
    }
    return tiles;
  }

  void BackwardOf(size_t first, size_t count, const Gradients& g, cuda::GradientParams& params) const {
    const std::span<const Sequence> sequences = std::span(p_.sequences).subspan(first, count);
    const int64_t tiles = Place(first, count, {}, {}, params.scan);
    params.tokens = 0;
    for (size_t i = 0; i < count; ++i) {
      const Sequence& s = sequences[i];
      params.sequences[i] = {.d_o = OffsetOf(s, g.d_o),
                             .dx = OffsetOf(s, g.dx),
                             .ddelta = OffsetOf(s, g.ddelta),
                             .dgate = OffsetOf(s, g.dgate),
                             .d_final = OffsetOf(s, g.d_final),
                             .dinitial = OffsetOf(s, g.dinitial),
                             .index = static_cast<int64_t>(first + i),
                             .first_token = params.tokens};
      params.tokens += s.count;
    }
    const auto partials = [&](const Weights& gradient) {
      return Memory<float>(gradient.tokens.data == nullptr ? 0 : params.tokens * ChannelBlocks() * p_.states);
    };
    const heed::cuda::DeviceMemory boundary_states =
                                       Memory<cuda::States>(tiles * ChannelBlocks() * WithShape([](auto shape) {
                                                              return int64_t{shape.kThreads};
                                                            })),
                                   B_partials = partials(g.dB), C_partials = partials(g.dC);
    params.scan.boundary_states = static_cast<float*>(boundary_states.data());
    params.B_partials = g.dB.tokens.data == nullptr ? nullptr : static_cast<float*>(B_partials.data());
    params.C_partials = g.dC.tokens.data == nullptr ? nullptr : static_cast<float*>(C_partials.data());
    call_.Check(library().forward(call_.Of(ChannelBlocks(), 1, count), params.scan));
    call_.Check(library().backward(call_.Of(ChannelBlocks(), 1, count), params));
    AddUp(sequences, params.B_partials, params.tokens, g.dB.tokens, p_.states, p_.groups);
    AddUp(sequences, params.C_partials, params.tokens, g.dC.tokens, p_.states, p_.groups);
  }

  // Sums over channel blocks, with `tokens` tokens in all; zeros if `from` is null.
  void AddUp(std::span<const Sequence> sequences, const float* from, int64_t tokens, const Tokens& to, int64_t columns,
             int64_t groups) const {
    if (to.data == nullptr) return;
    cuda::TokenSumParams params = {.from = from,
                                   .to = OnDevice(to),
                                   .channel_blocks = from == nullptr ? 0 : static_cast<int32_t>(ChannelBlocksOfGroup()),
                                   .columns = static_cast<int32_t>(columns),
                                   .groups = static_cast<int32_t>(groups),
                                   .tokens = tokens};
    int64_t most = 0, first_token = 0;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& s = sequences[i];
      params.runs[i] = {OffsetOf(s, to), s.count, first_token};
      most = std::max(most, s.count);
      first_token += s.count;
    }
    if (most == 0) return;
    call_.Check(library().token_sums(call_.Of(Blocks(most, cuda::kSumTokens) * groups, 1, sequences.size()), params));
  }

  const Problem& p_;
  const heed::cuda::Call call_;
};

void Forward(Context& ctx, const Problem& p) {
  const Launcher launcher(ctx, p);
  if (p.channels > 0) launcher.Forward();
  launcher.Clear(p.o, p.channels, 1);
}

void Backward(Context& ctx, const Problem& p, const Gradients& g) {
  const int64_t bytes = cuda::WithShape(p.states, [](auto shape) { return int64_t{shape.kBackwardBytes}; });
  const std::string reason = heed::cuda::Declines(p.device, bytes);
  if (!reason.empty()) throw Unsupported(std::string(kName) + ", gradients: " + reason);
  const Launcher launcher(ctx, p);
  if (p.channels > 0) launcher.Backward(g);
  for (const Tokens* to : {&g.dx, &g.ddelta, &g.dgate}) launcher.Clear(*to, p.channels, 1);
  for (const Weights* to : {&g.dB, &g.dC}) launcher.Clear(to->tokens, p.states, p.groups);
}

}  // namespace

const Kernel kCuda = {
    .name = kName,
    .why = "four or more threads of a channel share its states in registers, 16 tokens at a time in shared memory",
    .declines = &Declines,
    .forward_passes =
        [](const Context&) {
          return Passes{.forward = &Forward, .workspace = [](const Context&, const Problem&) { return int64_t{0}; }};
        },
    .backward_passes =
        [](const Context&) {
          return Passes{
              .backward = &Backward,
              .backward_workspace = [](const Context&, const Problem&, const Gradients&) { return BackwardBytes(); }};
        },
    .target = [](const Context&) { return std::string("cuda"); },
    .device = DeviceType::kCuda,
};

}  // namespace heed::scan

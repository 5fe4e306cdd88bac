// The kernel of GPUs in the list: what it takes, and problems as its launches.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "heed/cuda/calls.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/recurrence/cuda/launches.h"
#include "heed/engines/recurrence/kernels.h"

namespace heed::recurrence {
namespace {

constexpr char kName[] = "recurrence_cuda";
constexpr int64_t kMostHeads = 65535;  // blocks of a grid on its second axis
constexpr int64_t kSegmentUnit = 64, kLeastSegment = 256;  // tokens

Reason DeclinesForm(const Problem& p) {
  const std::pair<bool, const char*> forms[] = {
      {!IsElementwise(p.feature) || !IsElementwise(p.key_feature), "computes feature maps of each channel by itself"},
      {p.normalize, "computes no normalisers"},
      {!p.causal || p.key_mask.data != nullptr, "computes causal calls without a key mask"},
      {p.has_value_decay, "computes no decays of columns"},
      {p.gate == Gate::kKey && p.constant_decay, "computes no constant decays of channels"},
      {p.has_bonus, "computes no bonus"},
      {p.exp_gates || p.channels, "computes no running maxima"},
      {p.delta == Delta::kBeforeDecay || p.writes != 1 || p.erase.data != nullptr || p.write.data != nullptr,
       "computes delta rules of one write per token, after the decay, without factors by channel"},
      {p.value_factors.data != nullptr || p.skip.data != nullptr || p.output_gate.data != nullptr,
       "computes nothing around the recurrence"},
      {p.key_size > cuda::kMostKeys, "takes up to 256 key channels"},
      {p.value_heads > kMostHeads, "takes up to 65535 heads"},
      {p.constant_decay && p.value_heads > cuda::kMostDecays, "takes up to 1024 constant decays"}};
  for (const auto& [given, words] : forms) {
    if (given) return {words};
  }
  return {};
}

// Whether each row begins at a multiple of 16 bytes.
bool IsAligned(const Rows& rows) {
  const auto address = reinterpret_cast<uintptr_t>(rows.data);
  const auto strides = static_cast<uintptr_t>(rows.batch_stride | rows.token_stride | rows.head_stride);
  const size_t size = SizeOf(rows.dtype);
  return (address / size | strides) % (heed::cuda::kPiece * sizeof(uint16_t) / size) == 0;
}

cuda::Map MapOf(Feature feature) {
  switch (feature) {
    case Feature::kElu1: return cuda::Map::kElu1;
    case Feature::kRelu: return cuda::Map::kRelu;
    case Feature::kReluSquared: return cuda::Map::kReluSquared;
    case Feature::kExp: return cuda::Map::kExp;
    default: return cuda::Map::kIdentity;  // others are declined
  }
}

cuda::DeviceRows OnDevice(const Rows& rows) { return {rows.data, rows.dtype, rows.token_stride, rows.head_stride}; }
cuda::DeviceStates OnDevice(const States& s) {
  return {static_cast<float*>(const_cast<void*>(s.data)), s.head_stride, s.key_stride, s.value_stride};
}

// How long sequences are cut.
struct Segments {
  int64_t tokens, count;
};

// As many as keep the device busy, which one per head and strip of columns may not; no bit depends on it.
Segments SegmentsFor(const heed::cuda::Call& call, const Problem& p, int64_t parts) {
  int64_t longest = 1;
  for (const Sequence& s : p.sequences) longest = std::max(longest, s.count);
  heed::cuda::DeviceFacts facts;
  call.Check(call.library().examine(p.device.index, &facts));
  const int64_t blocks = parts * p.value_heads * static_cast<int64_t>(p.sequences.size());
  const int64_t wanted = 2 * facts.multiprocessors / std::max<int64_t>(blocks, 1);
  const auto in_units = [](int64_t tokens) { return (tokens + kSegmentUnit - 1) / kSegmentUnit * kSegmentUnit; };
  const int64_t tokens = wanted < 2 ? in_units(longest) : std::max(kLeastSegment, in_units((longest + wanted - 1) / wanted));
  return {tokens, (longest + tokens - 1) / tokens};
}

cuda::ChunkParams ParamsOf(const Problem& p, const States& initial) {
  cuda::ChunkParams params = {.q = OnDevice(p.q),
                              .k = OnDevice(p.k),
                              .v = OnDevice(p.v),
                              .o = OnDevice(p.o),
                              .log_decay = OnDevice(p.log_decay),
                              .beta = OnDevice(p.beta),
                              .read_key = OnDevice(p.read_key),
                              .initial = OnDevice(initial),
                              .final = OnDevice(p.final),
                              .borders = nullptr,
                              .segment_tokens = kSegmentUnit,
                              .parts = 1,
                              .to_borders = false,
                              .aligned = IsAligned(p.q) && IsAligned(p.k) && IsAligned(p.v) && IsAligned(p.o) &&
                                         IsAligned(p.read_key),
                              .decays_aligned = IsAligned(p.log_decay),
                              .complement_keys = p.complement_keys,
                              .group = static_cast<int32_t>(p.group()),
                              .heads = static_cast<int32_t>(p.value_heads),
                              .key_size = static_cast<int32_t>(p.key_size),
                              .value_size = static_cast<int32_t>(p.value_size),
                              .scale = static_cast<float>(p.scale),
                              .decay = p.gate == Gate::kNone ? cuda::DecayKind::kNone
                                       : p.constant_decay    ? cuda::DecayKind::kConstant
                                       : p.gate == Gate::kKey ? cuda::DecayKind::kKey
                                                              : cuda::DecayKind::kToken,
                              .query_map = MapOf(p.feature),
                              .key_map = MapOf(p.key_feature)};
  if (params.decay != cuda::DecayKind::kConstant) return params;
  for (int64_t head = 0; head < p.value_heads; ++head) {
    params.log_decays[head] = static_cast<const float*>(p.log_decay.data)[head * p.log_decay.head_stride];
  }
  return params;
}

int64_t SharedBytes(const Problem& p) {
  return cuda::WithShape(p.key_size, cuda::IsByChannel(ParamsOf(p, p.initial)), [&](auto shape) {
    return int64_t{shape.SharedBytes(p.delta != Delta::kNone, p.read_key.data != nullptr)};
  });
}

Reason Declines(const Context&, const Problem& p) {
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) return {"computes bf16 and f16", Name(p.dtype)};
  if (const Reason reason = DeclinesForm(p); !reason.empty()) return reason;
  thread_local std::string of_device;  // whose words last until the next call
  of_device = heed::cuda::Declines(p.device, SharedBytes(p));
  return {of_device.c_str()};
}

cuda::DeviceSequence OnDevice(const Problem& p, const States& initial, const Sequence& s, bool is_zero) {
  const auto offset = [&](const Rows& rows) { return s.batch * rows.batch_stride + s.first * rows.token_stride; };
  return {.q = offset(p.q),
          .k = offset(p.k),
          .v = offset(p.v),
          .o = offset(p.o),
          .log_decay = offset(p.log_decay),
          .beta = offset(p.beta),
          .read_key = offset(p.read_key),
          .initial = s.state * initial.sequence_stride,
          .final = s.state * p.final.sequence_stride,
          .tokens = s.count,
          .borders = 0,
          .is_zero = is_zero};
}

// f(sequences) for as many as a launch takes.
template <class F>
void ForLaunches(const std::vector<Sequence>& sequences, const F& f) {
  for (size_t first = 0; first < sequences.size(); first += cuda::kMostSequences) {
    f(std::span(sequences).subspan(first, std::min<size_t>(cuda::kMostSequences, sequences.size() - first)));
  }
}

void Compute(Context& ctx, const Problem& p, const States& initial) {
  if (p.value_heads == 0) return;
  const heed::cuda::Call call(kName, ctx, p.device);
  const int64_t parts = (p.value_size + cuda::kStrip - 1) / cuda::kStrip;
  const Segments segments = SegmentsFor(call, p, parts);
  cuda::ChunkParams params = ParamsOf(p, initial);
  params.parts = static_cast<int32_t>(parts);
  params.segment_tokens = segments.tokens;
  const auto segments_of = [&](int64_t tokens) {
    return std::max<int64_t>(1, (tokens + segments.tokens - 1) / segments.tokens);
  };
  const int64_t state = p.value_heads * p.key_size * p.value_size;
  const auto launch = [&](std::span<const Sequence> sequences, int64_t of_each) {
    call.Check(call.library().recurrence->forward(call.Of(parts * of_each, p.value_heads, sequences.size()), p.dtype,
                                                  p.delta != Delta::kNone, params));
  };
  ForLaunches(p.sequences, [&](std::span<const Sequence> sequences) {
    int64_t most = 1, borders = 0;
    for (size_t i = 0; i < sequences.size(); ++i) {
      params.sequences[i] = OnDevice(p, initial, sequences[i], false);
      params.sequences[i].borders = borders * state;
      most = std::max(most, segments_of(sequences[i].count));
      borders += segments_of(sequences[i].count) - 1;
    }
    if (most == 1) return launch(sequences, 1);
    const heed::cuda::DeviceMemory memory(call, static_cast<size_t>(borders * state) * sizeof(float));
    params.borders = static_cast<float*>(memory.data());
    params.to_borders = true;
    launch(sequences, 1);
    params.to_borders = false;
    launch(sequences, most);
  });
  ForLaunches(p.others, [&](std::span<const Sequence> sequences) {
    int64_t most = 1;
    for (size_t i = 0; i < sequences.size(); ++i) {
      params.sequences[i] = OnDevice(p, initial, sequences[i], true);
      most = std::max(most, segments_of(sequences[i].count));
    }
    launch(sequences, most);
  });
}

}  // namespace

const Kernel kCuda = {
    .name = kName,
    .why = "64 columns of a state in the registers of a block, 16 tokens at a time, products of bf16 pieces summed in f32",
    .declines = &Declines,
    .forward_passes = [](const Context&) {
      return Passes{.forward = [](Context& ctx, const Problem& p) { Compute(ctx, p, p.initial); },
                    .workspace = [](const Context&, const Problem&) { return int64_t{0}; },
                    .step = [](Context& ctx, const Problem& p) { Compute(ctx, p, p.final); }};
    },
    .target = [](const Context&) { return std::string("cuda"); },
    .device = DeviceType::kCuda,
};

}  // namespace heed::recurrence

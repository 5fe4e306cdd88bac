// Problems as sweeps, and the launches of sweeps.
#include "heed/engines/recurrence/cuda/sweeps.h"

#include <algorithm>
#include <string>
#include <utility>

#include "heed/core/error.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/recurrence/cuda/launches.h"

namespace heed::recurrence::cuda {
namespace {

constexpr int64_t kLeastSegment = 4 * kBlock;  // tokens

int64_t Blocks(int64_t size, int64_t of_each) { return (size + of_each - 1) / of_each; }

// True if each row begins at a multiple of 16 bytes.
bool IsAligned(const Rows& rows) {
  const auto address = reinterpret_cast<uintptr_t>(rows.data);
  const auto strides =
      static_cast<uintptr_t>(rows.batch_stride | rows.token_stride | rows.head_stride | rows.write_stride);
  const size_t size = SizeOf(rows.dtype);
  return (address / size | strides) % (heed::cuda::kUnitBytes / size) == 0;
}

// Calls f(first, count) for each launch's sequences.
template <class F>
void ForLaunches(size_t sequences, const F& f) {
  for (size_t first = 0; first < sequences; first += kMostSequences) {
    f(first, std::min<size_t>(kMostSequences, sequences - first));
  }
}

// Returns the launch parameters of a sweep's tensors.
ChunkParams ParamsOf(const Sweep& w) {
  ChunkParams params = w.params;
  const bool reversed = params.reversed;
  params.q = OnDevice(w.q, w.q_group, reversed);
  params.k = OnDevice(w.k, w.k_group, reversed);
  params.v = OnDevice(w.v, w.v_group, reversed);
  params.o = OnDevice(w.o, 1, reversed);
  params.log_decay = OnDevice(w.log_decay, 1, reversed);
  params.value_decay = OnDevice(w.value_decay, 1, reversed);
  params.beta = OnDevice(w.beta, 1, reversed);
  params.read_key = OnDevice(w.read_key, w.read_group, reversed);
  params.skip = OnDevice(w.skip);
  params.output_gate = OnDevice(w.output_gate);
  params.initial = OnDevice(w.initial);
  params.final = OnDevice(w.final);
  params.initial_z = OnDevice(w.initial_z);
  params.final_z = OnDevice(w.final_z);
  params.aligned = std::ranges::all_of(
      std::initializer_list<Rows>{w.q, w.k, w.v, w.into_memory ? Rows() : w.o, w.read_key}, &IsAligned);
  params.decays_aligned = IsAligned(w.log_decay) && IsAligned(w.value_decay);
  params.column_blocks = static_cast<int32_t>(Blocks(params.value_size, kColumnBlock));
  return params;
}

}  // namespace

Map MapOf(Feature feature) {
  switch (feature) {
    case Feature::kElu1: return Map::kElu1;
    case Feature::kRelu: return Map::kRelu;
    case Feature::kReluSquared: return Map::kReluSquared;
    case Feature::kExp: return Map::kExp;
    default: return Map::kIdentity;  // Declines() excludes others
  }
}

Rows FactorsOf(const Problem& p) { return p.delta != Delta::kNone ? p.beta : p.value_factors; }

Sweep SweepOf(const Problem& p) {
  Sweep w;
  w.params = {.q = {},
              .k = {},
              .v = {},
              .o = {},
              .log_decay = {},
              .value_decay = {},
              .beta = {},
              .read_key = {},
              .skip = {},
              .output_gate = {},
              .initial = {},
              .final = {},
              .initial_z = {},
              .final_z = {},
              .segment_tokens = kBlock,
              .column_blocks = 1,
              .states_only = false,
              .aligned = false,
              .decays_aligned = false,
              .complement_keys = p.complement_keys,
              .reversed = false,
              .decays_after_update = false,
              .strict = false,
              .writes = static_cast<int32_t>(p.writes),
              .reads_once = false,
              .writes_once = false,
              .reads_only = false,
              .reads_before_decay = false,
              .heads = static_cast<int32_t>(p.value_heads),
              .key_size = static_cast<int32_t>(p.key_size),
              .value_size = static_cast<int32_t>(p.value_size),
              .scale = static_cast<float>(p.scale),
              .write_scale = 1,
              .normalizes = false,
              .adds = false,
              .start = Start::kSegments,
              .delta = DeltaKind::kNone,
              .decay = p.gate == Gate::kNone  ? DecayKind::kNone
                       : p.gate == Gate::kKey ? DecayKind::kKey
                       : p.constant_decay     ? DecayKind::kConstant
                                              : DecayKind::kToken,
              .query_map = MapOf(p.feature),
              .key_map = MapOf(p.key_feature),
              .value_map = Map::kIdentity};
  w.read_group = ReadGroup(p);
  w.log_decay = p.log_decay;
  w.value_decay = p.log_value_decay;
  if (w.params.decay != DecayKind::kConstant) return w;
  for (int64_t head = 0; head < p.value_heads; ++head) {
    w.params.log_decays[head] = static_cast<const float*>(p.log_decay.data)[head * p.log_decay.head_stride];
  }
  w.log_decay = {};  // not on the device
  return w;
}

Sweep ForwardSweep(const Problem& p, const States& initial, const States& initial_z) {
  Sweep w = SweepOf(p);
  w.q = p.q;
  w.k = p.k;
  w.v = p.v;
  w.o = p.o;
  w.beta = FactorsOf(p);
  w.skip = p.skip;
  w.output_gate = p.output_gate;
  w.read_key = p.read_key;
  w.q_group = w.k_group = p.group();
  w.params.strict = p.has_bonus;
  w.params.reads_before_decay = ReadsBeforeDecay(p);
  w.params.writes_once = p.delta == Delta::kBeforeDecay;
  if (p.delta != Delta::kNone) w.params.delta = DeltaKind::kRule;
  w.params.reads_once = true;
  w.initial = initial;
  w.final = p.final;
  if (!p.normalize) return w;
  w.params.normalizes = true;  // one more column
  ++w.params.value_size;
  w.initial_z = initial_z;
  w.final_z = p.final_z;
  return w;
}

DeviceRows OnDevice(const Rows& rows, int64_t group, bool reversed) {
  const int64_t sign = reversed ? -1 : 1;
  return {rows.data,
          rows.dtype,
          sign * rows.token_stride,
          rows.head_stride,
          static_cast<int32_t>(group),
          sign * rows.write_stride};
}
DeviceStates OnDevice(const States& s) {
  return {static_cast<float*>(const_cast<void*>(s.data)), s.head_stride, s.key_stride, s.value_stride};
}
States Transposed(States s) {
  std::swap(s.key_stride, s.value_stride);
  return s;
}

std::string Declines(Device device, const Sweep& w) {
  ChunkParams params = ParamsOf(w);
  params.key_size = static_cast<int32_t>(std::min<int64_t>(params.key_size, kMostKeys));
  const auto bytes = [&](auto shape) { return int64_t{SharedBytesOf<decltype(shape)>(params)}; };
  return heed::cuda::Declines(
      device, IsByChannel(params) ? WithShape<true>(params.key_size, bytes) : WithShape<false>(params.key_size, bytes));
}

Launcher::Launcher(const Context& ctx, const Problem& p) : p_(p), call_(kName, ctx, p.device) {
  for (const Sequence& s : p.sequences) {
    first_tokens_.push_back(tokens_);
    first_blocks_.push_back(blocks_);
    tokens_ += s.count;
    blocks_ += Blocks(s.count * p.writes, kBlock);
    longest_ = std::max(longest_, s.count * p.writes);
  }
}

void Launcher::Run(const Sweep& w) const {
  if (p_.causal) return RunCausal(w);
  int64_t states = 0;
  for (const Sequence& s : p_.sequences) states = std::max(states, s.state + 1);
  const int64_t columns = w.params.value_size, of_head = w.params.key_size * columns,
                of_sequence = p_.value_heads * of_head;
  const Floats sums(call_, true, states * of_sequence);
  const States all = {sums.data(), of_sequence, of_head, columns, 1};
  const States last = {sums.data() + columns - 1, of_sequence, of_head, columns, 1};
  Sweep sum = w, read = w;
  sum.o = {};
  sum.final = read.initial = all;
  if (w.params.normalizes) sum.final_z = read.initial_z = last;
  read.params.reads_only = true;
  RunCausal(sum);
  RunCausal(read);
}

void Launcher::RunCausal(Sweep w) const {
  const int64_t keys = w.params.key_size, heads = p_.value_heads, columns = w.params.value_size;
  if (keys <= kMostKeys) return RunSlice(w);
  const Rows o = w.o;
  const bool gathers = o.data != nullptr && !w.into_memory;
  const Floats sums(call_, gathers, tokens_ * heads * columns);
  if (gathers) {
    w.o = InMemory(sums, columns);
    w.into_memory = true;
  }
  for (int64_t first = 0; first < keys; first += kMostKeys) {
    Sweep slice = w;
    const auto skip = [&](Rows& rows) {
      if (rows.data != nullptr)
        rows.data = static_cast<const char*>(rows.data) + first * static_cast<int64_t>(SizeOf(rows.dtype));
    };
    const auto skip_states = [&](States& s) {
      if (s.data != nullptr) s.data = static_cast<const float*>(s.data) + first * s.key_stride;
    };
    skip(slice.q);
    skip(slice.k);
    if (w.params.decay == DecayKind::kKey) skip(slice.log_decay);
    if (w.params.reads_before_decay && first > 0) slice.beta = {};  // it covers all channels
    for (States* s : {&slice.initial, &slice.final, &slice.initial_z, &slice.final_z}) skip_states(*s);
    slice.params.key_size = static_cast<int32_t>(std::min(kMostKeys, keys - first));
    if (w.params.block_states != nullptr) slice.params.block_states += blocks_ * heads * first * columns;
    if (w.params.start_states != nullptr) slice.params.start_states += first * columns;
    slice.params.adds = w.params.adds || first > 0;
    RunSlice(slice);
  }
  if (gathers) Gather({.from = sums.data()}, o, heads, columns);
}

BonusParams Launcher::BonusOf(const Problem& p) const {
  return {.q = OnDevice(p.q, p.group()),
          .k = OnDevice(p.k, p.group()),
          .v = {},
          .d_o = {},
          .u = OnDevice(p.bonus),
          .scale = static_cast<float>(p.scale),
          .value_heads = static_cast<int32_t>(p.value_heads),
          .key_size = static_cast<int32_t>(p.key_size),
          .value_size = static_cast<int32_t>(p.value_size)};
}

void Launcher::RunWithBonus(Sweep w) const {
  if (!p_.has_bonus) return Run(w);
  const Floats weights(call_, true, tokens_ * p_.value_heads);
  BonusParams params = BonusOf(p_);
  params.weights = weights.data();
  Run(kernels().bonus_weights, p_.sequences, {.q = p_.q, .k = p_.k}, p_.value_heads, params);
  w.beta = InMemory(weights, 1);
  w.beta_in_memory = true;
  Run(w);
}

void Launcher::SumTokens(const Floats& from, int64_t tokens, int64_t size, const Rows& to) const {
  call_.Check(kernels().token_sums(call_.Of(Blocks(size, kSummedColumns), p_.value_heads, 1),
                                   {.from = from.data(),
                                    .tokens = tokens,
                                    .value_heads = static_cast<int32_t>(p_.value_heads),
                                    .size = static_cast<int32_t>(size),
                                    .to = OnDevice(to)}));
}

std::vector<Launcher::GradientLaunch> Launcher::GradientLaunches(const std::vector<Sequence>& sequences,
                                                                 const GradientRows& rows, int64_t writes) const {
  std::vector<GradientLaunch> launches;
  ForLaunches(sequences.size(), [&](size_t first, size_t count) {
    GradientLaunch launch;
    for (size_t i = first; i < first + count; ++i) {
      const Sequence& s = sequences[i];
      const auto offset = [&](const Rows& of) { return s.batch * of.batch_stride + s.first * of.token_stride; };
      const bool counts = &sequences != &p_.others;
      const int64_t first_token = counts ? first_tokens_[i] : 0;
      launch.sequences.push_back({.q = offset(rows.q),
                                  .k = offset(rows.k),
                                  .v = offset(rows.v),
                                  .d_o = offset(rows.d_o),
                                  .read_key = offset(rows.read_key),
                                  .beta = offset(rows.beta),
                                  .log_decay = offset(rows.log_decay),
                                  .to = rows.into_memory ? first_token * rows.to.token_stride : offset(rows.to),
                                  .first_token = first_token * writes,
                                  .first_block = counts ? first_blocks_[i] : 0,
                                  .tokens = s.count * writes,
                                  .d_final = s.state * rows.d_final.sequence_stride,
                                  .state = s.state});
      launch.blocks = std::max(launch.blocks, Blocks(s.count * writes, kBlock));
    }
    launches.push_back(std::move(launch));
  });
  return launches;
}

void Launcher::Gather(const std::vector<Sequence>& sequences, const Gathered& what, const Rows& to, int64_t heads,
                      int64_t size) const {
  if (to.data == nullptr) return;
  const GatherParams params = {.from = what.from,
                               .less = what.less,
                               .from_factors = OnDevice(what.from_factors, what.factors_group),
                               .less_factors = OnDevice(what.less_factors, what.factors_group),
                               .q = OnDevice(what.q),
                               .beta = OnDevice(what.beta),
                               .to = OnDevice(to),
                               .map = MapOf(what.feature),
                               .value_heads = static_cast<int32_t>(p_.value_heads),
                               .group = static_cast<int32_t>(p_.value_heads / heads),
                               .size = static_cast<int32_t>(size),
                               .row = static_cast<int32_t>(size + what.skipped + (what.divides ? 1 : 0)),
                               .divides = what.divides,
                               .floors = what.floors,
                               .eps = static_cast<float>(p_.eps),
                               .writes = static_cast<int32_t>(what.writes),
                               .slots = static_cast<int32_t>(what.slots),
                               .slot = static_cast<int32_t>(what.slot)};
  Run(kernels().gather, sequences,
      {.q = what.q, .v = what.from_factors, .d_o = what.less_factors, .beta = what.beta, .to = to}, heads, params);
}

void Launcher::RunSlice(const Sweep& w) const {
  ChunkParams params = ParamsOf(w);
  params.segment_tokens = params.start == Start::kSegments ? SegmentTokens(params.column_blocks) : kBlock;
  ForLaunches(p_.sequences.size(), [&](size_t first, size_t count) { Run(w, params, first, count); });
}

// Returns the segment length that keeps the device busy, which one block per head and column block may not. Bits do not
// depend on it.
int64_t Launcher::SegmentTokens(int64_t column_blocks) const {
  heed::cuda::DeviceFacts facts;
  call_.Check(call_.library().examine(p_.device.index, &facts));
  const int64_t blocks =
      std::max<int64_t>(1, column_blocks * p_.value_heads * static_cast<int64_t>(p_.sequences.size()));
  const int64_t wanted = std::max<int64_t>(1, 2 * facts.num_sms / blocks);
  const auto in_blocks = [](int64_t tokens) { return Blocks(tokens, kBlock) * kBlock; };
  const int64_t whole = in_blocks(longest_ + kBlock);  // the first tile of a reversed sweep may be short
  return wanted == 1 ? whole : std::min(whole, std::max(kLeastSegment, in_blocks(Blocks(longest_, wanted))));
}

void Launcher::Run(const Sweep& w, ChunkParams& params, size_t first, size_t num_sequences) const {
  const int64_t state = p_.value_heads * params.key_size * params.value_size;
  int64_t most = 1, segment_states = 0;
  for (size_t i = 0; i < num_sequences; ++i) {
    const Sequence& s = p_.sequences[first + i];
    const int64_t begin = params.reversed ? s.count - 1 : 0, count = s.count * p_.writes;
    const auto offset = [&](const Rows& rows, bool in_memory = false) {
      const int64_t of_write = params.reversed ? (p_.writes - 1) * rows.write_stride : 0;
      if (in_memory) return (first_tokens_[first + i] + begin) * rows.token_stride + of_write;
      return s.batch * rows.batch_stride + (s.first + begin) * rows.token_stride + of_write;
    };
    const int64_t shift = params.reversed ? (kBlock - count % kBlock) % kBlock : 0;
    // One more if a decay after the update is applied to the final state.
    const int64_t swept = count + (params.decays_after_update && params.final.data != nullptr ? 1 : 0);
    const int64_t segments = std::max<int64_t>(1, Blocks(swept + shift, params.segment_tokens));
    params.sequences[i] = {.q = offset(w.q, w.q_in_memory),
                           .k = offset(w.k, w.k_in_memory),
                           .v = offset(w.v, w.v_in_memory),
                           .o = offset(w.o, w.into_memory),
                           .log_decay = offset(w.log_decay),
                           .value_decay = offset(w.value_decay),
                           .beta = offset(w.beta, w.beta_in_memory),
                           .read_key = offset(w.read_key),
                           .output_gate = offset(w.output_gate),
                           .initial = s.state * w.initial.sequence_stride,
                           .final = s.state * w.final.sequence_stride,
                           .initial_z = s.state * w.initial_z.sequence_stride,
                           .final_z = s.state * w.final_z.sequence_stride,
                           .tokens = count,
                           .segment_states = segment_states * state,
                           .first_block = first_blocks_[first + i],
                           .shift = static_cast<int32_t>(shift)};
    most = std::max(most, segments);
    segment_states += segments - 1;
  }
  const auto launch = [&](int64_t of_each) {
    call_.Check(kernels().sweep(call_.Of(params.column_blocks * of_each, p_.value_heads, num_sequences), params));
  };
  if (most == 1 || params.start != Start::kSegments) return launch(most);
  const Floats memory(call_, true, segment_states * state);
  params.segment_states = memory.data();
  params.states_only = true;
  launch(1);
  params.states_only = false;
  launch(most);
}

}  // namespace heed::recurrence::cuda

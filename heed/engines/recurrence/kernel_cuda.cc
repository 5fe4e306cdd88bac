// The kernel of GPUs in the list: what it takes, and problems as its launches.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/cuda/calls.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/recurrence/cuda/launches.h"
#include "heed/engines/recurrence/kernels.h"

namespace heed::recurrence {
namespace {

constexpr char kName[] = "recurrence_cuda";
constexpr int64_t kMostHeads = 65535;  // blocks of a grid on its second axis
constexpr int64_t kLeastSegment = 4 * cuda::kBlock;  // tokens

int64_t Blocks(int64_t size, int64_t of_each) { return (size + of_each - 1) / of_each; }

Reason DeclinesForm(const Problem& p) {
  const std::pair<bool, const char*> forms[] = {
      {!IsElementwise(p.feature) || !IsElementwise(p.key_feature), "computes feature maps of each channel by itself"},
      {!p.causal || p.key_mask.data != nullptr, "computes causal calls without a key mask"},
      {p.has_value_decay, "computes no decays of columns beside those of channels"},  // the product of both may overflow
      {p.gate == Gate::kKey && p.constant_decay, "computes no constant decays of channels"},
      {p.has_bonus, "computes no bonus"},
      {p.exp_gates || p.channels, "computes no running maxima"},
      {p.delta == Delta::kBeforeDecay || p.writes != 1 || p.erase.data != nullptr || p.write.data != nullptr,
       "computes delta rules of one write per token, after the decay, without factors by channel"},
      {p.value_factors.data != nullptr || p.skip.data != nullptr || p.output_gate.data != nullptr,
       "computes nothing around the recurrence"},
      {p.delta != Delta::kNone && p.key_size > cuda::kMostKeys, "computes delta rules of up to 128 key channels"},
      {p.value_heads > kMostHeads, "takes up to 65535 heads"},
      {p.constant_decay && p.value_heads > cuda::kMostDecays, "takes up to 1024 constant decays"}};
  for (const auto& [given, words] : forms) {
    if (given) return {words};
  }
  return {};
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

// A walk over all tokens: its tensors, and in `params` all that is none.
struct Walk {
  Rows q, k, v, o, log_decay, value_decay, beta, read_key;
  States initial, final, initial_z, final_z;
  int64_t q_group = 1, k_group = 1, v_group = 1;  // value heads that share a row
  bool against = false;                           // time
  bool into_memory = false;                       // o is [token of all sequences][head][column], of f32
  cuda::ChunkParams params;
};

// What all walks of a problem have, and those of S that of one number per head.
Walk WalkOf(const Problem& p) {
  Walk w;
  w.params = {.q = {},
              .k = {},
              .v = {},
              .o = {},
              .log_decay = {},
              .value_decay = {},
              .beta = {},
              .read_key = {},
              .initial = {},
              .final = {},
              .initial_z = {},
              .final_z = {},
              .segment_tokens = cuda::kBlock,
              .parts = 1,
              .to_borders = false,
              .aligned = false,
              .decays_aligned = false,
              .complement_keys = p.complement_keys,
              .late = false,
              .heads = static_cast<int32_t>(p.value_heads),
              .key_size = static_cast<int32_t>(p.key_size),
              .value_size = static_cast<int32_t>(p.value_size),
              .scale = static_cast<float>(p.scale),
              .write_scale = 1,
              .normalizes = false,
              .adds = false,
              .decay = p.gate == Gate::kNone   ? cuda::DecayKind::kNone
                       : p.constant_decay      ? cuda::DecayKind::kConstant
                       : p.gate == Gate::kKey  ? cuda::DecayKind::kKey
                                               : cuda::DecayKind::kToken,
              .query_map = MapOf(p.feature),
              .key_map = MapOf(p.key_feature),
              .value_map = cuda::Map::kIdentity};
  w.log_decay = p.log_decay;
  w.value_decay = p.log_value_decay;
  if (w.params.decay != cuda::DecayKind::kConstant) return w;
  for (int64_t head = 0; head < p.value_heads; ++head) {
    w.params.log_decays[head] = static_cast<const float*>(p.log_decay.data)[head * p.log_decay.head_stride];
  }
  w.log_decay = {};  // they are not on the device
  return w;
}

Walk ForwardWalk(const Problem& p, const States& initial, const States& initial_z) {
  Walk w = WalkOf(p);
  w.q = p.q;
  w.k = p.k;
  w.v = p.v;
  w.o = p.o;
  w.beta = p.beta;
  w.read_key = p.read_key;
  w.q_group = w.k_group = p.group();
  w.initial = initial;
  w.final = p.final;
  if (!p.normalize) return w;
  w.params.normalizes = true;  // a column more
  ++w.params.value_size;
  w.initial_z = initial_z;
  w.final_z = p.final_z;
  return w;
}

// Of a block.
int64_t SharedBytes(const Problem& p, Walk w) {
  w.params.read_key.data = w.read_key.data;
  w.params.value_decay.data = w.value_decay.data;
  const auto bytes = [&](auto shape) {
    return int64_t{cuda::SharedBytesOf<decltype(shape)>(p.delta != Delta::kNone, w.params)};
  };
  return cuda::IsByChannel(w.params) ? cuda::WithShape<true>(w.params.key_size, bytes)
                                     : cuda::WithShape<false>(w.params.key_size, bytes);
}

Reason Declines(const Context&, const Problem& p) {
  if (const Reason reason = engine::DeclinesAllButBF16(p.dtype); !reason.empty()) return reason;
  if (const Reason reason = DeclinesForm(p); !reason.empty()) return reason;
  thread_local std::string of_device;  // whose words last until the next call
  of_device = heed::cuda::Declines(p.device, SharedBytes(p, ForwardWalk(p, p.initial, p.initial_z)));
  return {of_device.c_str()};
}

// Whether each row begins at a multiple of 16 bytes.
bool IsAligned(const Rows& rows) {
  const auto address = reinterpret_cast<uintptr_t>(rows.data);
  const auto strides = static_cast<uintptr_t>(rows.batch_stride | rows.token_stride | rows.head_stride);
  const size_t size = SizeOf(rows.dtype);
  return (address / size | strides) % (heed::cuda::kPiece * sizeof(uint16_t) / size) == 0;
}

cuda::DeviceRows OnDevice(const Rows& rows, int64_t group = 1, bool against = false) {
  return {rows.data, rows.dtype, against ? -rows.token_stride : rows.token_stride, rows.head_stride,
          static_cast<int32_t>(group)};
}
cuda::DeviceStates OnDevice(const States& s) {
  return {static_cast<float*>(const_cast<void*>(s.data)), s.head_stride, s.key_stride, s.value_stride};
}
States Transposed(States s) {
  std::swap(s.key_stride, s.value_stride);
  return s;
}

// f(first, count) for as many sequences as a launch takes.
template <class F>
void ForLaunches(size_t sequences, const F& f) {
  for (size_t first = 0; first < sequences; first += cuda::kMostSequences) {
    f(first, std::min<size_t>(cuda::kMostSequences, sequences - first));
  }
}

// The launches of a call.
class Launcher {
 public:
  Launcher(const Context& ctx, const Problem& p) : p_(p), call_(kName, ctx, p.device) {
    for (const Sequence& s : p.sequences) {
      first_tokens_.push_back(tokens_);
      first_blocks_.push_back(blocks_);
      tokens_ += s.count;
      blocks_ += Blocks(s.count, cuda::kBlock);
      longest_ = std::max(longest_, s.count);
    }
  }

  const heed::cuda::Call& call() const { return call_; }
  int64_t tokens() const { return tokens_; }  // of all sequences
  int64_t blocks() const { return blocks_; }

  // Keys of more channels than a walk takes are several walks, whose outputs are summed.
  void Run(Walk w) const {
    const int64_t keys = w.params.key_size, heads = p_.value_heads, columns = w.params.value_size;
    if (keys <= cuda::kMostKeys) return RunSlice(w);
    const Rows o = w.o;
    const bool gathers = o.data != nullptr && !w.into_memory;
    const heed::cuda::DeviceMemory sums(call_, static_cast<size_t>(gathers ? tokens_ * heads * columns : 0) * sizeof(float) + 1);
    if (gathers) {
      w.o = {sums.data(), DType::kF32, 0, heads * columns, columns};
      w.into_memory = true;
    }
    for (int64_t first = 0; first < keys; first += cuda::kMostKeys) {
      Walk slice = w;
      const auto skip = [&](Rows& rows) {
        if (rows.data != nullptr) rows.data = static_cast<const char*>(rows.data) + first * static_cast<int64_t>(SizeOf(rows.dtype));
      };
      const auto skip_states = [&](States& s) {
        if (s.data != nullptr) s.data = static_cast<const float*>(s.data) + first * s.key_stride;
      };
      skip(slice.q);
      skip(slice.k);
      if (w.params.decay == cuda::DecayKind::kKey) skip(slice.log_decay);
      skip_states(slice.initial);
      skip_states(slice.final);
      skip_states(slice.initial_z);
      skip_states(slice.final_z);
      slice.params.key_size = static_cast<int32_t>(std::min(cuda::kMostKeys, keys - first));
      if (w.params.kept != nullptr) slice.params.kept += blocks_ * heads * first * columns;
      slice.params.adds = first > 0;
      RunSlice(slice);
    }
    if (gathers) Gather(p_.sequences, static_cast<const float*>(sums.data()), {}, Feature::kIdentity, o, heads, columns);
  }

  // f(params of sequences [first, ...), how many) for launches over blocks of 64 tokens; `to` may be [token of all sequences].
  template <class Params, class F>
  void ForGradients(const std::vector<Sequence>& sequences, const Rows& q, const Rows& k, const Rows& to, bool into_memory,
                    Params params, const F& f) const {
    ForLaunches(sequences.size(), [&](size_t first, size_t count) {
      int64_t most = 0;
      for (size_t i = 0; i < count; ++i) {
        const Sequence& s = sequences[first + i];
        const auto offset = [&](const Rows& rows) { return s.batch * rows.batch_stride + s.first * rows.token_stride; };
        const bool counts = &sequences == &p_.sequences;
        const int64_t first_token = counts ? first_tokens_[first + i] : 0, first_block = counts ? first_blocks_[first + i] : 0;
        params.sequences[i] = {offset(q),   offset(k),   into_memory ? first_token * to.token_stride : offset(to),
                               first_token, first_block, s.count};
        most = std::max(most, Blocks(s.count, cuda::kBlock));
      }
      if (most > 0) f(params, most, count);
    });
  }
  // Rows of a head, from f32 of value heads, or zeros.
  void Gather(const std::vector<Sequence>& sequences, const float* from, const Rows& x, Feature feature, const Rows& to,
              int64_t heads, int64_t size, bool divides = false) const {
    if (to.data == nullptr) return;
    const cuda::GatherParams gather = {.from = from,
                                       .x = OnDevice(x),
                                       .to = OnDevice(to),
                                       .map = MapOf(feature),
                                       .value_heads = static_cast<int32_t>(p_.value_heads),
                                       .group = static_cast<int32_t>(p_.value_heads / heads),
                                       .size = static_cast<int32_t>(size),
                                       .divides = divides,
                                       .eps = static_cast<float>(p_.eps)};
    ForGradients(sequences, x, {}, to, false, gather, [&](const cuda::GatherParams& params, int64_t most, size_t count) {
      call_.Check(call_.library().recurrence->gather(call_.Of(most, heads, count), params));
    });
  }
  void Clear(const Rows& to, int64_t heads, int64_t size) const {
    Gather(p_.others, nullptr, {}, Feature::kIdentity, to, heads, size);
  }

 private:
  void RunSlice(Walk w) const {
    cuda::ChunkParams& params = w.params;
    params.q = OnDevice(w.q, w.q_group, w.against);
    params.k = OnDevice(w.k, w.k_group, w.against);
    params.v = OnDevice(w.v, w.v_group, w.against);
    params.o = OnDevice(w.o, 1, w.against);
    params.log_decay = OnDevice(w.log_decay, 1, w.against);
    params.value_decay = OnDevice(w.value_decay, 1, w.against);
    params.beta = OnDevice(w.beta, 1, w.against);
    params.read_key = OnDevice(w.read_key, w.k_group, w.against);
    params.initial = OnDevice(w.initial);
    params.final = OnDevice(w.final);
    params.initial_z = OnDevice(w.initial_z);
    params.final_z = OnDevice(w.final_z);
    params.aligned = std::ranges::all_of(std::initializer_list<Rows>{w.q, w.k, w.v, w.into_memory ? Rows() : w.o, w.read_key}, &IsAligned);
    params.decays_aligned = IsAligned(w.log_decay) && IsAligned(w.value_decay);
    params.parts = static_cast<int32_t>(Blocks(params.value_size, cuda::kStrip));
    params.segment_tokens = SegmentTokens(params.parts);
    ForLaunches(p_.sequences.size(), [&](size_t first, size_t count) { Run(w, first, count); });
  }

  // Sequences are cut into as many as keep the device busy, which one per head and strip of columns may not; no bit depends on it.
  int64_t SegmentTokens(int64_t parts) const {
    heed::cuda::DeviceFacts facts;
    call_.Check(call_.library().examine(p_.device.index, &facts));
    const int64_t blocks = std::max<int64_t>(1, parts * p_.value_heads * static_cast<int64_t>(p_.sequences.size()));
    const int64_t wanted = std::max<int64_t>(1, 2 * facts.multiprocessors / blocks);
    const auto in_blocks = [](int64_t tokens) { return Blocks(tokens, cuda::kBlock) * cuda::kBlock; };
    const int64_t whole = in_blocks(longest_ + cuda::kBlock);  // the first tile of a walk against time may be short
    return wanted == 1 ? whole : std::min(whole, std::max(kLeastSegment, in_blocks(Blocks(longest_, wanted))));
  }

  void Run(Walk& w, size_t first, size_t count) const {
    cuda::ChunkParams& params = w.params;
    const int64_t state = p_.value_heads * params.key_size * params.value_size;
    int64_t most = 1, borders = 0;
    for (size_t i = 0; i < count; ++i) {
      const Sequence& s = p_.sequences[first + i];
      const int64_t begin = w.against ? s.count - 1 : 0;
      const auto offset = [&](const Rows& rows) { return s.batch * rows.batch_stride + (s.first + begin) * rows.token_stride; };
      const int64_t shift = params.products == nullptr ? 0 : (cuda::kBlock - s.count % cuda::kBlock) % cuda::kBlock;
      // One more where a decay that comes late is brought to the final state.
      const int64_t walked = s.count + (params.late && params.final.data != nullptr ? 1 : 0);
      const int64_t segments = std::max<int64_t>(1, Blocks(walked + shift, params.segment_tokens));
      params.sequences[i] = {.q = offset(w.q),
                             .k = offset(w.k),
                             .v = offset(w.v),
                             .o = w.into_memory ? (first_tokens_[first + i] + begin) * w.o.token_stride : offset(w.o),
                             .log_decay = offset(w.log_decay),
                             .value_decay = offset(w.value_decay),
                             .beta = offset(w.beta),
                             .read_key = offset(w.read_key),
                             .initial = s.state * w.initial.sequence_stride,
                             .final = s.state * w.final.sequence_stride,
                             .initial_z = s.state * w.initial_z.sequence_stride,
                             .final_z = s.state * w.final_z.sequence_stride,
                             .tokens = s.count,
                             .borders = borders * state,
                             .first_block = first_blocks_[first + i],
                             .shift = static_cast<int32_t>(shift)};
      most = std::max(most, segments);
      borders += segments - 1;
    }
    const auto launch = [&](int64_t of_each) {
      call_.Check(call_.library().recurrence->walk(call_.Of(params.parts * of_each, p_.value_heads, count),
                                                   p_.delta != Delta::kNone, params));
    };
    if (most == 1) return launch(1);
    const heed::cuda::DeviceMemory memory(call_, static_cast<size_t>(borders * state) * sizeof(float));
    params.borders = static_cast<float*>(memory.data());
    params.to_borders = true;
    launch(1);
    params.to_borders = false;
    launch(most);
  }

  const Problem& p_;
  const heed::cuda::Call call_;
  std::vector<int64_t> first_tokens_, first_blocks_;
  int64_t tokens_ = 0, blocks_ = 0, longest_ = 0;
};

void Compute(const Context& ctx, const Problem& p, const States& initial, const States& initial_z) {
  if (p.value_heads == 0) return;
  const Launcher launcher(ctx, p);
  Walk w = ForwardWalk(p, initial, initial_z);
  if (p.normalize) {
    const int64_t row = w.params.value_size;
    const heed::cuda::DeviceMemory sums(
        launcher.call(), static_cast<size_t>(std::max<int64_t>(1, launcher.tokens() * p.value_heads * row)) * sizeof(float));
    w.o = {sums.data(), DType::kF32, 0, p.value_heads * row, row};
    w.into_memory = true;
    launcher.Run(w);
    launcher.Gather(p.sequences, static_cast<const float*>(sums.data()), {}, Feature::kIdentity, p.o, p.value_heads, p.value_size,
                    /*divides=*/true);
  } else {
    launcher.Run(w);
  }
  launcher.Clear(p.o, p.value_heads, p.value_size);
}

void RefuseGradients(const Problem& p) {
  const auto refuse = [](bool given, const char* what) {
    if (given) throw Unsupported(std::string(kName) + " has no gradients of " + what);
  };
  refuse(p.delta != Delta::kNone, "delta rules");
  refuse(p.normalize, "normalised heads");
  refuse(p.complement_keys, "keys that are 1 - exp(log_decay)");
}

// A walk over S^T, or D^T, whose columns are key channels.
Walk TransposedWalk(const Problem& p) {
  Walk w = WalkOf(p);
  std::swap(w.params.key_size, w.params.value_size);
  w.params.query_map = w.params.key_map = cuda::Map::kIdentity;
  if (w.params.decay != cuda::DecayKind::kKey) return w;
  w.params.decay = cuda::DecayKind::kNone;
  w.value_decay = std::exchange(w.log_decay, {});
  return w;
}

// Over D, into which queries or gradients of outputs are written with the scale that outputs had.
void GoAgainstTime(Walk& w) {
  w.against = w.params.late = true;
  w.params.write_scale = std::exchange(w.params.scale, 1.0f);
}

// dq_t = scale S_t d_o_t.
Walk QueryGradients(const Problem& p, const Gradients& g) {
  Walk w = TransposedWalk(p);
  w.q = g.d_o;
  w.k = p.v;
  w.v = p.k;
  w.v_group = p.group();
  w.params.value_map = MapOf(p.key_feature);
  w.initial = Transposed(p.initial);
  return w;
}
// dk_t = D_t v_t.
Walk KeyGradients(const Problem& p, const Gradients& g) {
  Walk w = TransposedWalk(p);
  w.q = p.v;
  w.k = g.d_o;
  w.v = p.q;
  w.v_group = p.group();
  w.params.value_map = MapOf(p.feature);
  w.initial = Transposed(g.d_final);
  GoAgainstTime(w);
  return w;
}
// dv_t = D_t^T k_t.
Walk ValueGradients(const Problem& p, const Gradients& g) {
  Walk w = WalkOf(p);
  w.q = p.k;
  w.k = p.q;
  w.v = g.d_o;
  w.o = g.dv;
  w.q_group = w.k_group = p.group();
  std::swap(w.params.query_map, w.params.key_map);
  w.initial = g.d_final;
  w.final = g.d_initial;
  GoAgainstTime(w);
  return w;
}

void Backward(Context& ctx, const Problem& p, const Gradients& g) {
  RefuseGradients(p);
  for (const Walk& w : {QueryGradients(p, g), KeyGradients(p, g), ValueGradients(p, g)}) {
    const std::string reason = heed::cuda::Declines(p.device, SharedBytes(p, w));
    if (!reason.empty()) throw Unsupported(std::string(kName) + ", gradients: " + reason);
  }
  if (p.value_heads == 0) return;
  const Launcher launcher(ctx, p);
  const bool decays = g.d_log_decay.data != nullptr;
  const int64_t heads = p.value_heads, rows = launcher.tokens() * heads * p.key_size;
  // Into the gradient itself where it is no sum and nothing more is done to it.
  const auto is_final = [&](Feature feature) { return !decays && p.group() == 1 && feature == Feature::kIdentity; };
  const auto bytes = [](bool used, int64_t elements) {
    return static_cast<size_t>(std::max<int64_t>(1, used ? elements : 0)) * sizeof(float);
  };
  const int64_t products = launcher.blocks() * heads * p.key_size;
  const heed::cuda::DeviceMemory dq(launcher.call(), bytes(!is_final(p.feature), rows)),
      dk(launcher.call(), bytes(!is_final(p.key_feature), rows)),
      kept(launcher.call(), bytes(decays, products * p.value_size)), sums(launcher.call(), bytes(decays, products));
  const auto run = [&](Walk w, Feature feature, const Rows& to, const heed::cuda::DeviceMemory& memory, float* of_products) {
    if (to.data == nullptr && !decays) return;
    w.into_memory = !is_final(feature);
    w.o = w.into_memory ? Rows{memory.data(), DType::kF32, 0, heads * p.key_size, p.key_size} : to;
    if (decays) {
      w.params.kept = static_cast<float*>(kept.data());
      w.params.products = of_products;
    }
    launcher.Run(w);
  };
  run(QueryGradients(p, g), p.feature, g.dq, dq, nullptr);
  run(KeyGradients(p, g), p.key_feature, g.dk, dk, static_cast<float*>(sums.data()));
  const auto of = [](const heed::cuda::DeviceMemory& memory) { return static_cast<const float*>(memory.data()); };
  if (!is_final(p.feature)) launcher.Gather(p.sequences, of(dq), p.q, p.feature, g.dq, p.key_heads, p.key_size);
  if (!is_final(p.key_feature)) launcher.Gather(p.sequences, of(dk), p.k, p.key_feature, g.dk, p.key_heads, p.key_size);
  if (decays) {
    // Of constants each token has its share first.
    const heed::cuda::DeviceMemory shares(launcher.call(), bytes(p.constant_decay, launcher.tokens() * heads));
    const Rows to = p.constant_decay ? Rows{shares.data(), DType::kF32, 0, heads, 1} : g.d_log_decay;
    const cuda::DecayGradientParams of_decays = {.dq = of(dq),
                                                 .dk = of(dk),
                                                 .products = of(sums),
                                                 .q = OnDevice(p.q, p.group()),
                                                 .k = OnDevice(p.k, p.group()),
                                                 .to = OnDevice(to),
                                                 .by_channel = p.gate == Gate::kKey,
                                                 .value_heads = static_cast<int32_t>(heads),
                                                 .key_size = static_cast<int32_t>(p.key_size)};
    launcher.ForGradients(p.sequences, p.q, p.k, to, p.constant_decay, of_decays,
                          [&](const cuda::DecayGradientParams& params, int64_t most, size_t count) {
                            const heed::cuda::Call& call = launcher.call();
                            call.Check(call.library().recurrence->decay_gradients(call.Of(most, heads, count), params));
                          });
    if (p.constant_decay) {
      const heed::cuda::Call& call = launcher.call();
      call.Check(call.library().recurrence->token_sums(call.Of(1, heads, 1), {.from = of(shares),
                                                                               .tokens = launcher.tokens(),
                                                                               .value_heads = static_cast<int32_t>(heads),
                                                                               .to = OnDevice(g.d_log_decay)}));
    }
  }
  if (g.dv.data != nullptr || g.d_initial.data != nullptr) launcher.Run(ValueGradients(p, g));
  launcher.Clear(g.dq, p.key_heads, p.key_size);
  launcher.Clear(g.dk, p.key_heads, p.key_size);
  launcher.Clear(g.dv, heads, p.value_size);
  if (decays && !p.constant_decay) launcher.Clear(g.d_log_decay, heads, p.gate == Gate::kKey ? p.key_size : 1);
}

}  // namespace

const Kernel kCuda = {
    .name = kName,
    .why = "64 columns of a state in the registers of a block, 16 tokens at a time, products of bf16 pieces summed in f32",
    .declines = &Declines,
    .forward_passes = [](const Context&) {
      return Passes{.forward = [](Context& ctx, const Problem& p) { Compute(ctx, p, p.initial, p.initial_z); },
                    .workspace = [](const Context&, const Problem&) { return int64_t{0}; },
                    .step = [](Context& ctx, const Problem& p) { Compute(ctx, p, p.final, p.final_z); }};
    },
    .backward_passes = [](const Context&) {
      return Passes{.backward = &Backward,
                    .backward_workspace = [](const Context&, const Problem&, const Gradients&) { return BackwardBytes(); }};
    },
    .target = [](const Context&) { return std::string("cuda"); },
    .device = DeviceType::kCuda,
};

}  // namespace heed::recurrence

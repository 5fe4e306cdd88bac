// Gradients of recurrences as sweeps (chunk_block.h) and reductions of their outputs.
#include "heed/engines/recurrence/cuda/backward.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "heed/core/error.h"
#include "heed/engines/recurrence/cuda/gradient_blocks.h"
#include "heed/engines/recurrence/cuda/problem_on_device.h"
#include "heed/engines/recurrence/cuda/sweeps.h"

namespace heed::recurrence::cuda {
namespace {

void RefuseGradients(const Problem& p) {
  const auto refuse = [](bool given, const char* what) {
    if (given) throw Unsupported(std::string(kName) + " has no gradients of " + what);
  };
  refuse(p.output_gate.data != nullptr || p.skip.data != nullptr, "skips and gates of outputs");
  refuse(p.delta != Delta::kNone && p.constant_decay, "delta rules with constant decays");
}
void RefuseOn(Device device, std::initializer_list<Sweep> sweeps) {
  for (const Sweep& w : sweeps) {
    const std::string reason = Declines(device, w);
    if (!reason.empty()) throw Unsupported(std::string(kName) + ", gradients: " + reason);
  }
}

// A sweep over S^T or D^T, whose columns are key channels.
Sweep TransposedSweep(const Problem& p) {
  Sweep w = SweepOf(p);
  std::swap(w.params.key_size, w.params.value_size);
  w.params.query_map = w.params.key_map = Map::kIdentity;
  w.params.complement_keys = false;
  w.v_group = p.group();
  w.params.strict = w.params.reads_before_decay = p.has_bonus;
  if (w.params.decay != DecayKind::kKey) return w;
  w.params.decay = DecayKind::kNone;
  w.value_decay = std::exchange(w.log_decay, {});
  return w;
}

// Turns a sweep into a reversed one over D, which queries or gradients of outputs update with the outputs' scale. A
// token that reads the state before the decay updates D after the decay.
void Reverse(Sweep& w) {
  w.params.reversed = true;
  w.params.decays_after_update = !w.params.reads_before_decay;
  w.params.write_scale = std::exchange(w.params.scale, 1.0f);
}

// The sweep of dq_t = scale S_t d_o_t.
Sweep QueryGradients(const Problem& p, const Gradients& g) {
  Sweep w = TransposedSweep(p);
  w.q = g.d_o;
  w.k = p.v;
  w.v = p.k;
  w.beta = FactorsOf(p);
  w.params.value_map = MapOf(p.key_feature);
  if (p.complement_keys) {
    w.v.dtype = DType::kBF16;  // absent
    w.params.value_map = Map::kComplement;
  }
  w.initial = Transposed(p.initial);
  return w;
}
// The sweep of dk_t = D_t v_t, without the factor of v_t.
Sweep KeyGradients(const Problem& p, const Gradients& g) {
  Sweep w = TransposedSweep(p);
  w.q = p.v;
  w.k = g.d_o;
  w.v = p.q;
  w.params.value_map = MapOf(p.feature);
  w.params.reads_before_decay = ReadsBeforeDecay(p);
  w.initial = Transposed(g.d_final);
  Reverse(w);
  return w;
}
// The sweep of dv_t = D_t^T k_t, for values with their factors.
Sweep ValueGradients(const Problem& p, const Gradients& g) {
  Sweep w = SweepOf(p);
  w.q = p.k;
  w.k = p.q;
  w.v = g.d_o;
  w.o = g.dv;
  w.q_group = w.k_group = p.group();
  std::swap(w.params.query_map, w.params.key_map);
  if (p.complement_keys) {
    w.q = p.log_decay;
    w.q_group = 1;
    w.params.query_map = Map::kComplement;
    w.params.complement_keys = false;
  }
  w.initial = g.d_final;
  w.final = g.d_initial;
  w.params.strict = p.has_bonus;
  w.params.reads_before_decay = ReadsBeforeDecay(p);
  Reverse(w);
  return w;
}

// Computes gradients of log decays from the other gradients.
void DecayGradients(const Launcher& launcher, const Problem& p, const Gradients& g, const float* dq, const float* dk,
                    const float* dr, const float* products) {
  // Gradients of constant decays are computed per token and then summed.
  const int64_t size = p.gate == Gate::kKey ? p.key_size : 1;
  const Floats shares(launcher.call(), p.constant_decay, launcher.tokens() * p.value_heads * size);
  const Rows to = p.constant_decay ? launcher.InMemory(shares, size) : g.d_log_decay;
  const Rows& read_key = p.read_key.data == nullptr ? p.k : p.read_key;
  const GradientRows rows = {.q = p.q,
                             .k = p.complement_keys ? p.log_decay : p.k,
                             .v = p.forget_gate,
                             .d_o = g.d_input_gate,
                             .read_key = read_key,
                             .beta = FactorsOf(p),
                             .log_decay = {},
                             .to = to,
                             .d_final = {},
                             .into_memory = p.constant_decay};
  launcher.Run(launcher.kernels().decay_gradients, p.sequences, rows, p.value_heads,
               DecayGradientParams{.dq = dq,
                                   .dk = dk,
                                   .dr = dr,
                                   .products = products,
                                   .q = OnDevice(p.q, p.group()),
                                   .k = p.complement_keys ? OnDevice(p.log_decay) : OnDevice(p.k, p.group()),
                                   .read_key = OnDevice(read_key, ReadGroup(p)),
                                   .beta = OnDevice(FactorsOf(p)),
                                   .to = OnDevice(to),
                                   .forget_gate = OnDevice(p.forget_gate),
                                   .d_input_gate = OnDevice(g.d_input_gate),
                                   .by_channel = p.gate == Gate::kKey,
                                   .queries_before_decay = p.has_bonus,
                                   .read_keys_before_decay = p.delta == Delta::kBeforeDecay,
                                   .complement_keys = p.complement_keys,
                                   .value_heads = static_cast<int32_t>(p.value_heads),
                                   .key_size = static_cast<int32_t>(p.key_size),
                                   .writes = static_cast<int32_t>(p.writes)});
  if (p.constant_decay) return launcher.SumTokens(shares, launcher.tokens(), size, g.d_log_decay);
  launcher.Clear(g.d_log_decay, p.value_heads, size);
  launcher.Clear(g.d_input_gate, p.value_heads, 1);
}

// Adds the u term's gradients to those of queries and keys, and computes u's own.
void BonusGradients(const Launcher& launcher, const Problem& p, const Gradients& g, float* dq, float* dk) {
  const bool of_bonus = g.d_bonus.data != nullptr;
  const Floats shares(launcher.call(), of_bonus, launcher.blocks() * p.value_heads * p.key_size);
  BonusParams params = launcher.BonusOf(p);
  params.v = OnDevice(p.v);
  params.d_o = OnDevice(g.d_o);
  params.dq = dq;
  params.dk = dk;
  params.shares = of_bonus ? shares.data() : nullptr;
  launcher.Run(launcher.kernels().bonus_gradients, p.sequences, {.q = p.q, .k = p.k, .v = p.v, .d_o = g.d_o},
               p.value_heads, params);
  if (of_bonus) launcher.SumTokens(shares, launcher.blocks(), p.key_size, g.d_bonus);
}

// `in_memory`: v, d_o and dv are in scratch memory.
void LinearGradients(const Launcher& launcher, const Problem& p, const Gradients& g, bool in_memory = false) {
  const bool decays = g.d_log_decay.data != nullptr || g.d_input_gate.data != nullptr;
  const int64_t rows = launcher.tokens() * p.value_heads * p.key_size,
                states = launcher.blocks() * p.value_heads * p.key_size;
  // Sweeps write the gradient itself if it needs neither a sum over heads nor another step.
  const auto is_final = [&](Feature feature) {
    return !decays && p.group() == 1 && feature == Feature::kIdentity && p.value_factors.data == nullptr &&
           !p.has_bonus;
  };
  const Floats dq(launcher.call(), !is_final(p.feature), rows), dk(launcher.call(), !is_final(p.key_feature), rows),
      block_states(launcher.call(), decays, states * p.value_size), products(launcher.call(), decays, states);
  const auto run = [&](Sweep w, Feature feature, const Rows& to, const Floats& memory, float* of_products) {
    if (to.data == nullptr && !decays) return;
    w.q_in_memory = w.k_in_memory = in_memory;
    w.into_memory = !is_final(feature);
    w.o = w.into_memory ? launcher.InMemory(memory, p.key_size) : to;
    if (decays) {
      w.params.block_states = block_states.data();
      w.params.products = of_products;
    }
    launcher.Run(w);
  };
  run(QueryGradients(p, g), p.feature, g.dq, dq, nullptr);
  run(KeyGradients(p, g), p.key_feature, g.dk, dk, products.data());
  if (decays) DecayGradients(launcher, p, g, dq.data(), dk.data(), nullptr, products.data());
  if (p.has_bonus) {
    BonusGradients(launcher, p, g, g.dq.data == nullptr ? nullptr : dq.data(),
                   g.dk.data == nullptr ? nullptr : dk.data());
  }
  if (!is_final(p.feature))
    launcher.Gather({.from = dq.data(), .q = p.q, .feature = p.feature}, g.dq, p.key_heads, p.key_size);
  if (!is_final(p.key_feature)) {
    launcher.Gather({.from = dk.data(), .q = p.k, .beta = p.value_factors, .feature = p.key_feature}, g.dk, p.key_heads,
                    p.key_size);
  }
  if (g.dv.data != nullptr || g.d_initial.data != nullptr) {
    Sweep w = ValueGradients(p, g);
    w.v_in_memory = w.into_memory = in_memory;
    launcher.RunWithBonus(w);
  }
  launcher.Clear(g.dq, p.key_heads, p.key_size);
  launcher.Clear(g.dk, p.key_heads, p.key_size);
  if (!in_memory) launcher.Clear(g.dv, p.value_heads, p.value_size);
}

// Gradients of a normalised head: those of a head with one more column that is not normalised.
void NormalizedGradients(const Launcher& launcher, const Problem& p, const Gradients& g, const float* floors) {
  const heed::cuda::Call& call = launcher.call();
  const int64_t size = p.value_size + 1, rows = launcher.tokens() * p.value_heads,
                state = p.value_heads * p.key_size * size;
  int64_t sequences = 0;
  for (const Sequence& s : p.sequences) sequences = std::max(sequences, s.state + 1);
  const bool has_initial = p.initial.data != nullptr || p.initial_z.data != nullptr;
  const bool has_final = g.d_final.data != nullptr || g.d_final_z.data != nullptr;
  const bool of_initial = g.d_initial.data != nullptr || g.d_initial_z.data != nullptr;
  const Floats sums(call, true, rows * size), values(call, true, rows * size), d_sums(call, true, rows * size),
      dv(call, g.dv.data != nullptr, rows * size), initial(call, has_initial, sequences * state),
      d_final(call, has_final, sequences * state), d_initial(call, of_initial, sequences * state);
  Sweep forward = ForwardSweep(p, p.initial, p.initial_z);
  forward.final = forward.final_z = {};
  forward.o = launcher.InMemory(sums, size);
  forward.into_memory = true;
  launcher.Run(forward);
  launcher.Run(launcher.kernels().denormalize, p.sequences, {.v = p.v, .d_o = g.d_o}, p.value_heads,
               DenormalizeParams{.sums = sums.data(),
                                 .floors = floors,
                                 .values = values.data(),
                                 .d_sums = d_sums.data(),
                                 .v = OnDevice(p.v),
                                 .d_o = OnDevice(g.d_o),
                                 .value_heads = static_cast<int32_t>(p.value_heads),
                                 .value_size = static_cast<int32_t>(p.value_size),
                                 .eps = static_cast<float>(p.eps)});
  // S and z become columns of one state.
  const auto states_in = [&](const Floats& memory, int64_t column) {
    return States{memory.data() + column, state, p.key_size * size, size, 1};
  };
  const auto copy = [&](const States& from, const States& to, int64_t columns) {
    if (to.data == nullptr) return;
    for (int64_t first = 0; first < sequences; first += kMostHeads) {
      StateCopyParams params = {.from = OnDevice(from),
                                .to = OnDevice(to),
                                .from_stride = from.sequence_stride,
                                .to_stride = to.sequence_stride,
                                .key_size = static_cast<int32_t>(p.key_size),
                                .value_size = static_cast<int32_t>(columns)};
      if (params.from.data != nullptr) params.from.data += first * params.from_stride;
      params.to.data += first * params.to_stride;
      const auto count = static_cast<size_t>(std::min(kMostHeads, sequences - first));
      call.Check(launcher.kernels().copy_states(call.Of(1, p.value_heads, count), params));
    }
  };
  const auto join = [&](const States& s, const States& z, const Floats& to) {
    copy(s, states_in(to, 0), p.value_size);
    copy(z, states_in(to, p.value_size), 1);
  };
  if (has_initial) join(p.initial, p.initial_z, initial);
  if (has_final) join(g.d_final, g.d_final_z, d_final);
  Problem wider = p;
  Gradients of_wider = g;
  wider.normalize = false;
  wider.value_size = size;
  wider.v = launcher.InMemory(values, size);
  wider.initial = has_initial ? states_in(initial, 0) : States();
  of_wider.d_o = launcher.InMemory(d_sums, size);
  of_wider.dv = g.dv.data == nullptr ? Rows() : launcher.InMemory(dv, size);
  of_wider.d_final = has_final ? states_in(d_final, 0) : States();
  of_wider.d_initial = of_initial ? states_in(d_initial, 0) : States();
  LinearGradients(launcher, wider, of_wider, /*in_memory=*/true);
  if (of_initial) {
    copy(states_in(d_initial, 0), g.d_initial, p.value_size);
    copy(states_in(d_initial, p.value_size), g.d_initial_z, 1);
  }
  const Rows factors = p.exp_gates ? p.value_factors : Rows();  // not part of the values
  launcher.Gather({.from = dv.data(), .beta = factors, .skipped = 1}, g.dv, p.value_heads, p.value_size);
  launcher.Clear(g.dv, p.value_heads, p.value_size);
}

// The sweeps of a delta rule's gradients, over scratch tensors: x, the values minus what read keys retrieve, and dx.

Sweep NotFound(const Problem& p, const Rows& x) {
  Sweep w = ForwardSweep(p, p.initial, {});
  w.final = {};
  w.o = x;
  w.into_memory = true;
  w.params.scale = 1;
  w.params.reads_once = false;
  w.params.delta = DeltaKind::kNotFound;
  return w;
}
Sweep NotFoundGradients(const Problem& p, const Gradients& g, const Rows& dx) {
  Sweep w = ValueGradients(p, g);
  w.beta = p.beta;
  w.read_key = p.read_key;
  w.o = dx;
  w.into_memory = true;
  w.params.writes_once = true;
  w.params.delta = DeltaKind::kGradients;
  return w;
}
// A sweep over S, to which tokens write beta_t x_t under their keys.
Sweep OverStates(const Problem& p, const Rows& x) {
  Sweep w = TransposedSweep(p);
  w.k = x;
  w.k_in_memory = true;
  w.v = p.k;
  w.beta = p.beta;
  w.initial = Transposed(p.initial);
  return w;
}
Sweep DeltaQueryGradients(const Problem& p, const Gradients& g, const Rows& x) {
  Sweep w = OverStates(p, x);
  w.q = g.d_o;
  w.params.reads_once = true;
  return w;
}
// The sweep of -dr_t / beta_t.
Sweep ReadKeyGradients(const Problem& p, const Rows& x, const Rows& dx) {
  Sweep w = OverStates(p, x);
  w.q = dx;
  w.q_in_memory = true;
  w.params.strict = true;
  w.params.reads_before_decay = ReadsBeforeDecay(p);
  w.params.scale = 1;
  return w;
}
// The sweeps of dk_t / beta_t, in two parts: D from block boundaries with the queries' updates, and what tokens erase
// since the boundary.
Sweep WrittenGradients(const Problem& p, const Gradients& g, const Rows& x, const float* d_states) {
  Sweep w = KeyGradients(p, g);
  w.q = x;
  w.q_in_memory = true;
  w.params.writes_once = true;
  w.params.start = Start::kBlockStates;
  w.params.start_states = d_states;
  w.params.start_size = p.key_size * p.value_size;
  return w;
}
Sweep ErasedGradients(const Problem& p, const Rows& x, const Rows& dx) {
  Sweep w = TransposedSweep(p);
  w.params.scale = -1;
  w.params.reads_before_decay = ReadsBeforeDecay(p);
  Reverse(w);
  w.q = x;
  w.k = dx;
  w.q_in_memory = w.k_in_memory = true;
  w.v = p.read_key.data == nullptr ? p.k : p.read_key;
  w.v_group = ReadGroup(p);
  w.beta = p.beta;
  w.params.strict = w.params.adds = true;
  w.params.start = Start::kZeros;
  return w;
}

// Gradients of delta rules. `v` are values without factors.
void DeltaGradients(const Launcher& launcher, const Problem& p, const Gradients& g, const Rows& v) {
  const heed::cuda::Call& call = launcher.call();
  const bool decays = g.d_log_decay.data != nullptr, own_read_keys = p.read_key.data != nullptr;
  const bool of_queries = decays || g.dq.data != nullptr;
  const bool of_keys = decays || g.dk.data != nullptr || g.d_write_key.data != nullptr;
  const bool of_erase = p.erase.data != nullptr && (g.dk.data != nullptr || g.d_erase.data != nullptr);
  const bool of_read_keys = own_read_keys ? decays || of_erase || g.d_read_key.data != nullptr : of_keys;
  const int64_t tokens = launcher.tokens() * p.value_heads, rows = tokens * p.writes,
                blocks = launcher.blocks() * p.value_heads;
  const int64_t state = p.key_size * p.value_size;
  const Floats x(call, true, rows * p.value_size), dx(call, true, rows * p.value_size),
      states(call, decays, blocks * state), d_states(call, of_keys, blocks * state),
      dq(call, of_queries, tokens * p.key_size), dk(call, of_keys, rows * p.key_size),
      dr(call, of_read_keys, rows * p.key_size);
  const Rows x_rows = launcher.WritesInMemory(x, p.value_size), dx_rows = launcher.WritesInMemory(dx, p.value_size);
  const auto run = [&](Sweep w, float* block_states) {
    w.params.block_states = block_states;
    launcher.Run(w);
  };
  run(NotFound(p, x_rows), decays ? states.data() : nullptr);
  run(NotFoundGradients(p, g, dx_rows), of_keys ? d_states.data() : nullptr);
  const auto run_to = [&](Sweep w, const Floats& memory) {
    w.o = w.params.reads_once ? launcher.InMemory(memory, p.key_size) : launcher.WritesInMemory(memory, p.key_size);
    w.into_memory = true;
    launcher.Run(w);
  };
  if (of_queries) run_to(DeltaQueryGradients(p, g, x_rows), dq);
  if (of_read_keys) run_to(ReadKeyGradients(p, x_rows, dx_rows), dr);
  if (of_keys) {
    run_to(WrittenGradients(p, g, x_rows, d_states.data()), dk);
    run_to(ErasedGradients(p, x_rows, dx_rows), dk);
  }
  const auto gather = [&](const Launcher::Gathered& what, const Rows& to, int64_t heads, int64_t size) {
    launcher.Gather(what, to, heads, size);
    launcher.Clear(to, heads, size, what.writes);
  };
  gather({.from = dq.data()}, g.dq, p.key_heads, p.key_size);
  if (p.delta == Delta::kBeforeDecay) {  // two writes per token, see ProblemOnDevice
    gather({.from = dk.data(), .slots = 2, .slot = 0}, g.d_write_key, p.key_heads, p.key_size);
    gather({.from = dk.data(), .slots = 2, .slot = 1}, g.dk, p.key_heads, p.key_size);
    gather({.from = dr.data(), .slots = 2, .slot = 0}, g.d_read_key, p.key_heads, p.key_size);
    gather({.from = dx.data(), .slots = 2, .slot = 1}, g.dv, p.value_heads, p.value_size);
  } else {
    const bool reads_keys = !own_read_keys || p.erase.data != nullptr;  // with or without factors
    gather({.from = dk.data(),
            .less = reads_keys ? dr.data() : nullptr,
            .less_factors = p.erase,
            .beta = p.beta,
            .writes = p.writes},
           g.dk, p.key_heads, p.key_size);
    gather({.less = dr.data(), .less_factors = p.k, .factors_group = p.group(), .beta = p.beta}, g.d_erase,
           p.value_heads, p.key_size);
    gather({.from = dx.data(), .from_factors = v, .beta = p.beta}, g.d_write, p.value_heads, p.value_size);
    gather({.less = dr.data(), .beta = p.beta}, g.d_read_key, p.key_heads, p.key_size);
    gather({.from = dx.data(), .from_factors = p.write, .beta = p.beta, .writes = p.writes}, g.dv, p.value_heads,
           p.value_size);
  }
  if (g.d_beta.data != nullptr) {
    launcher.Run(launcher.kernels().dots, p.sequences, {.to = g.d_beta}, p.value_heads,
                 DotParams{.a = x.data(),
                           .b = dx.data(),
                           .to = OnDevice(g.d_beta),
                           .value_heads = static_cast<int32_t>(p.value_heads),
                           .size = static_cast<int32_t>(p.value_size),
                           .writes = static_cast<int32_t>(p.writes)});
    launcher.Clear(g.d_beta, p.value_heads, 1, p.writes);
  }
  if (!decays) return;
  const Floats products(call, true, blocks * p.key_size);
  launcher.Run(launcher.kernels().products, p.sequences, {.log_decay = p.log_decay, .d_final = g.d_final},
               p.value_heads,
               ProductParams{.states = states.data(),
                             .d_states = d_states.data(),
                             .d_final = OnDevice(g.d_final),
                             .log_decay = OnDevice(p.log_decay),
                             .products = products.data(),
                             .by_channel = p.gate == Gate::kKey,
                             .reads_before_decay = p.delta == Delta::kBeforeDecay,
                             .value_heads = static_cast<int32_t>(p.value_heads),
                             .key_size = static_cast<int32_t>(p.key_size),
                             .value_size = static_cast<int32_t>(p.value_size),
                             .writes = static_cast<int32_t>(p.writes)});
  DecayGradients(launcher, p, g, dq.data(), dk.data(), dr.data(), products.data());
}

// Throws Unsupported before anything is launched.
void Refuse(const Problem& p, const Gradients& g) {
  RefuseGradients(p);
  if (p.delta == Delta::kNone)
    return RefuseOn(p.device, {QueryGradients(p, g), KeyGradients(p, g), ValueGradients(p, g)});
  RefuseOn(p.device, {NotFound(p, {}), NotFoundGradients(p, g, {}), DeltaQueryGradients(p, g, {}),
                      ReadKeyGradients(p, {}, {}), WrittenGradients(p, g, {}, nullptr), ErasedGradients(p, {}, {})});
}

}  // namespace

void Backward(Context& ctx, const Problem& given, const Gradients& g) {
  Refuse(FormOnDevice(given), g);
  if (given.value_heads == 0) return;
  const ProblemOnDevice on_device(ctx, given);
  const Problem& p = on_device.problem();
  const Launcher launcher(ctx, p);
  if (p.delta != Delta::kNone) return DeltaGradients(launcher, p, g, given.v);
  return p.normalize ? NormalizedGradients(launcher, p, g, on_device.floors()) : LinearGradients(launcher, p, g);
}

}  // namespace heed::recurrence::cuda

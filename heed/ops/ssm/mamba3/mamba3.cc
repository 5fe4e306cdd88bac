// Mamba-3 on the recurrence engine: one decay per token and head, rotated queries and keys, and merged writes.
#include "heed/ops/ssm/mamba3/mamba3.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/device_name.h"
#include "heed/core/error.h"
#include "heed/engines/recurrence/kernels.h"
#include "heed/mechanism/define_internal.h"
#include "heed/mechanism/passes-inl.h"
#include "heed/ops/ssm/mamba3/mamba3_internal.h"
#include "heed/ops/ssm/mamba3/mamba3_kernels_internal.h"

namespace heed::mamba3 {
namespace {

using mechanism::Arguments;
using mechanism::Fail;
using mechanism::Results;

namespace framework {
using Passes = mechanism::Passes<Definition>;
}

constexpr int64_t kRow = 16;  // staged rows are multiples of the widest vector
int64_t Padded(int64_t size) { return (size + kRow - 1) / kRow * kRow; }

template <class To, class View>
To StructOf(std::span<const View> views) {
  To to;
  const std::span<View> members = mechanism::MembersOf<View>(to);
  std::copy_n(views.begin(), std::min(views.size(), members.size()), members.begin());
  return to;
}

enum class Pass { kForward, kBackward, kStep };

// A call's units in groups, and the memory of one group.
class Groups {
 public:
  Groups(const Call& call, const Arguments& in, Pass pass, int num_threads)
      : pass_(pass), per_key_(call.sizes.G / std::max<int64_t>(call.sizes.H, 1)) {
    Elements& e = elements;
    e.in = StructOf<Tensors<ConstTensorView>>(in.tensors);
    e.initial = StructOf<States<ConstTensorView>>(in.initial);
    e.d_o = in.d_o;
    e.d_final = StructOf<States<ConstTensorView>>(in.d_final);
    e.compute = call.state_dtype();
    e.scale = call.scale;
    e.direction = call.reverse ? -1 : 1;
    e.R = call.sizes.N;
    e.K = call.sizes.K;
    e.V = call.sizes.V;
    e.P = call.sizes.P;
    e.heads = call.sizes.G;
    e.group = std::max<int64_t>(per_key_, 1);
    e.key_row = Padded(e.K);
    e.value_row = Padded(e.V);
    e.angle_row = Padded(e.P);
    e.before = pass == Pass::kStep ? e.R : 0;
    e.rows = pass == Pass::kStep ? 2 * e.R : kBlock * e.R;
    for (size_t s = 0; s < call.ranges.size(); ++s) {
      const mechanism::TokenRange& range = call.ranges[s];
      for (int64_t h = 0; h < e.heads; ++h) {
        units_.push_back({static_cast<int64_t>(s), range.batch, h, call.reverse ? range.end - 1 : range.begin,
                          range.end - range.begin});
        longest_ = std::max(longest_, units_.back().blocks());
      }
    }
    tokens_ = longest_ * kBlock;
    size_ = pass == Pass::kStep ? static_cast<int64_t>(units_.size()) : 2 * num_threads;
    // In the backward pass a group has whole key heads, or a part of one.
    if (pass == Pass::kBackward && size_ > e.group) size_ -= size_ % e.group;
    size_ = std::max<int64_t>(std::min(size_, static_cast<int64_t>(units_.size())), 1);
  }

  // Lays out the memory from `base` on, which may be null, and returns its size.
  int64_t LayOut(void* base) {
    Elements& e = elements;
    Carver carver(base);
    const int64_t rows = size_ * e.rows, of_tokens = size_ * kBlock, element = e.compute == DType::kF64 ? 8 : 4;
    const auto next = [&](void*& to, int64_t count) {
      char* at;
      carver.Next(at, count * element);
      to = at;
    };
    const bool backward = pass_ == Pass::kBackward;
    for (void** bias : {&e.q_bias, &e.k_bias}) next(*bias, e.heads * e.R * e.key_row);
    for (void** keys : {&e.q, &e.k}) next(*keys, rows * e.key_row);
    next(e.v, rows * e.value_row);
    if (!backward) next(e.o_rows, rows * e.value_row);
    for (void** numbers : {&e.log_decay, &e.weight}) next(*numbers, rows);
    next(e.dots, of_tokens * e.R * e.R);
    for (void** numbers : {&e.gamma, &e.beta}) next(*numbers, of_tokens);
    carver.Next(e.angle, size_ * e.angle_row);
    e.slots = backward ? std::max<int64_t>(longest_, 1) : 1;
    if (pass_ != Pass::kStep) next(e.state, size_ * e.slots * e.K * e.V);
    if (!backward) return carver.bytes();
    for (void** numbers : {&e.lambda, &e.rest, &e.delta}) next(*numbers, of_tokens);
    next(e.rotation, of_tokens * 4 * e.angle_row);
    carver.Next(e.angles, size_ * e.slots * e.angle_row);
    for (void** values : {&e.d_o_rows, &e.dv}) next(*values, rows * e.value_row);
    for (void** keys : {&e.dq, &e.dk}) next(*keys, rows * e.key_row);
    next(e.d_log_decay, rows);
    for (void*& d_state : e.d_states) next(d_state, size_ * e.K * e.V);
    carver.Next(e.d_angle, size_ * e.angle_row);
    carver.Next(e.d_biases, size_ * 2 * e.R * e.key_row);
    carver.Next(e.pending, size_);
    for (void*& sums : e.sums) next(sums, in_parts() ? tokens_ * e.R * e.key_row : 0);
    carver.Next(all_biases_, 2 * e.heads * e.R * e.key_row);
    return carver.bytes();
  }

  // The engine's problem of a group, without sequences; one head of one sequence is a sequence of its own.
  recurrence::Problem Problem() const {
    const Elements& e = elements;
    recurrence::Problem p;
    p.dtype = e.compute;
    p.key_heads = p.value_heads = 1;
    p.key_size = e.K;
    p.value_size = e.V;
    p.scale = e.scale;
    p.gate = recurrence::Gate::kScalar;
    p.q = Rows(e.q, e.key_row);
    p.k = Rows(e.k, e.key_row);
    p.v = Rows(e.v, e.value_row);
    p.o = Rows(e.o_rows, e.value_row);
    p.log_decay = Rows(e.log_decay, 1);
    p.value_factors = Rows(e.weight, 1);
    return p;
  }
  recurrence::Rows Rows(void* data, int64_t row) const { return {data, elements.compute, elements.rows * row, row, 0}; }
  // A state of each unit, `slots` of which are apart.
  recurrence::States StatesAt(void* data, int64_t slots, int64_t slot) const {
    const Elements& e = elements;
    const int64_t size = e.K * e.V, element = e.compute == DType::kF64 ? 8 : 4;
    return {static_cast<char*>(data) + slot * size * element, slots * size, 0, e.V, 1};
  }

  // Takes the units from `begin` on; returns the first one that is not in the group.
  int64_t Take(int64_t begin) {
    int64_t end = std::min(begin + size_, static_cast<int64_t>(units_.size()));
    if (in_parts()) end = std::min(end, (begin / elements.group + 1) * elements.group);
    elements.units.assign(units_.begin() + begin, units_.begin() + end);
    first_ = begin % elements.group == 0;
    last_ = end % elements.group == 0;
    blocks_ = 0;
    for (const Unit& unit : elements.units) blocks_ = std::max(blocks_, unit.blocks());
    return end;
  }

  // The units that have tokens in block `b`, or with `later` in the next one too.
  void SetSequences(int64_t b, bool later, recurrence::Problem& p) const {
    p.sequences.clear();
    for (size_t i = 0; i < elements.units.size(); ++i) {
      const int64_t count = std::min(kBlock, elements.units[i].count - b * kBlock);
      if (count <= 0 || (later && elements.units[i].blocks() <= b + 1)) continue;
      const auto unit = static_cast<int64_t>(i);
      p.sequences.push_back({unit, unit, 0, elements.before + count * elements.R});
    }
  }

  // Adds the gradients of biases of the group's units, in their order.
  void AddBiases() const {
    const int64_t size = 2 * elements.R * elements.key_row;
    for (size_t i = 0; i < elements.units.size(); ++i) {
      double* to = all_biases_ + elements.units[i].head * size;
      for (int64_t k = 0; k < size; ++k) to[k] += elements.d_biases[static_cast<int64_t>(i) * size + k];
    }
  }
  void StoreBiases() const {
    const Elements& e = elements;
    const TensorView* biases[] = {&e.gradients.q_bias, &e.gradients.k_bias};
    for (int64_t which = 0; which < 2; ++which) {
      const TensorView& t = *biases[which];
      for (int64_t h = 0; t.present() && h < e.heads; ++h) {
        for (int64_t r = 0; r < e.R; ++r) {
          for (int64_t i = 0; i < e.K; ++i) {
            StoreDouble(t.dtype(), t.data(), h * t.stride(0) + r * t.stride(1) + i * t.stride(2),
                        all_biases_[((h * 2 + which) * e.R + r) * e.key_row + i]);
          }
        }
      }
    }
  }
  // Elements beyond the end of a row stay 0.
  void ClearGradients() const {
    const Elements& e = elements;
    const int64_t element = e.compute == DType::kF64 ? 8 : 4;
    const auto clear = [&](void* data, int64_t row) {
      std::memset(data, 0, static_cast<size_t>(size_ * e.rows * row * element));
    };
    if (e.key_row != e.K) clear(e.dq, e.key_row), clear(e.dk, e.key_row);
    if (e.value_row != e.V) clear(e.dv, e.value_row);
    std::memset(all_biases_, 0, static_cast<size_t>(2 * e.heads * e.R * e.key_row) * sizeof(double));
  }

  int64_t num_units() const { return static_cast<int64_t>(units_.size()); }
  int64_t blocks() const { return blocks_; }
  // True if the value heads of a key head are in several groups.
  bool in_parts() const { return pass_ == Pass::kBackward && size_ < elements.group; }
  bool first() const { return first_ || !in_parts(); }
  bool last() const { return last_ || !in_parts(); }
  // One problem as large as any.
  recurrence::Problem LargestProblem() {
    recurrence::Problem p = Problem();
    for (int64_t unit = 0; unit < std::min(size_, num_units()); ++unit)
      p.sequences.push_back({unit, unit, 0, elements.rows});
    return p;
  }

  Elements elements;

 private:
  Pass pass_;
  int64_t per_key_, size_ = 1, longest_ = 0, tokens_ = 0, blocks_ = 0;
  bool first_ = true, last_ = true;
  std::vector<Unit> units_;
  double* all_biases_ = nullptr;  // [HV, 2, R, key_row]
};

}  // namespace

void Call::Check(const char* op, const Context* checks, const Definition& definition, const Arguments& in,
                 const Options& options, bool data) {
  ReadSizes(op, definition.table, in, &AxisName, true, {{&kTensors.q, "BTNHK"}, {&kTensors.v, "GV"}});
  if (!on_cpu()) throw Unsupported(std::string(op) + ": computes on the CPU alone, not on " + heed::NameOf(device));
  const auto shape = [&](size_t tensor) { return in.tensors[tensor].ShapeString(); };
  if (sizes.K < 1) Fail(op, "q", "has shape " + shape(0), "K >= 1");
  if (sizes.N < 1) Fail(op, "q", "has shape " + shape(0), "R >= 1");
  if (sizes.V < 1) Fail(op, "v", "has shape " + shape(2), "V >= 1");
  if (sizes.H < 1 ? sizes.G != 0 : sizes.G % sizes.H != 0 || sizes.G == 0) {
    Fail(op, "v", "has " + std::to_string(sizes.G) + " heads",
         "a multiple of the " + std::to_string(sizes.H) + " heads of q");
  }
  if (sizes.P < 1 || 2 * sizes.P > sizes.K) {
    Fail(op, "theta", "has shape " + shape(6), "1 <= P <= K / 2, K = " + std::to_string(sizes.K));
  }
  CheckTensors(op, definition.table, in, data, false, checks != nullptr && checks->checks());
  for (const mechanism::Tensor& tensor : definition.table.tensors) {
    const ConstTensorView& t = mechanism::At(in.tensors, definition.table.IndexOf(tensor));
    if (t.present() && tensor.over_tokens()) CheckLayout(op, nullptr, tensor.name, t, tensor.axes);
  }
  scale = options.scale.value_or(1);
  if (!std::isfinite(scale)) Fail(op, "scale", "is " + mechanism::Text(scale), "a finite number");
  reverse = options.reverse;
  o_axes = kTensors.v.axes;
  has_state.fill(true);
  FindSequences(op, definition.table, in, options, data, 0);
  CheckInitialStates(op, definition.table, in, data);
}

void Call::Forward(const char* op, Context& ctx, const Definition& /*definition*/, const Arguments& in,
                   const Results& out) {
  Groups groups(*this, in, Pass::kForward, ctx.num_threads());
  Elements& e = groups.elements;
  e.o = out.o;
  e.final = StructOf<States<TensorView>>(out.states);
  ctx.ReserveStaging(groups.LayOut(nullptr));
  groups.LayOut(ctx.Staging());
  recurrence::Problem p = groups.LargestProblem();
  const recurrence::Kernel& kernel = recurrence::Choose(op, ctx, p);
  LoadBiases(ctx, e);
  p.initial = p.final = groups.StatesAt(e.state, 1, 0);
  for (int64_t begin = 0; begin < groups.num_units();) {
    begin = groups.Take(begin);
    Begin(ctx, e, true);
    End(ctx, e, -1, true);
    for (int64_t b = 0; b < groups.blocks(); ++b) {
      Prepare(ctx, e, b, true, false);
      groups.SetSequences(b, false, p);
      kernel.forward(ctx, p);
      Finish(ctx, e, b);
      End(ctx, e, b, true);
    }
  }
}

void Call::Backward(const char* op, Context& ctx, const Definition& /*definition*/, const Arguments& in,
                    const Results& out) {
  Groups groups(*this, in, Pass::kBackward, ctx.num_threads());
  Elements& e = groups.elements;
  e.gradients = StructOf<Tensors<TensorView>>(out.gradients);
  e.d_initial = StructOf<States<TensorView>>(out.states);
  ctx.ReserveStaging(groups.LayOut(nullptr));
  groups.LayOut(ctx.Staging());
  recurrence::Problem p = groups.LargestProblem();
  p.o = {};
  const recurrence::Kernel& forward = recurrence::Choose(op, ctx, p);
  const recurrence::Kernel& kernel = recurrence::Choose(op, ctx, p, engine::Pass::kBackward);
  LoadBiases(ctx, e);
  groups.ClearGradients();
  recurrence::Gradients g;
  g.d_o = groups.Rows(e.d_o_rows, e.value_row);
  g.dq = groups.Rows(e.dq, e.key_row);
  g.dk = groups.Rows(e.dk, e.key_row);
  g.dv = groups.Rows(e.dv, e.value_row);
  g.d_log_decay = groups.Rows(e.d_log_decay, 1);
  for (int64_t begin = 0; begin < groups.num_units();) {
    begin = groups.Take(begin);
    Begin(ctx, e, true);
    for (int64_t b = 0; b < groups.blocks(); ++b) {
      Prepare(ctx, e, b, false, false);
      groups.SetSequences(b, true, p);
      p.initial = groups.StatesAt(e.state, e.slots, b);
      p.final = groups.StatesAt(e.state, e.slots, b + 1);
      if (!p.sequences.empty()) forward.forward(ctx, p);
    }
    p.final = {};
    BeginBackward(ctx, e);
    for (int64_t b = groups.blocks(); b-- > 0;) {
      Prepare(ctx, e, b, true, true);
      PrepareBackward(ctx, e, b);
      groups.SetSequences(b, false, p);
      p.initial = groups.StatesAt(e.state, e.slots, b);
      g.d_final = groups.StatesAt(e.d_states[(b + 1) & 1], 1, 0);
      g.d_initial = groups.StatesAt(e.d_states[b & 1], 1, 0);
      kernel.backward(ctx, p, g);
      FinishBackward(ctx, e, b);
      SumHeads(ctx, e, b, groups.first(), groups.last());
    }
    EndBackward(ctx, e);
    groups.AddBiases();
  }
  groups.StoreBiases();
}

void Call::Step(const char* op, Context& ctx, const Definition& /*definition*/, const Arguments& in,
                const Results& out) {
  Groups groups(*this, in, Pass::kStep, ctx.num_threads());
  Elements& e = groups.elements;
  e.o = out.o;
  e.final = StructOf<States<TensorView>>(out.states);
  e.initial.angle = e.final.angle;
  ctx.ReserveStaging(groups.LayOut(nullptr));
  groups.LayOut(ctx.Staging());
  groups.Take(0);
  // Heads of a sequence are neighbours.
  recurrence::Problem p = groups.Problem();
  p.key_heads = p.value_heads = std::max<int64_t>(e.heads, 1);
  for (recurrence::Rows* rows : {&p.q, &p.k, &p.v, &p.o, &p.log_decay, &p.value_factors}) {
    rows->head_stride = rows->batch_stride;
    rows->batch_stride *= e.heads;
  }
  const TensorView& S = e.final.S;
  p.initial = {S.data(), S.stride(0), S.stride(1), S.stride(2), S.stride(3)};
  p.final = p.initial;
  for (size_t s = 0; s < ranges.size(); ++s)
    p.sequences.push_back({ranges[s].batch, static_cast<int64_t>(s), 0, e.rows});
  const recurrence::Kernel& kernel = recurrence::Choose(op, ctx, p);
  ctx.ReserveScratch(kernel.workspace(ctx, p));
  LoadBiases(ctx, e);
  Begin(ctx, e, false);
  Prepare(ctx, e, 0, true, false);
  kernel.forward(ctx, p);
  Finish(ctx, e, 0);
  End(ctx, e, 0, false);
}

int64_t Call::ForwardBytes(const char* op, const Context& ctx, const Definition& /*definition*/,
                           const Arguments& in) const {
  Groups groups(*this, in, Pass::kForward, ctx.num_threads());
  const int64_t staged = groups.LayOut(nullptr);
  const recurrence::Problem p = groups.LargestProblem();
  return recurrence::Choose(op, ctx, p).workspace(ctx, p) * ctx.num_threads() + staged;
}

int64_t Call::BackwardBytes(const char* op, const Context& ctx, const Definition& /*definition*/,
                            const Arguments& in) const {
  Groups groups(*this, in, Pass::kBackward, ctx.num_threads());
  const int64_t staged = groups.LayOut(nullptr);
  const recurrence::Problem p = groups.LargestProblem();
  const auto bytes = recurrence::Choose(op, ctx, p, engine::Pass::kBackward).backward_workspace(ctx, p);
  return std::max(bytes.per_thread, recurrence::Choose(op, ctx, p).workspace(ctx, p)) * ctx.num_threads() +
         bytes.shared + staged;
}

void Call::Explain(const char* op, const Context& ctx, const Definition& /*definition*/, const Arguments& in,
                   Explanation& e) const {
  Groups groups(*this, in, Pass::kForward, ctx.num_threads());
  const recurrence::Kernel& kernel = recurrence::Choose(op, ctx, groups.LargestProblem());
  e.kernel = kernel.name;
  e.target = kernel.target(ctx);
  e.why = std::string(kernel.why) + ", with rotated queries and keys and merged writes in blocks";
  double tokens = 0;
  for (const mechanism::TokenRange& range : ranges) tokens += static_cast<double>(range.end - range.begin);
  e.flops = 4 * tokens * static_cast<double>(sizes.G * sizes.N) * static_cast<double>(sizes.K * sizes.V);
}

HEED_DEFINE_RECURRENT(framework, mamba3)

}  // namespace heed::mamba3

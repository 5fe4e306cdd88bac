// Calls of recurrent mechanisms: their sizes, conversion to the recurrence engine's problem, and runs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/engines/recurrence/kernels.h"
#include "heed/engines/recurrence/tasks.h"
#include "heed/mechanism/key_preconditioner_internal.h"
#include "heed/mechanism/passes-inl.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/segments_internal.h"

namespace heed::recurrent {
namespace {

using mechanism::CheckContiguousRows;
using mechanism::Fail;
using recurrence::Delta;
using recurrence::Gate;
using recurrence::Problem;
using recurrence::Rows;

// The members of the engine's problem, and of its gradients, for a role.
struct Place {
  Role role;
  Rows Problem::* in;
  Rows recurrence::Gradients::* out;
};
constexpr Place kPlaces[] = {
    {Role::kQuery, &Problem::q, &recurrence::Gradients::dq},
    {Role::kKey, &Problem::k, &recurrence::Gradients::dk},
    {Role::kValue, &Problem::v, &recurrence::Gradients::dv},
    {Role::kLogDecay, &Problem::log_decay, &recurrence::Gradients::d_log_decay},
    {Role::kLogValueDecay, &Problem::log_value_decay, &recurrence::Gradients::d_log_value_decay},
    {Role::kProjection, &Problem::projection, &recurrence::Gradients::d_projection},
    {Role::kBonus, &Problem::bonus, &recurrence::Gradients::d_bonus},
    {Role::kBeta, &Problem::beta, &recurrence::Gradients::d_beta},
    {Role::kReadKey, &Problem::read_key, &recurrence::Gradients::d_read_key},
    {Role::kWriteKey, &Problem::write_key, &recurrence::Gradients::d_write_key},
    {Role::kErase, &Problem::erase, &recurrence::Gradients::d_erase},
    {Role::kWrite, &Problem::write, &recurrence::Gradients::d_write},
    {Role::kInputGate, &Problem::input_gate, &recurrence::Gradients::d_input_gate},
    {Role::kForgetGate, &Problem::forget_gate, &recurrence::Gradients::d_log_decay},
    {Role::kKeyMask, &Problem::key_mask, nullptr},
};

// Queries of channels are their keys.
const Place& PlaceOf(const Tensor& tensor, bool channels) {
  const Role role = channels && tensor.role == Role::kKey ? Role::kQuery : tensor.role;
  return *std::ranges::find(kPlaces, role, &Place::role);
}

// True for the tensors from which A follows, which the engine does not know.
bool IsOfCurvature(Role role) {
  return role == Role::kCurvatureDecay || role == Role::kCurvatureRate || role == Role::kCurvatureCenter;
}

// True if the last axis of a tensor is one of rows.
bool HasRows(std::string_view axes) {
  return axes.back() == 'K' || axes.back() == 'V' || (axes.back() == 'C' && axes[0] == 'B');
}

recurrence::States StatesOf(const ConstTensorView& t, std::string_view axes) {
  recurrence::States states;
  states.data = t.present() ? t.data() : nullptr;
  for (size_t i = 0; t.present() && i < axes.size(); ++i) {
    const int64_t stride = t.stride(static_cast<int>(i));
    switch (axes[i]) {
      case 'B': states.sequence_stride = stride; break;
      case 'F': states.key_stride = stride; break;
      case 'V': states.value_stride = stride; break;
      default: states.head_stride = stride;
    }
  }
  return states;
}

// Flops per token and element of S, and the part of them that multiplies S with queries.
constexpr double kFlopsOfQueries = 2;
double FlopsPerProduct(const Problem& p) {
  if (p.channels) return kFlopsOfChannels;
  return p.delta == Delta::kNone ? 4 : p.delta == Delta::kAfterDecay ? 6 : 8;
}

}  // namespace

// A checked call on the recurrence engine.
struct EngineCall : mechanism::Call {
  static std::string AxisName(char letter) {
    return letter == 'G' ? "HV" : letter == 'N' ? "n" : std::string(1, letter);
  }
  static Options OptionsOfStep(const Options& options) {
    Options scale;  // the only option of a step
    scale.scale = options.scale;
    return scale;
  }

  static void CheckStep(const char* op, const Definition& definition) {
    if (!definition.causal) mechanism::Fail(op, "causal", "is false", "true: one token at a time");
  }

  void Check(const char* op, const Context* checks, const Definition& definition, const Arguments& in,
             const Options& options, bool data);
  void CheckSizes(const char* op, const Definition& definition, const Arguments& in);
  void CheckLayout(const char* op, const Context* /*checks*/, const char* name, const ConstTensorView& t,
                   std::string_view axes) const {
    if (HasRows(axes)) CheckContiguousRows(op, name, t);
  }
  void CheckStateLayout(const char* op, const char* name, const ConstTensorView& t) const {
    CheckContiguousRows(op, name, t);
  }
  DType GradientDType(const Tensor& tensor, const ConstTensorView& input) const {
    return tensor.role == Role::kValue ? dv_dtype : input.dtype();
  }

  // The engine's views of a tensor. With `reverse`, strides are negative and tokens count from the end.
  Rows RowsOf(const ConstTensorView& t, std::string_view axes) const;
  Rows KeptDecays(const ConstTensorView& t);
  // Sets a member of the problem for each state.
  template <class View>
  void PlaceStates(const Definition& definition, std::span<const View> views, recurrence::States* S,
                   recurrence::States* z, recurrence::States* m) const {
    for (size_t i = 0; i < views.size(); ++i) {
      const StateTensor& state = definition.table.states[i];
      if (state.role == StateTensor::kCurvature) continue;
      recurrence::States* const to = state.role == StateTensor::kState        ? S
                                     : state.role == StateTensor::kNormaliser ? z
                                                                              : m;
      if (to != nullptr && has_state[i]) *to = StatesOf(views[i], state.axes);
    }
  }

  // A of these states; data null if it is absent.
  template <class View>
  static recurrence::States CurvatureOf(const Definition& definition, std::span<const View> views) {
    for (size_t i = 0; i < views.size(); ++i) {
      const StateTensor& state = definition.table.states[i];
      if (state.role == StateTensor::kCurvature) return StatesOf(views[i], state.axes);
    }
    return {};
  }

  void Forward(const char* op, Context& ctx, const Definition& definition, const Arguments& in, const Results& out);
  void Backward(const char* op, Context& ctx, const Definition& definition, const Arguments& in, const Results& out);
  void PreconditionedBackward(Context& ctx, const Definition& definition, const Arguments& in, const Results& out,
                              recurrence::Gradients& g, const recurrence::Kernel& kernel);
  void Step(const char* op, Context& ctx, const Definition& definition, const Arguments& in, const Results& out);
  int64_t ForwardBytes(const char* op, const Context& ctx, const Definition& definition, const Arguments&) const {
    const int64_t bytes = recurrence::Choose(op, ctx, problem).workspace(ctx, problem) * ctx.num_threads();
    return definition.preconditions() ? bytes + Staged().LayOut(*this, false, nullptr) : bytes;
  }
  int64_t BackwardBytes(const char* op, const Context& ctx, const Definition& definition, const Arguments&) const {
    const auto bytes = recurrence::Choose(op, ctx, problem, engine::Pass::kBackward).backward_workspace(ctx, problem);
    const int64_t staged = definition.preconditions() ? Staged().LayOut(*this, true, nullptr) : 0;
    return bytes.per_thread * ctx.num_threads() + bytes.shared + staged;
  }
  void Explain(const char* op, const Context& ctx, const Definition&, const Arguments&, Explanation& e) const;
  mechanism::Division DivisionOf(const Definition& definition, const Arguments& in) const;

  // The memory of preconditioned keys: w and the final A, and for gradients A, dw, the gradient of the keys that read,
  // and those of centers by sequence. Rows of a key head are consecutive.
  struct Staged {
    void *written, *final, *curvature, *d_written, *d_read;
    double* d_center;

    int64_t LayOut(const EngineCall& call, bool backward, void* base) {
      Carver carver(base);
      const int64_t heads = call.sizes.H, row = call.sizes.K * static_cast<int64_t>(SizeOf(call.state_dtype()));
      const auto next = [&](void*& to, int64_t rows) {
        char* at;
        carver.Next(at, rows * row);
        to = at;
      };
      const int64_t tokens = call.sizes.B * call.sizes.T * heads;
      next(written, tokens);
      next(final, static_cast<int64_t>(call.ranges.size()) * heads);
      for (void** rows : {&curvature, &d_written, &d_read}) next(*rows, backward ? tokens : 0);
      carver.Next(d_center, backward ? static_cast<int64_t>(call.ranges.size()) * call.sizes.H : 0);
      return carver.bytes();
    }
  };
  Rows StagedRows(void* data) const {
    const int64_t token = sizes.K, batch = sizes.T * token;
    return {data, state_dtype(), batch, reverse ? -token : token, sizes.B * batch};
  }
  void CheckPreconditioner(const char* op, const Definition& definition, const Arguments& in);
  // Computes the keys that are written, and the final A.
  Staged Precondition(Context& ctx, bool backward);
  // Copies the final A once nothing can throw.
  void StoreCurvature(const recurrence::States& to) const;

  // Prepares tensors, and adds tokens that belong to no sequence for kernels of devices.
  void Prepare(const Definition& definition) {
    if (definition.surroundings != nullptr && definition.surroundings->prepare) definition.surroundings->prepare();
    if (on_cpu()) return;
    ForOtherTokens([&](int64_t b, int64_t first, int64_t count) { problem.others.push_back({b, 0, first, count}); });
  }

  Problem problem;
  KeyPreconditioner preconditioner;
  DType dv_dtype = DType::kF32;
  std::vector<double> decays_f64;  // constants of heads, converted from any dtype
  std::vector<float> decays_f32;
};

void EngineCall::CheckSizes(const char* op, const Definition& definition, const Arguments& in) {
  const auto shape = [&](const Tensor& tensor) { return in.tensors[definition.table.IndexOf(tensor)].ShapeString(); };
  if (definition.channels()) {
    sizes.H = sizes.G;
    sizes.K = sizes.V = 1;
    return;
  }
  const Tensor &query = definition.query(), &value = definition.value();
  if (sizes.K < 1) Fail(op, query.name, "has shape " + shape(query), "K >= 1");
  if (sizes.V < 1) Fail(op, value.name, "has shape " + shape(value), "V >= 1");
  if (sizes.N == 0) Fail(op, value.name, "has shape " + shape(value), "n >= 1");
  if (const Tensor* const projection = definition.table.Find(Role::kProjection)) {
    const ConstTensorView& W = mechanism::At(in.tensors, definition.table.IndexOf(*projection));
    if (W.present() && (W.size(0) < 1 || W.size(1) != sizes.K)) {
      Fail(op, projection->name, "has shape " + W.ShapeString(), "[M, K = " + std::to_string(sizes.K) + "], M >= 1");
    }
  }
  if (sizes.H < 1 ? sizes.G != 0 : sizes.G % sizes.H != 0 || sizes.G == 0) {
    Fail(op, value.name, "has " + std::to_string(sizes.G) + " heads",
         "a multiple of the " + std::to_string(sizes.H) + " heads of " + query.name);
  }
}

void EngineCall::Check(const char* op, const Context* checks, const Definition& definition, const Arguments& in,
                       const Options& options, bool data) {
  for (const double eps : {definition.eps, definition.feature_eps}) {
    if (!(eps >= 0) || std::isinf(eps)) Fail(op, "eps", "is " + mechanism::Text(eps), "a finite number >= 0");
  }
  const Tensor& value = definition.value();
  ReadSizes(op, definition.table, in, &AxisName, true, {{&definition.query(), "BTHK"}, {&value, value.axes}});
  CheckSizes(op, definition, in);
  const Surroundings* const around = definition.surroundings;
  const bool random = recurrence::IsRandom(definition.feature), channels = definition.channels();
  const bool values = checks != nullptr && checks->checks() && (around == nullptr || !around->prepare);
  CheckTensors(op, definition.table, in, data, true, values);
  for (const Tensor& tensor : definition.table.tensors) {
    const ConstTensorView& t = mechanism::At(in.tensors, definition.table.IndexOf(tensor));
    if (t.present() && tensor.contiguous_rows()) CheckContiguousRows(op, tensor.name, t);
  }
  reverse = options.reverse;
  if (reverse && !definition.has_direction) Fail(op, "reverse", "is true", "false: there is no direction");
  o_axes = definition.o_axes();
  o_dtype = around != nullptr && around->wide_o ? state_dtype() : dtype;
  dv_dtype = around != nullptr && around->wide_dv ? state_dtype() : dtype;
  for (size_t i = 0; i < definition.table.states.size(); ++i) has_state[i] = definition.Has(definition.table.states[i]);
  if (channels && options.scale) Fail(op, "scale", "is given", "none: there is no query");

  std::vector<recurrence::Sequence> sequences = std::move(problem.sequences);
  sequences.clear();
  problem = {};
  problem.sequences = std::move(sequences);
  decays_f64.clear();
  decays_f32.clear();
  Problem& p = problem;
  p.dtype = dtype;
  p.device = device;
  p.key_heads = std::max<int64_t>(sizes.H, 1);
  p.value_heads = sizes.G;
  p.key_size = sizes.K;
  p.value_size = sizes.V;
  p.writes = std::max<int64_t>(sizes.N, 1);
  p.projection_rows = random ? std::max<int64_t>(sizes.M, 0) : 0;
  const bool is_floored = definition.feature == recurrence::Feature::kRandomExp && !definition.causal;
  p.feature_eps = is_floored ? definition.feature_eps : 0;
  p.feature = definition.feature;
  p.key_feature = definition.key_feature.value_or(definition.feature);
  p.causal = definition.causal;
  p.normalize = definition.normalize;
  p.eps = definition.eps;
  p.complement_keys = definition.complement_keys();
  p.channels = channels;
  p.exp_gates = definition.exp_gates();
  p.has_bonus = definition.table.Has(Role::kBonus) && !channels;
  p.delta = definition.delta();
  p.scale = options.scale.value_or(definition.root_scale ? 1 / std::sqrt(static_cast<double>(sizes.K)) : 1);
  if (!std::isfinite(p.scale)) Fail(op, "scale", "is " + mechanism::Text(p.scale), "a finite number");

  for (const Tensor& tensor : definition.table.tensors) {
    const ConstTensorView& t = mechanism::At(in.tensors, definition.table.IndexOf(tensor));
    if (!t.present() || IsOfCurvature(tensor.role)) continue;
    Rows& rows = p.*PlaceOf(tensor, channels).in;
    if (tensor.role == Role::kLogDecay) {
      p.constant_decay = !tensor.over_tokens();
      p.gate = HasRows(tensor.axes) && !channels ? Gate::kKey : Gate::kScalar;
      rows = p.constant_decay ? KeptDecays(t) : RowsOf(t, tensor.axes);
      continue;
    }
    if (tensor.role == Role::kLogValueDecay) p.has_value_decay = true;
    rows = RowsOf(t, tensor.axes);
  }
  if (p.running_max()) p.gate = Gate::kScalar;
  if (definition.preconditions()) CheckPreconditioner(op, definition, in);
  if (around != nullptr) {
    p.value_factors = RowsOf(around->value_factors, "BTG");
    p.output_gate = RowsOf(around->output_gate, "BTGV");
    p.skip = RowsOf(around->skip, "GV");
  }

  FindSequences(op, definition.table, in, options, data, p.features());
  for (size_t i = 0; i < ranges.size(); ++i) {
    p.sequences.push_back({ranges[i].batch, static_cast<int64_t>(i), reverse ? 1 - ranges[i].end : ranges[i].begin,
                           ranges[i].end - ranges[i].begin});
  }
  CheckInitialStates(op, definition.table, in, data);
  for (size_t i = 0; i < in.initial.size(); ++i) {
    if (!p.running_max() || definition.table.states[i].role != StateTensor::kMaximum) continue;
    if (!in.initial[0].present() || in.initial[i].present()) continue;
    Fail(op, mechanism::StateName("initial_state", definition.table.states[i], true), "is absent",
         "a tensor, which the others are relative to");
  }
  PlaceStates(definition, in.initial, &p.initial, &p.initial_z, &p.initial_m);
}

// The key of the call reads; the rows that the engine writes are in staging memory.
void EngineCall::CheckPreconditioner(const char* op, const Definition& definition, const Arguments& in) {
  constexpr double kSmallest = 0x1p-126;  // a normal number in f32
  if (!(definition.eps >= kSmallest)) {
    Fail(op, "eps", "is " + mechanism::Text(definition.eps), "a finite number >= " + mechanism::Text(kSmallest));
  }
  if (!(definition.bound >= 1) || std::isinf(definition.bound)) {
    Fail(op, "bound", "is " + mechanism::Text(definition.bound), "a finite number >= 1");
  }
  if (!on_cpu()) throw Unsupported(std::string(op) + ": computes preconditioned keys on the CPU alone");
  const auto view = [&](Role role) -> const ConstTensorView& {
    return mechanism::At(in.tensors, definition.table.IndexOf(*definition.table.Find(role)));
  };
  KeyPreconditioner& keys = preconditioner;
  keys.sequences = &problem.sequences;
  keys.heads = sizes.H;
  keys.size = sizes.K;
  keys.compute = state_dtype();
  keys.log_bound = std::log(definition.bound);
  keys.eps = definition.eps;
  constexpr double kCenter = -0.2;
  keys.center.assign(static_cast<size_t>(std::max<int64_t>(sizes.H, 0)), kCenter);
  if (const ConstTensorView& center = view(Role::kCurvatureCenter); center.present() && center.data() != nullptr) {
    for (int64_t h = 0; h < sizes.H; ++h) {
      keys.center[static_cast<size_t>(h)] = LoadAsDouble(center.dtype(), center.data(), h * center.stride(0));
    }
  }
  keys.k = problem.k;
  keys.log_decay = RowsOf(view(Role::kCurvatureDecay), "BTH");
  keys.rate = RowsOf(view(Role::kCurvatureRate), "BTH");
  keys.initial = CurvatureOf(definition, in.initial);
  problem.read_key = problem.k;
  problem.k = StagedRows(nullptr);
}

EngineCall::Staged EngineCall::Precondition(Context& ctx, bool backward) {
  Staged staged;
  ctx.ReserveStaging(staged.LayOut(*this, backward, nullptr));
  staged.LayOut(*this, backward, ctx.Staging());
  preconditioner.written = problem.k = StagedRows(staged.written);
  preconditioner.final = {staged.final, sizes.H * sizes.K, sizes.K, 1, 0};
  if (backward) preconditioner.curvature = StagedRows(staged.curvature);
  WriteKeys(ctx, preconditioner);
  return staged;
}

void EngineCall::StoreCurvature(const recurrence::States& to) const {
  if (to.data == nullptr) return;
  const recurrence::States& from = preconditioner.final;
  for (int64_t s = 0; s < static_cast<int64_t>(problem.sequences.size()); ++s) {
    for (int64_t h = 0; h < sizes.H; ++h) {
      for (int64_t i = 0; i < sizes.K; ++i) {
        const int64_t at = s * to.sequence_stride + h * to.head_stride + i * to.key_stride;
        StoreDouble(state_dtype(), const_cast<void*>(to.data), at,
                    LoadAsDouble(state_dtype(), from.data, s * from.sequence_stride + h * from.head_stride + i));
      }
    }
  }
}

Rows EngineCall::RowsOf(const ConstTensorView& t, std::string_view axes) const {
  if (!t.present()) return {};
  Rows rows = {t.data(), t.dtype()};
  for (size_t i = 0; i < axes.size(); ++i) {
    const int64_t stride = t.stride(static_cast<int>(i));
    switch (axes[i]) {
      case 'B': rows.batch_stride = stride; break;
      case 'T': rows.token_stride = reverse ? -stride : stride; break;
      case 'M': rows.token_stride = stride; break;  // rows of random features
      case 'N': rows.write_stride = stride; break;
      case 'K':
      case 'V': break;  // contiguous
      default: rows.head_stride = stride;
    }
  }
  return rows;
}

Rows EngineCall::KeptDecays(const ConstTensorView& t) {
  if (t.data() == nullptr) return {};
  const int64_t row = t.rank() == 2 ? t.size(1) : 1;
  for (int64_t h = 0; h < t.size(0); ++h) {
    for (int64_t i = 0; i < row; ++i) {
      const int64_t at = h * t.stride(0) + (t.rank() == 2 ? i * t.stride(1) : 0);
      decays_f64.push_back(LoadAsDouble(t.dtype(), t.data(), at));
    }
  }
  decays_f32.assign(decays_f64.begin(), decays_f64.end());
  if (dtype == DType::kF64) return {decays_f64.data(), DType::kF64, 0, 0, row};
  return {decays_f32.data(), DType::kF32, 0, 0, row};
}

void EngineCall::Forward(const char* op, Context& ctx, const Definition& definition, const Arguments&,
                         const Results& out) {
  problem.o = RowsOf(out.o, o_axes);
  PlaceStates(definition, out.states, &problem.final, &problem.final_z, &problem.final_m);
  const auto& kernel = recurrence::Choose(op, ctx, problem);
  Prepare(definition);
  if (definition.preconditions()) Precondition(ctx, false);
  kernel.forward(ctx, problem);
  if (definition.preconditions()) StoreCurvature(CurvatureOf(definition, out.states));
}

void EngineCall::Backward(const char* op, Context& ctx, const Definition& definition, const Arguments& in,
                          const Results& out) {
  recurrence::Gradients g;
  g.d_o = RowsOf(in.d_o, o_axes);
  for (size_t i = 0; i < out.gradients.size(); ++i) {
    const Tensor& tensor = definition.table.tensors[i];
    if (!out.gradients[i].present() || IsOfCurvature(tensor.role)) continue;
    g.*PlaceOf(tensor, problem.channels).out = RowsOf(out.gradients[i], tensor.axes);
  }
  PlaceStates(definition, in.d_final, &g.d_final, &g.d_final_z, nullptr);
  PlaceStates(definition, out.states, &g.d_initial, &g.d_initial_z, nullptr);
  const auto& kernel = recurrence::Choose(op, ctx, problem, engine::Pass::kBackward);
  Prepare(definition);
  if (definition.preconditions()) return PreconditionedBackward(ctx, definition, in, out, g, kernel);
  kernel.backward(ctx, problem, g);
}

void EngineCall::PreconditionedBackward(Context& ctx, const Definition& definition, const Arguments& in,
                                        const Results& out, recurrence::Gradients& g,
                                        const recurrence::Kernel& kernel) {
  const mechanism::Table& table = definition.table;
  const auto gradient = [&](Role role) -> const TensorView& {
    return mechanism::At(out.gradients, table.IndexOf(*table.Find(role)));
  };
  KeyPreconditioner& keys = preconditioner;
  keys.d_final = CurvatureOf(definition, in.d_final);
  keys.d_initial = CurvatureOf(definition, out.states);
  keys.dk = g.dk;
  keys.d_log_decay = RowsOf(gradient(Role::kCurvatureDecay), "BTH");
  keys.d_rate = RowsOf(gradient(Role::kCurvatureRate), "BTH");
  const TensorView& d_center = gradient(Role::kCurvatureCenter);
  const bool wanted = keys.d_initial.data != nullptr || keys.dk.data != nullptr || keys.d_log_decay.data != nullptr ||
                      keys.d_rate.data != nullptr || d_center.present();
  const Staged staged = Precondition(ctx, true);
  g.dk = {};
  if (wanted) g.dk = keys.d_written = StagedRows(staged.d_written);
  if (keys.dk.data != nullptr) g.d_read_key = keys.d_read = StagedRows(staged.d_read);
  keys.d_center = staged.d_center;
  kernel.backward(ctx, problem, g);
  if (!wanted) return;
  WriteKeysBackward(ctx, keys);
  for (int64_t h = 0; d_center.present() && h < sizes.H; ++h) {
    double sum = 0;
    for (size_t s = 0; s < problem.sequences.size(); ++s) sum += staged.d_center[static_cast<int64_t>(s) * sizes.H + h];
    StoreDouble(d_center.dtype(), d_center.data(), h * d_center.stride(0), sum);
  }
}

void EngineCall::Step(const char* op, Context& ctx, const Definition& definition, const Arguments&,
                      const Results& out) {
  Problem& p = problem;
  p.o = RowsOf(out.o, o_axes);
  PlaceStates(definition, out.states, &p.final, &p.final_z, &p.final_m);
  p.initial_m = p.final_m;
  if (p.channels) {
    p.initial = p.final;
    p.initial_z = p.final_z;
  }
  const auto& kernel = recurrence::Choose(op, ctx, p);
  Prepare(definition);
  const recurrence::States curvature = CurvatureOf(definition, out.states);
  if (definition.preconditions()) {
    preconditioner.initial = curvature;
    Precondition(ctx, false);
  }
  kernel.step(ctx, p);
  if (definition.preconditions()) StoreCurvature(curvature);
}

void EngineCall::Explain(const char* op, const Context& ctx, const Definition&, const Arguments&,
                         Explanation& e) const {
  const Problem& p = problem;
  const recurrence::Kernel& kernel = recurrence::Choose(op, ctx, p);
  e.kernel = kernel.name;
  e.target = kernel.target(ctx);
  e.why = kernel.why;
  double tokens = 0;
  for (const mechanism::TokenRange& range : ranges) tokens += static_cast<double>(range.end - range.begin);
  e.flops = FlopsPerProduct(p) * tokens * static_cast<double>(p.writes) * static_cast<double>(p.value_heads) *
            static_cast<double>(p.features()) * static_cast<double>(p.value_size);
  e.flops += 4 * tokens * static_cast<double>(p.value_heads) * static_cast<double>(p.projection_rows) *
             static_cast<double>(p.key_size);
}

mechanism::Division EngineCall::DivisionOf(const Definition& definition, const Arguments& in) const {
  const Problem& p = problem;
  constexpr int64_t kChannels = 16;  // of a task, where a head is a channel
  if (p.channels) return {(p.value_heads + kChannels - 1) / kChannels, 1, 0.5, 0.5};  // one of two exponentials
  mechanism::Division division = {p.value_heads, recurrence::NumParts(1, p.value_size, p.value_size)};
  division.states = 1 - kFlopsOfQueries / FlopsPerProduct(p);
  const ConstTensorView state(nullptr, state_dtype(), state_shapes[0]);
  const std::vector<int64_t> transition = mechanism::TransitionShape(definition.table, in, 0, state);
  const size_t columns = mechanism::ColumnsOf(definition.table.states[0]);
  if (recurrence::IsRandom(p.feature)) return division;                        // features do not decay
  const int64_t of_transition = transition.empty() ? 1 : transition[columns];  // empty: relative to a maximum
  // A tile is at least half a part wide.
  division.transition = division.states * static_cast<double>(std::max(of_transition, recurrence::kPartColumns / 2)) /
                        static_cast<double>(std::max(p.value_size, recurrence::kPartColumns / 2));
  return division;
}

bool Definition::channels() const { return std::string_view(value().axes).back() == 'C'; }

bool Definition::several_writes() const { return std::string_view(value().axes).find('N') != std::string_view::npos; }

bool Definition::complement_keys() const { return !table.Has(Role::kKey); }

bool Definition::value_first() const {
  return !table.states.empty() && std::string_view(table.states[0].axes) == "BGVF";
}

Delta Definition::delta() const {
  if (table.Has(Role::kWriteKey)) return Delta::kBeforeDecay;
  return table.Has(Role::kBeta) || table.Has(Role::kErase) ? Delta::kAfterDecay : Delta::kNone;
}

}  // namespace heed::recurrent

template struct heed::mechanism::Passes<heed::recurrent::Definition>;

// SSD on the recurrence engine: one decay per token and head, C, B and delta x as queries, keys and values, D and z
// applied to the output.
#include "heed/ops/ssm/ssd/ssd.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/device_name.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/cuda/calls.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/define_internal.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/ops/ssm/ssd/ssd_internal.h"
#include "heed/ops/ssm/ssd/ssd_kernels_internal.h"

namespace heed::ssd {
namespace {

using mechanism::Axes;
using mechanism::Fail;
using mechanism::StateDType;
using recurrent::Role;

// The table of the recurrence.
template <class View>
struct Recurrence {
  View C, B, x, log_decay;
};
constexpr Recurrence<mechanism::Tensor> kRecurrence = {
    .C = {"C", "BTHK", Role::kQuery},
    .B = {"B", "BTHK", Role::kKey},
    .x = {"x", "BTGV", Role::kValue},
    .log_decay = {"log_decay", "BTG", Role::kLogDecay, mechanism::kWide, mechanism::kDecays},
};
constexpr States<mechanism::StateTensor> kRecurrenceStates = {.S = {"S", "BGVF"}};

std::span<const mechanism::Tensor> Rows() { return mechanism::Members(kTensors); }
std::span<const ConstTensorView> TensorsOf(const Tensors<ConstTensorView>& in) { return mechanism::Members(in); }

bool IsOnDevice(const Inputs& in) { return in.x.device().type != DeviceType::kCpu; }

// Reads constants per head in f64; repeats each `copies` times if it is one per head.
void Read(const ConstTensorView& t, int64_t copies, std::vector<double>& values) {
  values.clear();
  if (!t.present() || t.data() == nullptr) return;
  const int64_t columns = t.rank() == 2 ? t.size(1) : copies;
  for (int64_t h = 0; h < t.size(0); ++h) {
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t at = h * t.stride(0) + (t.rank() == 2 ? i * t.stride(1) : 0);
      values.push_back(LoadAsDouble(t.dtype(), t.data(), at));
    }
  }
}

// Checks dt, A, D, z, dt_bias and the options, which the recurrence does not check.
void CheckOwn(const char* op, const Inputs& in, const Options& options, bool data) {
  if (!in.x.present()) Fail(op, "x", "is absent", "a tensor");
  if (in.x.rank() != 4) {
    Fail(op, "x", "has shape " + in.x.ShapeString(), "rank 4: [B, T, H, P]");
  }
  if (!IsFloat(in.x.dtype())) {
    Fail(op, "x", std::string("has dtype ") + Name(in.x.dtype()), "f64, f32, bf16 or f16");
  }
  const mechanism::AxisSizes sizes = {.B = in.x.size(0), .T = in.x.size(1), .H = in.x.size(2), .P = in.x.size(3)};
  const DType dtype = in.x.dtype();
  for (size_t i = 0; i < Rows().size(); ++i) {
    const mechanism::Tensor& row = Rows()[i];
    const ConstTensorView& t = TensorsOf(in)[i];
    const bool of_recurrence = &row == &kTensors.x || &row == &kTensors.B || &row == &kTensors.C;
    if (of_recurrence || (row.optional && !t.present())) continue;
    const bool constant = row.type == mechanism::kAnyFloat && t.present();
    if (constant && !IsFloat(t.dtype())) {
      Fail(op, row.name, std::string("has dtype ") + Name(t.dtype()), "a float dtype");
    }
    const bool own = constant || (row.type == mechanism::kWide && t.present() && t.dtype() == StateDType(dtype));
    std::string_view axes = mechanism::AxesOfRank(row.axes, t.rank());
    if (axes.empty()) axes = std::string_view(row.axes).substr(std::string_view(row.axes).rfind('|') + 1);
    mechanism::CheckTensor(op, row.name, t, mechanism::ShapeOf(axes, sizes), own ? t.dtype() : dtype, data,
                           in.x.device());
    if (&row == &kTensors.z) mechanism::CheckContiguousRows(op, row.name, t);
  }
  if (!(options.dt_min >= 0) || std::isinf(options.dt_min)) {
    Fail(op, "dt_limit", "begins with " + mechanism::Text(options.dt_min), "a number >= 0");
  }
  if (!(options.dt_max >= options.dt_min)) {
    Fail(op, "dt_limit", "ends with " + mechanism::Text(options.dt_max),
         "at least its begin, " + mechanism::Text(options.dt_min));
  }
}

mechanism::Apart Reads(const Inputs& in, const Options& options) {
  mechanism::Apart tensors(in.x.device());
  for (size_t i = 0; i < Rows().size(); ++i) tensors.Reads(Rows()[i].name, TensorsOf(in)[i]);
  tensors.Reads("initial_state", in.initial.S);
  tensors.Reads("lengths", options.lengths);
  tensors.Reads("starts", options.starts);
  tensors.Reads("cu_seqlens", options.cu_seqlens);
  return tensors;
}

// The call in the recurrence's form. The memory of `e` is laid out and written later.
struct Plan {
  Elements e;
  Recurrence<ConstTensorView> in;
  recurrent::Surroundings around;

  recurrent::Arguments Arguments() const { return {mechanism::Members(in), mechanism::Members(e.in.initial)}; }
};

// `around` must live as long as the call.
recurrent::Definition With(const recurrent::Surroundings& around) {
  return {.table = mechanism::TableOf(kRecurrence, kRecurrenceStates), .surroundings = &around};
}

void MakePlan(const char* op, const Inputs& in, const Options& options, bool data, Plan& plan) {
  CheckOwn(op, in, options, data);
  plan.in = {.C = in.C, .B = in.B, .x = in.x, .log_decay = {}};
  Elements& e = plan.e;
  e.skip = {};
  e.in = in;
  e.softplus = options.dt_softplus;
  e.dt_min = options.dt_min;
  e.dt_max = options.dt_max;
  e.heads = in.x.size(2);
  e.channels = in.x.size(3);
  e.compute = StateDType(in.x.dtype());
  if (!IsOnDevice(in)) {
    Read(in.A, 1, e.A);
    Read(in.dt_bias, 1, e.bias);
    if (e.bias.empty()) e.bias.assign(static_cast<size_t>(e.heads), 0.0);
    Read(in.D, e.channels, e.D);
  }
}

Plan PlanOf(const char* op, const Inputs& in, const Options& options, bool data) {
  Plan plan;
  MakePlan(op, in, options, data, plan);
  return plan;
}

// Lays out the staging memory from `base` on, which may be null, and returns its size.
int64_t LayOut(Plan& plan, void* base, bool backward) {
  Elements& e = plan.e;
  const ConstTensorView& x = e.in.x;
  const int64_t B = x.size(0), T = x.size(1), H = e.heads, P = e.channels;
  Carver carver(base);
  const auto next = [&](int64_t elements) -> void* {
    if (e.compute == DType::kF64) {
      double* at;
      carver.Next(at, elements);
      return at;
    }
    float* at;
    carver.Next(at, elements);
    return at;
  };
  const Axes by_token = {B, T, H}, heads_first = {H * T, 1, T};
  const auto staged = [&](int64_t elements, const Axes& sizes, const Axes& strides) {
    return TensorView(next(elements), e.compute, sizes, strides, x.device());
  };
  const auto of_tokens = [&] { return staged(B * T * H, by_token, heads_first); };
  const auto of_rows = [&] { return staged(B * T * H * P, {B, T, H, P}, {T * H * P, H * P, P, 1}); };
  e.delta = of_tokens();
  e.log_decay = of_tokens();
  if (e.in.D.present()) e.skip = staged(H * P, {H, P}, {P, 1});
  if (backward) {
    e.d_log_decay = of_tokens();
    e.dv = of_rows();
    if (e.in.z.present()) e.y = of_rows();
  }
  plan.in.log_decay = e.log_decay;
  plan.around.value_factors = e.delta;
  plan.around.skip = e.skip;
  return carver.bytes();
}

// The staging memory of a call: the context's, or separate memory on the device.
class Staging {
 public:
  Staging(const char* op, Context& ctx, Plan& plan, bool backward) {
    const int64_t bytes = LayOut(plan, nullptr, backward);
    if (!IsOnDevice(plan.e.in)) {
      ctx.ReserveStaging(bytes);
      LayOut(plan, ctx.Staging(), backward);
      return;
    }
    const Device device = plan.e.in.x.device();
    const std::string why_not = heed::cuda::Declines(device, 0);
    if (!why_not.empty()) throw Unsupported(std::string(op) + ": " + NameOf(device) + " " + why_not);
    call_.emplace(op, ctx, device);
    memory_.emplace(*call_, std::max<size_t>(1, bytes));
    LayOut(plan, memory_->data(), backward);
  }

 private:
  std::optional<heed::cuda::Call> call_;
  std::optional<heed::cuda::DeviceMemory> memory_;
};

// Computes time steps and, if the context checks, checks them.
void PrepareTimeSteps(const char* op, Context& ctx, const Elements& e) {
  ComputeTimeSteps(ctx, e);
  if (!ctx.checks() || IsOnDevice(e.in)) return;
  for (const mechanism::TokenRange& range : e.ranges) {
    for (int64_t t = range.begin; t < range.end; ++t) {
      for (int64_t h = 0; h < e.heads; ++h) {
        const TensorView& g = e.log_decay;
        const double value =
            LoadAsDouble(g.dtype(), g.data(), range.batch * g.stride(0) + t * g.stride(1) + h * g.stride(2));
        if (!(value <= 0)) {
          Fail(op, "dt", "gives a log decay delta A of " + mechanism::Text(value), "<= 0 everywhere");
        }
      }
    }
  }
}

}  // namespace

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  HEED_IN_SEGMENTS(ssd, Forward)
  constexpr char kOp[] = "ssd::Forward";
  const os::ScopedFloatControl float_control;  // for constants and sums
  Plan plan = PlanOf(kOp, in, options, true);
  auto others = Reads(in, options);
  others.Writes(kOp, "o", out.o);
  others.Writes(kOp, "final_state", out.final.S);
  plan.e.ranges = mechanism::RangesOf(kOp, "x", in.x, options);
  const Staging staging(kOp, ctx, plan, false);
  plan.around.output_gate = in.z;
  plan.around.prepare = [&] { PrepareTimeSteps(kOp, ctx, plan.e); };
  recurrent::Passes::Forward(kOp, ctx, With(plan.around), plan.Arguments(), options,
                             mechanism::Lists<Structs>::Of(out));
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  HEED_IN_SEGMENTS(ssd, Backward)
  constexpr char kOp[] = "ssd::Backward";
  const os::ScopedFloatControl float_control;  // for constants and sums
  Plan plan = PlanOf(kOp, in, options, true);
  Elements& e = plan.e;
  mechanism::CheckTensor(kOp, "d_o", in.d_o, in.x.sizes(), in.x.dtype(), true, in.x.device());
  mechanism::CheckContiguousRows(kOp, "d_o", in.d_o);
  auto others = Reads(in, options);
  others.Reads("d_o", in.d_o);
  others.Reads("d_state", in.d_final.S);
  const mechanism::Results results = mechanism::Lists<Structs>::Of(out);
  for (size_t i = 0; i < Rows().size(); ++i) {
    const TensorView& t = results.gradients[i];
    const ConstTensorView& of = TensorsOf(in)[i];
    const std::string name = std::string("d") + Rows()[i].name;
    if (!t.present()) continue;
    if (!of.present()) Fail(kOp, name.c_str(), "is asked for", "none: there is no such input");
    mechanism::CheckTensor(kOp, name.c_str(), t, of.sizes(), of.dtype(), true, in.x.device());
    if (t.rank() == 4) mechanism::CheckContiguousRows(kOp, name.c_str(), t);
    others.Writes(kOp, name.c_str(), t);
  }
  others.Writes(kOp, "dinitial_state", out.initial.S);

  e.ranges = mechanism::RangesOf(kOp, "x", in.x, options);
  e.d_o = in.d_o;
  e.out = out;
  const Staging staging(kOp, ctx, plan, true);
  recurrent::Arguments whole = plan.Arguments();
  whole.d_o = in.d_o;
  whole.d_final = mechanism::Members(in.d_final);
  recurrent::Surroundings backward = plan.around;
  backward.skip = {};
  backward.wide_dv = true;
  if (out.z.present()) {  // dz needs y
    recurrent::Surroundings forward = plan.around;
    forward.wide_o = true;
    forward.prepare = [&] { PrepareTimeSteps(kOp, ctx, e); };
    recurrent::Passes::Forward(kOp, ctx, With(forward), plan.Arguments(), options, {.o = e.y});
  }
  if (in.z.present()) {
    whole.d_o = e.y;
    backward.wide_o = true;
  }
  backward.prepare = [&] {
    if (!out.z.present()) PrepareTimeSteps(kOp, ctx, e);
    if (in.z.present()) ComputeGateGradients(ctx, e);
  };
  const bool states_alone = std::ranges::none_of(results.gradients, &TensorView::present);
  Recurrence<TensorView> gradients = {};
  if (!states_alone) gradients = {.C = out.C, .B = out.B, .x = e.dv, .log_decay = e.d_log_decay};
  recurrent::Passes::Backward(kOp, ctx, With(backward), whole, options,
                              {{}, results.states, mechanism::Members(gradients)});
  if (!states_alone) FinishGradients(ctx, e);
  if (IsOnDevice(in) || options.cut != nullptr) return;  // already zero for other tokens, or another call's
  for (const TensorView* t : {&out.x, &out.dt, &out.z}) {
    mechanism::ClearOthers(e.ranges, *t);
  }
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o) {
  constexpr char kOp[] = "ssd::Step";
  const os::ScopedFloatControl float_control;  // for constants and sums
  Inputs whole;                                // with one token
  const std::span<ConstTensorView> tensors = mechanism::MembersOf<ConstTensorView>(static_cast<StepInputs&>(whole));
  for (size_t i = 0; i < Rows().size(); ++i) {
    const ConstTensorView& t = TensorsOf(in)[i];
    tensors[i] = Rows()[i].over_tokens() ? mechanism::OneToken(kOp, Rows()[i].name, t) : t;
  }
  Options of_token = options;
  of_token.lengths = of_token.starts = of_token.cu_seqlens = {};
  thread_local Plan plan;  // its memory is reused by the next step
  plan.around = {};
  MakePlan(kOp, whole, of_token, true, plan);
  auto others = Reads(whole, of_token);
  others.Writes(kOp, "state", state.S);
  others.Writes(kOp, "o", o);
  mechanism::Ranges(kOp, "x", whole.x, 1, of_token, true, plan.e.ranges);
  const Staging staging(kOp, ctx, plan, false);
  plan.around.output_gate = whole.z;
  plan.around.prepare = [&] { PrepareTimeSteps(kOp, ctx, plan.e); };
  const auto without_tokens = [](const ConstTensorView& t) {
    return ConstTensorView(t.data(), t.dtype(), {t.size(0), t.size(2)}, {t.stride(0), t.stride(2)}, t.device());
  };
  const Recurrence<ConstTensorView> token = {
      .C = in.C, .B = in.B, .x = in.x, .log_decay = without_tokens(plan.in.log_decay)};
  recurrent::Passes::Step(kOp, ctx, With(plan.around), {.tensors = mechanism::Members(token)}, of_token,
                          {.o = o, .states = mechanism::Members(state)});
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "ssd::Workspace";
  Plan plan = PlanOf(kOp, in, options, false);
  const int64_t staging = LayOut(plan, nullptr, false);
  plan.around.output_gate = in.z;
  return staging + recurrent::Passes::Workspace(kOp, ctx, With(plan.around), plan.Arguments(), options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "ssd::BackwardWorkspace";
  Plan plan = PlanOf(kOp, in, options, false);
  const int64_t staging = LayOut(plan, nullptr, true);
  return staging + recurrent::Passes::BackwardWorkspace(kOp, ctx, With(plan.around), plan.Arguments(), options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "ssd::Explain";
  Plan plan = PlanOf(kOp, in, options, false);
  const int64_t staging = LayOut(plan, nullptr, false);
  plan.around.output_gate = in.z;
  Explanation e = recurrent::Passes::Explain(kOp, ctx, With(plan.around), plan.Arguments(), options);
  e.workspace_bytes += staging;
  return e;
}

HEED_DEFINE_SEGMENTS(ssd)

}  // namespace heed::ssd

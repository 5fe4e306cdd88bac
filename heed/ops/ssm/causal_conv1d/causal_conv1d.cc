// The causal convolution: a scan with its own kernels.
#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include "heed/core/error.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"

namespace heed::causal_conv1d {
namespace {

using scanning::Call;
using scanning::Definition;

// The members of the scan structs for the tensors of the table.
constexpr ConstTensorView scanning::StepInputs::* kInputs[] = {&scanning::StepInputs::u, &scanning::StepInputs::shift,
                                                               &scanning::StepInputs::delta_bias};
constexpr TensorView scanning::Gradients::* kGradients[] = {&scanning::Gradients::du, &scanning::Gradients::dshift,
                                                            &scanning::Gradients::ddelta_bias};
constexpr size_t kCount = std::size(kTensors);

constexpr std::array<scanning::Tensor, kCount> kScanTensors = [] {
  std::array<scanning::Tensor, kCount> rows;
  for (size_t i = 0; i < kCount; ++i) {
    const Tensor& t = kTensors[i];
    rows[i] = {.name = t.name,
               .axes = t.axes,
               .input = kInputs[i],
               .gradient = kGradients[i],
               .type = t.type,
               .optional = t.optional};
  }
  return rows;
}();

scanning::Inputs AsScan(const char* op, const Inputs& in) {
  if (in.x.present() && in.x.rank() != 3) {
    mechanism::Fail(op, "x", "has shape " + in.x.ShapeString(), "rank 3: [B, D, T]");
  }
  scanning::Inputs whole;
  for (size_t i = 0; i < kCount; ++i) whole.*kInputs[i] = in.*kTensors[i].input;
  whole.initial = in.initial;
  return whole;
}

scanning::Options AsScan(const Options& options) { return mechanism::With(scanning::Options(), options); }

Grid Tokens(const Call& call, const ConstTensorView& t) {
  if (!t.present()) return {};
  return {t.data(), t.dtype(), t.stride(0), t.stride(1), call.reverse() ? -t.stride(2) : t.stride(2)};
}

Grid State(const ConstTensorView& t) {
  if (!t.present()) return {};
  return {t.data(), t.dtype(), t.stride(0), t.stride(1), t.stride(2)};
}

Grid Parameter(const ConstTensorView& t) {  // over channels and taps
  if (!t.present()) return {};
  return {t.data(), t.dtype(), 0, t.stride(0), t.rank() == 2 ? t.stride(1) : 0};
}

// True if channels are contiguous; if both axes are, the longer one decides.
bool ChannelsInLanes(const ConstTensorView& x) {
  const int64_t D = x.size(1), T = x.size(2);
  if (x.stride(1) != 1 || D == 1) return false;
  return T > 1 ? std::abs(x.stride(2)) != 1 || T < D : true;
}

// True if neither axis is contiguous, so that elements are gathered one by one.
bool Gathers(const ConstTensorView& x) { return !ChannelsInLanes(x) && x.size(2) > 1 && std::abs(x.stride(2)) != 1; }

void RefuseToGather(const char* op, const Context& ctx, const ConstTensorView& x) {
  if (!ctx.strict() || !Gathers(x)) return;
  throw Unsupported(std::string(op) +
                    ": x: neither tokens nor channels are contiguous, so that they would be gathered "
                    "one by one, which a strict Context forbids");
}

Problem ProblemOf(const Definition& definition, const Call& call, const scanning::Inputs& in) {
  Problem p;
  p.dtype = in.u.dtype();
  p.D = call.sizes.D;
  p.W = call.sizes.W;
  p.silu = definition.silu;
  for (const scan::Sequence& s : call.problem.sequences) {
    const auto index = static_cast<int64_t>(p.sequences.size());
    p.sequences.push_back({s.batch, index, s.first, s.count});
    int64_t begin = 0;
    do {
      p.runs.push_back({index, begin, std::min(begin + kRunTokens, s.count)});
      begin += kRunTokens;
    } while (begin < s.count);
  }
  p.channels_in_lanes = ChannelsInLanes(in.u);
  p.x = Tokens(call, in.u);
  p.weight = Parameter(in.shift);
  p.bias = Parameter(in.delta_bias);
  p.initial = State(in.initial);
  return p;
}

const scanning::Kernels kKernels = {
    .forward =
        [](const char* op, Context& ctx, const Definition& definition, const Call& call, const scanning::Inputs& in,
           const scanning::Outputs& out) {
          RefuseToGather(op, ctx, in.u);
          Problem p = ProblemOf(definition, call, in);
          p.o = Tokens(call, out.o);
          p.final = State(out.final);
          ForwardCpu(ctx, p);
        },
    .backward =
        [](const char* op, Context& ctx, const Definition& definition, const Call& call,
           const scanning::BackwardInputs& in, const scanning::Gradients& out) {
          RefuseToGather(op, ctx, in.u);
          const GradientGrids g = {.d_o = Tokens(call, in.d_o),
                                   .d_final = State(in.d_final),
                                   .dx = Tokens(call, out.du),
                                   .dinitial = State(out.dinitial),
                                   .dweight = Parameter(out.dshift),
                                   .dbias = Parameter(out.ddelta_bias)};
          BackwardCpu(ctx, ProblemOf(definition, call, in), g);
        },
    .step =
        [](Context& ctx, const Definition& definition, const Call& call, const scanning::Inputs& in,
           const TensorView& state, const ConstTensorView& o) {
          Problem p = ProblemOf(definition, call, in);
          p.o = Tokens(call, o);
          p.final = State(state);
          StepCpu(ctx, p);
        },
    .workspace =
        [](const Context& ctx, const Definition& definition, const Call& call, const scanning::Inputs& in,
           bool backward) {
          const Problem p = ProblemOf(definition, call, in);
          return backward ? BackwardBytes(ctx, p) : ForwardBytes(ctx, p);
        },
    .explain =
        [](const scanning::Inputs& in, scanning::Explanation& e) {
          e.kernel = std::string("causal_conv1d_") + Name(mechanism::StateDType(in.u.dtype()));
          e.why = ChannelsInLanes(in.u) ? "channels in lanes, because they are contiguous in x"
                  : Gathers(in.u)       ? "tokens in lanes, gathered: neither axis of x is contiguous"
                                        : "tokens in lanes, because they are contiguous in x";
        }};

}  // namespace

Definition DefinitionOf(const Options& options) {
  return {.tensors = kScanTensors,
          .state_axes = "BDw",
          .flops = 2,  // per tap
          .kernels = &kKernels,
          .silu = options.activation == Activation::kSilu};
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "causal_conv1d::Forward";
  scanning::Forward(kOp, ctx, DefinitionOf(options), AsScan(kOp, in), AsScan(options), {out.o, out.final, {}});
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "causal_conv1d::Backward";
  scanning::Gradients gradients;
  for (size_t i = 0; i < kCount; ++i) gradients.*kGradients[i] = out.*kTensors[i].gradient;
  gradients.dinitial = out.dinitial;
  scanning::Backward(kOp, ctx, DefinitionOf(options), {AsScan(kOp, in), in.d_o, in.d_final, {}}, AsScan(options),
                     gradients);
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const TensorView& state, const TensorView& o) {
  scanning::StepInputs token;
  for (size_t i = 0; i < kCount; ++i) token.*kInputs[i] = in.*kTensors[i].step;
  scanning::Step("causal_conv1d::Step", ctx, DefinitionOf(options), token, {}, {state, {}}, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "causal_conv1d::Workspace";
  return scanning::Workspace(kOp, ctx, DefinitionOf(options), AsScan(kOp, in), AsScan(options));
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "causal_conv1d::BackwardWorkspace";
  return scanning::BackwardWorkspace(kOp, ctx, DefinitionOf(options), AsScan(kOp, in), AsScan(options));
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "causal_conv1d::Explain";
  const auto e = scanning::Explain(kOp, ctx, DefinitionOf(options), AsScan(kOp, in), AsScan(options));
  return {e.kernel, e.target, e.why, e.flops, e.bytes, e.workspace_bytes};
}

}  // namespace heed::causal_conv1d

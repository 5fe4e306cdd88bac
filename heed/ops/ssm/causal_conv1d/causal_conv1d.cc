// The causal convolution: a scan with its own kernels.
#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "heed/core/error.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/define_internal.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"

namespace heed::causal_conv1d {
namespace {

using scanning::Arguments;
using scanning::Call;
using scanning::Definition;
using scanning::Results;
using Of = mechanism::Lists<Structs>;

Grid Tokens(const Call& call, const ConstTensorView& t) {
  if (!t.present()) return {};
  return {t.data(), t.dtype(), t.stride(0), t.stride(1), call.reverse ? -t.stride(2) : t.stride(2)};
}

Grid StateGrid(const ConstTensorView& t) {
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

Problem ProblemOf(const Definition& definition, const Call& call, const Arguments& arguments) {
  const Inputs in = Of::InputsOf(arguments);
  Problem p;
  p.dtype = in.x.dtype();
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
  p.channels_in_lanes = ChannelsInLanes(in.x);
  p.x = Tokens(call, in.x);
  p.weight = Parameter(in.weight);
  p.bias = Parameter(in.bias);
  p.initial = StateGrid(in.initial.inputs);
  return p;
}

const scanning::Kernels kKernels = {
    .forward =
        [](const char* op, Context& ctx, const Definition& definition, const Call& call, const Arguments& in,
           const Results& results) {
          RefuseToGather(op, ctx, in.tensors[0]);
          const Outputs out = Of::OutputsOf(results);
          Problem p = ProblemOf(definition, call, in);
          p.o = Tokens(call, out.o);
          p.final = StateGrid(out.final.inputs);
          ForwardCpu(ctx, p);
        },
    .backward =
        [](const char* op, Context& ctx, const Definition& definition, const Call& call, const Arguments& arguments,
           const Results& results) {
          RefuseToGather(op, ctx, arguments.tensors[0]);
          const BackwardInputs in = Of::InputsOf(arguments);
          const Gradients out = Of::GradientsOf(results);
          const GradientGrids g = {.d_o = Tokens(call, in.d_o),
                                   .d_final = StateGrid(in.d_final.inputs),
                                   .dx = Tokens(call, out.x),
                                   .dinitial = StateGrid(out.initial.inputs),
                                   .dweight = Parameter(out.weight),
                                   .dbias = Parameter(out.bias)};
          BackwardCpu(ctx, ProblemOf(definition, call, arguments), g);
        },
    .step =
        [](Context& ctx, const Definition& definition, const Call& call, const Arguments& in, const Results& results) {
          const Outputs out = Of::OutputsOf(results);
          Problem p = ProblemOf(definition, call, in);
          p.o = Tokens(call, out.o);
          p.final = StateGrid(out.final.inputs);
          StepCpu(ctx, p);
        },
    .workspace =
        [](const Context& ctx, const Definition& definition, const Call& call, const Arguments& in, bool backward) {
          const Problem p = ProblemOf(definition, call, in);
          return backward ? BackwardBytes(ctx, p) : ForwardBytes(ctx, p);
        },
    .explain =
        [](const Arguments& in, Explanation& e) {
          const ConstTensorView& x = in.tensors[0];
          e.kernel = std::string("causal_conv1d_") + Name(mechanism::StateDType(x.dtype()));
          e.why = ChannelsInLanes(x) ? "channels in lanes, because they are contiguous in x"
                  : Gathers(x)       ? "tokens in lanes, gathered: neither axis of x is contiguous"
                                     : "tokens in lanes, because they are contiguous in x";
        }};

}  // namespace

Definition DefinitionOf(const Options& options) {
  return {.table = mechanism::TableOf(kTensors, kStates),
          .flops = 2,  // per tap
          .kernels = &kKernels,
          .silu = options.activation == Activation::kSilu};
}

HEED_DEFINE_RECURRENT(scanning, causal_conv1d)

}  // namespace heed::causal_conv1d

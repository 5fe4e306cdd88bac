// Retention on the recurrence engine: one constant decay per head.
#include "heed/ops/gated/retention/retention_internal.h"

#include "heed/mechanism/define_internal.h"

#include <cmath>
#include <vector>

namespace heed::retention {
namespace {

using Of = mechanism::Lists<Structs>;

void SetLogDecays(int64_t heads, std::vector<double>& decays) {
  decays.clear();
  for (int64_t h = 0; h < heads; ++h) {
    decays.push_back(std::log1p(-std::exp2(-5 - static_cast<double>(h))));
  }
}

// Log decays of a call without them: memory and a view of it.
struct Decays {
  std::vector<double> f64;
  std::vector<float> f32;

  template <class In>
  ConstTensorView Of(const In& in) {
    const int rank = in.v.rank();
    if (in.log_decay.present() || rank < 3) return in.log_decay;
    const int64_t heads = in.v.size(rank - 2);
    SetLogDecays(heads, f64);
    f32.assign(f64.begin(), f64.end());
    if (in.q.dtype() == DType::kF64) return {f64.data(), DType::kF64, {heads}};
    return {f32.data(), DType::kF32, {heads}};
  }
};

template <class In>
In WithDecays(In in, Decays& decays) {
  in.log_decay = decays.Of(in);
  return in;
}

}  // namespace

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true};
}

std::vector<double> LogDecays(int64_t heads) {
  std::vector<double> decays;
  SetLogDecays(heads, decays);
  return decays;
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  HEED_IN_SEGMENTS(retention, Forward)
  Decays decays;
  recurrent::Passes::Forward("retention::Forward", ctx, DefinitionOf(options), Of::Of(WithDecays(in, decays)), options,
                             Of::Of(out));
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  HEED_IN_SEGMENTS(retention, Backward)
  Decays decays;
  recurrent::Passes::Backward("retention::Backward", ctx, DefinitionOf(options), Of::Of(WithDecays(in, decays)),
                              options, Of::Of(out));
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o) {
  thread_local Decays decays;  // its memory is reused by the next step
  const StepInputs whole = WithDecays(in, decays);
  recurrent::Passes::Step("retention::Step", ctx, DefinitionOf(options), {mechanism::Members(whole)}, options,
                          {o, mechanism::Members(state)});
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  Decays decays;
  return recurrent::Passes::Workspace("retention::Workspace", ctx, DefinitionOf(options),
                                      Of::Of(WithDecays(in, decays)), options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  Decays decays;
  return recurrent::Passes::BackwardWorkspace("retention::BackwardWorkspace", ctx, DefinitionOf(options),
                                              Of::Of(WithDecays(in, decays)), options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  Decays decays;
  return recurrent::Passes::Explain("retention::Explain", ctx, DefinitionOf(options), Of::Of(WithDecays(in, decays)),
                                    options);
}

HEED_DEFINE_SEGMENTS(retention)

}  // namespace heed::retention

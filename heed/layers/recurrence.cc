// The table of recurrences, and their calls from a layer.
#include <algorithm>
#include <span>
#include <vector>

#include "heed/core/error.h"
#include "heed/layers/recurrence_internal.h"
#include "heed/ops/delta/delta_rule/delta_rule.h"
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule.h"
#include "heed/ops/delta/kda/kda.h"
#include "heed/ops/delta/rwkv7/rwkv7.h"
#include "heed/ops/gated/gla/gla.h"
#include "heed/ops/gated/hgrn2/hgrn2.h"
#include "heed/ops/gated/lightning/lightning.h"
#include "heed/ops/gated/mlstm/mlstm.h"
#include "heed/ops/gated/retention/retention.h"
#include "heed/ops/gated/rwkv6/rwkv6.h"
#include "heed/ops/gated/simple_gla/simple_gla.h"
#include "heed/ops/linear/based/based.h"
#include "heed/ops/linear/linear_attention/linear_attention.h"
#include "heed/mechanism/table_internal.h"

namespace heed::layers {
namespace {

#define HEED_PASSES(op)                                                                                          \
  #op,                                                                                                           \
      [](Context& ctx, const recurrent::Inputs& in, const recurrent::Options& options,                           \
         const recurrent::Outputs& out) { op::Forward(ctx, in, mechanism::With(op::Options(), options), out); }, \
      [](Context& ctx, const recurrent::StepInputs& in, const recurrent::State& state, const TensorView& o) {    \
        op::Step(ctx, in, op::Options(), state, o);                                                              \
      },                                                                                                         \
      [](const recurrent::Inputs& in, const recurrent::Options& options, const recurrent::Outputs& out) {        \
        op::Reference(in, mechanism::With(op::Options(), options), out);                                         \
      }

constexpr Recurrence kRecurrences[] = {
    {HEED_PASSES(linear_attention), true},
    {HEED_PASSES(based), true, false, [](int64_t keys) { return 1 + keys + keys * (keys + 1) / 2; }},
    {HEED_PASSES(retention)},
    {HEED_PASSES(lightning)},
    {HEED_PASSES(simple_gla)},
    {HEED_PASSES(gla)},
    {HEED_PASSES(hgrn2)},
    {HEED_PASSES(mlstm), true, true},
    {HEED_PASSES(rwkv6)},
    {HEED_PASSES(delta_rule)},
    {HEED_PASSES(gated_delta_rule)},
    {HEED_PASSES(kda)},
    {HEED_PASSES(rwkv7)}};

#undef HEED_PASSES

constexpr LinearMechanism kLinearMechanisms[] = {
    {"linear_attention", LinearMechanism::kNone, false}, {"retention", LinearMechanism::kNone, false},
    {"simple_gla", LinearMechanism::kHead, false},       {"gla", LinearMechanism::kKey, false},
    {"delta_rule", LinearMechanism::kNone, true},        {"gated_delta_rule", LinearMechanism::kStep, true}};

// A tensor of one token per sequence, without the axis of tokens. Constants have none.
ConstTensorView Now(const ConstTensorView& t) {
  if (!t || t.rank() < 3) return t;
  std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end()), strides(t.strides().begin(), t.strides().end());
  sizes.erase(sizes.begin() + 1);
  strides.erase(strides.begin() + 1);
  return ConstTensorView(t.data(), t.dtype(), sizes, strides);
}

recurrent::StepInputs Now(const recurrent::Inputs& in) {
  recurrent::StepInputs now;
  now.q = Now(in.q);
  now.k = Now(in.k);
  now.v = Now(in.v);
  now.log_decay = Now(in.log_decay);
  now.u = in.u;
  now.beta = Now(in.beta);
  now.a = Now(in.a);
  now.b = Now(in.b);
  now.i = Now(in.i);
  now.f = Now(in.f);
  return now;
}

// Views of a recurrence's state tensors.
recurrent::State ViewOf(const Recurrence& of, std::span<StateTensor> tensors) {
  recurrent::State view;
  view.S = tensors[0].view();
  if (of.normalised) view.z = tensors[1].view();
  if (of.maximum) view.m = tensors[2].view();
  return view;
}

}  // namespace

const Recurrence& RecurrenceNamed(std::string_view name) {
  const auto found = std::ranges::find(kRecurrences, name, &Recurrence::name);
  if (found == std::end(kRecurrences))
    throw InternalError("layers: there is no recurrence '" + std::string(name) + "'");
  return *found;
}

const LinearMechanism& LinearMechanismNamed(const std::string& layer, std::string_view name) {
  std::string known;
  for (const LinearMechanism& mechanism : kLinearMechanisms) {
    if (mechanism.name == name) return mechanism;
    known += (known.empty() ? "'" : ", '") + std::string(mechanism.name) + "'";
  }
  throw InvalidArgument(layer + ": config.mechanism is '" + std::string(name) + "', expected one of " + known);
}

void AddRecurrence(const Recurrence& of, int64_t heads, int64_t keys, int64_t values, State& state) {
  const int64_t features = of.features(keys);
  state.Add("S", {state.batch(), heads, features, values});
  if (of.normalised) state.Add("z", {state.batch(), heads, features});
  if (of.maximum) state.Add("m", {state.batch(), heads});
}

void RunRecurrence(Context& ctx, const Recurrence& of, const Tokens& tokens, const recurrent::Inputs& in, State* state,
                   const TensorView& o, size_t first) {
  if (state != nullptr && tokens.T == 1 && !tokens.call.lengths) {
    const std::vector<int64_t> sizes = {o.size(0), o.size(2), o.size(3)}, strides = {o.stride(0), o.stride(2), 1};
    return of.step(ctx, Now(in), ViewOf(of, state->tensors().subspan(first)),
                   TensorView(o.data(), o.dtype(), sizes, strides));
  }
  recurrent::Options options;
  options.lengths = tokens.call.lengths;
  options.cu_seqlens = tokens.call.cu_seqlens;
  recurrent::Outputs out;
  out.o = o;
  if (state == nullptr) return of.forward(ctx, in, options, out);
  const auto count = static_cast<size_t>(TensorsOf(of));
  const std::span<StateTensor> before = state->tensors().subspan(first, count);
  std::vector<StateTensor> after(before.begin(), before.end());
  out.final = ViewOf(of, after);
  recurrent::Inputs resumed = in;
  const recurrent::State initial = ViewOf(of, before);
  resumed.initial = {initial.S, initial.z, initial.m};
  of.forward(ctx, resumed, options, out);
  for (size_t i = 0; i < count; ++i) before[i].values.swap(after[i].values);
}

}  // namespace heed::layers

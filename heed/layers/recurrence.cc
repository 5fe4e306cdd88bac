// The recurrences of layers, and their calls from a layer.
#include "heed/layers/recurrence_internal.h"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "heed/core/error.h"
#include "heed/mechanism/call_internal.h"
#include "heed/ops/delta/delta_rule/delta_rule_internal.h"
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule_internal.h"
#include "heed/ops/delta/kda/kda_internal.h"
#include "heed/ops/delta/rwkv7/rwkv7_internal.h"
#include "heed/ops/gated/gla/gla_internal.h"
#include "heed/ops/gated/hgrn2/hgrn2_internal.h"
#include "heed/ops/gated/lightning/lightning_internal.h"
#include "heed/ops/gated/mlstm/mlstm_internal.h"
#include "heed/ops/gated/retention/retention_internal.h"
#include "heed/ops/gated/rwkv6/rwkv6_internal.h"
#include "heed/ops/gated/simple_gla/simple_gla_internal.h"
#include "heed/ops/linear/based/based_internal.h"
#include "heed/ops/linear/linear_attention/linear_attention_internal.h"

namespace heed::layers {
namespace {

using mechanism::Arguments;
using mechanism::Axes;
using mechanism::Results;

#define HEED_RECURRENCE(op)                                                                                \
  Recurrence {                                                                                             \
    #op, op::DefinitionOf({}),                                                                             \
        [](Context& ctx, const Arguments& in, const recurrent::Options& options, const Results& out) {     \
          using Of = mechanism::Lists<op::Structs>;                                                        \
          op::Forward(ctx, Of::InputsOf(in), mechanism::With(op::Options(), options), Of::OutputsOf(out)); \
        },                                                                                                 \
        [](Context& ctx, const Arguments& in, const Results& out) {                                        \
          using Of = mechanism::Lists<op::Structs>;                                                        \
          op::Step(ctx, Of::InputsOf(in), op::Options(), Of::OutputsOf(out).final, out.o);                 \
        },                                                                                                 \
        [](const Arguments& in, const recurrent::Options& options, const Results& out) {                   \
          using Of = mechanism::Lists<op::Structs>;                                                        \
          op::Reference(Of::InputsOf(in), mechanism::With(op::Options(), options), Of::OutputsOf(out));    \
        }                                                                                                  \
  }

std::span<const Recurrence> Recurrences() {
  static const Recurrence recurrences[] = {HEED_RECURRENCE(linear_attention),
                                           HEED_RECURRENCE(based),
                                           HEED_RECURRENCE(retention),
                                           HEED_RECURRENCE(lightning),
                                           HEED_RECURRENCE(simple_gla),
                                           HEED_RECURRENCE(gla),
                                           HEED_RECURRENCE(hgrn2),
                                           HEED_RECURRENCE(mlstm),
                                           HEED_RECURRENCE(rwkv6),
                                           HEED_RECURRENCE(delta_rule),
                                           HEED_RECURRENCE(gated_delta_rule),
                                           HEED_RECURRENCE(kda),
                                           HEED_RECURRENCE(rwkv7)};
  return recurrences;
}

#undef HEED_RECURRENCE

constexpr LinearMechanism kLinearMechanisms[] = {
    {"linear_attention", LinearMechanism::kNone, false}, {"retention", LinearMechanism::kNone, false},
    {"simple_gla", LinearMechanism::kHead, false},       {"gla", LinearMechanism::kKey, false},
    {"delta_rule", LinearMechanism::kNone, true},        {"gated_delta_rule", LinearMechanism::kStep, true}};

// One token of each sequence, without the axis of tokens. Constants have none.
template <class View>
View Now(std::string_view axes, const View& t) {
  const size_t of_tokens = axes.find('T');
  if (!t.present() || of_tokens == std::string_view::npos) return t;
  Axes sizes, strides;
  for (size_t i = 0; i < axes.size(); ++i) {
    if (i == of_tokens) continue;
    sizes.Append(t.size(static_cast<int>(i)));
    strides.Append(t.stride(static_cast<int>(i)));
  }
  return View(t.data(), t.dtype(), sizes, strides);
}

// The arguments of a call in the order of the mechanism's table.
struct Ordered {
  Ordered(const Recurrence& of, const NamedViews& in) : table(of.definition.table) {
    for (const auto& [name, view] : in.list()) {
      const auto found = std::ranges::find(table.tensors, name, &mechanism::Tensor::name);
      if (found == table.tensors.end()) {
        throw InternalError("layers: " + std::string(of.name) + " has no argument '" + std::string(name) + "'");
      }
      views[table.IndexOf(*found)] = view;
    }
  }
  Ordered Now() const {
    Ordered now = *this;
    for (size_t i = 0; i < table.tensors.size(); ++i) {
      now.views[i] = layers::Now(mechanism::AxesOfRank(table.tensors[i].axes, views[i].rank()), views[i]);
    }
    return now;
  }
  operator std::span<const ConstTensorView>() const {  // NOLINT: the same views
    return {views.data(), table.tensors.size()};
  }

  mechanism::Table table;
  std::array<ConstTensorView, mechanism::kMaxTensors> views;
};

// Views of the tensors of a state.
template <class View>
struct StateViews {
  explicit StateViews(std::span<StateTensor> tensors) : count(tensors.size()) {
    for (size_t i = 0; i < count; ++i) views[i] = tensors[i].view();
  }
  operator std::span<const View>() const { return {views.data(), count}; }  // NOLINT: the same views

  std::array<View, mechanism::kMaxStates> views;
  size_t count;
};

recurrent::Options OptionsOf(const Call& call) {
  recurrent::Options options;
  options.lengths = call.lengths;
  options.cu_seqlens = call.cu_seqlens;
  return options;
}

}  // namespace

void NamedViews::Add(std::string_view name, const ConstTensorView& view) {
  if (count_ == list_.size()) throw InternalError("layers: too many arguments, at '" + std::string(name) + "'");
  list_[count_++] = {name, view};
}

const ConstTensorView& NamedViews::at(std::string_view name) const {
  const auto found = std::ranges::find(list(), name, &Named::name);
  if (found == list().end()) throw InternalError("layers: there is no argument '" + std::string(name) + "'");
  return found->view;
}

int Recurrence::states() const {
  return static_cast<int>(
      std::ranges::count_if(definition.table.states, [&](const auto& state) { return definition.Has(state); }));
}

const Recurrence& RecurrenceNamed(std::string_view name) {
  const auto found = std::ranges::find(Recurrences(), name, &Recurrence::name);
  if (found == Recurrences().end()) {
    throw InternalError("layers: there is no recurrence '" + std::string(name) + "'");
  }
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
  const mechanism::AxisSizes sizes = {.B = state.batch(), .G = heads, .K = keys, .V = values, .F = of.features(keys)};
  for (const mechanism::StateTensor& tensor : of.definition.table.states) {
    if (!of.definition.Has(tensor)) continue;
    state.Add(tensor.name, mechanism::ShapeOf(tensor.axes, sizes), static_cast<float>(tensor.absent));
  }
}

void RunRecurrence(Context& ctx, const Recurrence& of, const Tokens& tokens, const NamedViews& in, State* state,
                   const TensorView& o, size_t first) {
  const Ordered ordered(of, in);
  if (state == nullptr) return of.forward(ctx, {ordered}, OptionsOf(tokens.call), {o});
  const std::span<StateTensor> before = state->tensors().subspan(first, static_cast<size_t>(of.states()));
  if (tokens.T == 1 && !tokens.call.lengths) {
    return of.step(ctx, {ordered.Now()}, {Now(of.definition.o_axes(), o), StateViews<TensorView>(before)});
  }
  std::vector<StateTensor> after(before.begin(), before.end());
  of.forward(ctx, {ordered, StateViews<ConstTensorView>(before)}, OptionsOf(tokens.call),
             {o, StateViews<TensorView>(after)});
  for (size_t i = 0; i < before.size(); ++i) before[i].values.swap(after[i].values);
}

void RecurrenceReference(const Recurrence& of, const NamedViews& in, const Call& call, const TensorView& o) {
  of.reference({Ordered(of, in)}, OptionsOf(call), {o});
}

}  // namespace heed::layers

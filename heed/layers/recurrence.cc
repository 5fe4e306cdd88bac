// The table of recurrences.
#include "heed/core/error.h"
#include "heed/layers/recurrence_internal.h"
#include "heed/ops/delta/delta_rule/delta_rule.h"
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule.h"
#include "heed/ops/gated/gla/gla.h"
#include "heed/ops/gated/retention/retention.h"
#include "heed/ops/gated/simple_gla/simple_gla.h"
#include "heed/ops/linear/linear_attention/linear_attention.h"
#include "heed/ops/mechanism/table_internal.h"

namespace heed::layers {
namespace {

// Passes of a mechanism with its own default options.
#define HEED_PASSES(op)                                                                                             \
  [](Context& ctx, const recurrent::Inputs& in, const recurrent::Options& options, const recurrent::Outputs& out) { \
    op::Forward(ctx, in, mechanism::With(op::Options(), options), out);                                             \
  },                                                                                                                \
      [](Context& ctx, const recurrent::StepInputs& in, const recurrent::State& state, const TensorView& o) {       \
        op::Step(ctx, in, op::Options(), state, o);                                                                 \
      },                                                                                                            \
      [](const recurrent::Inputs& in, const recurrent::Options& options, const recurrent::Outputs& out) {           \
        op::Reference(in, mechanism::With(op::Options(), options), out);                                            \
      }

constexpr Recurrence kRecurrences[] = {
    {"linear_attention", Recurrence::kNone, false, true, HEED_PASSES(linear_attention)},
    {"retention", Recurrence::kNone, false, false, HEED_PASSES(retention)},
    {"simple_gla", Recurrence::kHead, false, false, HEED_PASSES(simple_gla)},
    {"gla", Recurrence::kKey, false, false, HEED_PASSES(gla)},
    {"delta_rule", Recurrence::kNone, true, false, HEED_PASSES(delta_rule)},
    {"gated_delta_rule", Recurrence::kStep, true, false, HEED_PASSES(gated_delta_rule)}};

#undef HEED_PASSES

}  // namespace

const Recurrence& RecurrenceNamed(const std::string& layer, std::string_view name) {
  std::string known;
  for (const Recurrence& recurrence : kRecurrences) {
    if (recurrence.name == name) return recurrence;
    known += (known.empty() ? "'" : ", '") + std::string(recurrence.name) + "'";
  }
  throw InvalidArgument(layer + ": config.mechanism is '" + std::string(name) + "', expected one of " + known);
}

}  // namespace heed::layers

// The preconditioned gated delta rule on the recurrence engine.
#include "heed/ops/delta/precond_delta_rule/precond_delta_rule_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::precond_delta_rule {

recurrent::Definition DefinitionOf(const Options& options) {
  return {
      .table = mechanism::TableOf(kTensors, kStates), .root_scale = true, .eps = options.eps, .bound = options.bound};
}

HEED_DEFINE_RECURRENT(recurrent, precond_delta_rule)

}  // namespace heed::precond_delta_rule

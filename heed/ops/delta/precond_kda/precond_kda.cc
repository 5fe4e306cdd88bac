// Preconditioned Kimi delta attention on the recurrence engine.
#include "heed/ops/delta/precond_kda/precond_kda_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::precond_kda {

recurrent::Definition DefinitionOf(const Options& options) {
  return {
      .table = mechanism::TableOf(kTensors, kStates), .root_scale = true, .eps = options.eps, .bound = options.bound};
}

HEED_DEFINE_RECURRENT(recurrent, precond_kda)

}  // namespace heed::precond_kda

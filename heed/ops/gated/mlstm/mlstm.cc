// mLSTM on the recurrence engine: one decay for all of S, and keys relative to a running maximum.
#include "heed/ops/gated/mlstm/mlstm_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::mlstm {

recurrent::Definition DefinitionOf(const Options& options) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true, .normalize = true, .eps = options.eps};
}

HEED_DEFINE_RECURRENT(recurrent, mlstm)

}  // namespace heed::mlstm

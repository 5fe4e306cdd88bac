// Common parts of the files of mLSTM.
#ifndef HEED_OPS_GATED_MLSTM_MLSTM_INTERNAL_H_
#define HEED_OPS_GATED_MLSTM_MLSTM_INTERNAL_H_

#include "heed/ops/gated/mlstm/mlstm.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::mlstm {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::mlstm

#endif  // HEED_OPS_GATED_MLSTM_MLSTM_INTERNAL_H_

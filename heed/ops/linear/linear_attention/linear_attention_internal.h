// Common parts of the files of linear attention.
#ifndef HEED_OPS_LINEAR_LINEAR_ATTENTION_LINEAR_ATTENTION_INTERNAL_H_
#define HEED_OPS_LINEAR_LINEAR_ATTENTION_LINEAR_ATTENTION_INTERNAL_H_

#include "heed/ops/linear/linear_attention/linear_attention.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::linear_attention {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::linear_attention

#endif  // HEED_OPS_LINEAR_LINEAR_ATTENTION_LINEAR_ATTENTION_INTERNAL_H_

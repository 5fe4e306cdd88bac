// The engine definition of rwkv5, and the equations of its reference.
#ifndef HEED_OPS_GATED_RWKV5_RWKV5_INTERNAL_H_
#define HEED_OPS_GATED_RWKV5_RWKV5_INTERNAL_H_

#include "heed/ops/gated/rwkv5/rwkv5.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::rwkv5 {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::rwkv5

#endif  // HEED_OPS_GATED_RWKV5_RWKV5_INTERNAL_H_

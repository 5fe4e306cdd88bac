// The engine definition of rwkv7, and the equations of its reference.
#ifndef HEED_OPS_DELTA_RWKV7_RWKV7_INTERNAL_H_
#define HEED_OPS_DELTA_RWKV7_RWKV7_INTERNAL_H_

#include "heed/ops/delta/rwkv7/rwkv7.h"
#include "heed/mechanism/reference/delta_reference_internal.h"
#include "heed/mechanism/recurrent_internal.h"

namespace heed::rwkv7 {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::DeltaMath Math(const Inputs& in, const Options& options);

}  // namespace heed::rwkv7

#endif  // HEED_OPS_DELTA_RWKV7_RWKV7_INTERNAL_H_

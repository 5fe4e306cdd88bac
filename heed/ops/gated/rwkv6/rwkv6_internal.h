// The engine definition of rwkv6, and the equations of its reference.
#ifndef HEED_OPS_GATED_RWKV6_RWKV6_INTERNAL_H_
#define HEED_OPS_GATED_RWKV6_RWKV6_INTERNAL_H_

#include "heed/ops/gated/rwkv6/rwkv6.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::rwkv6 {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::rwkv6

#endif  // HEED_OPS_GATED_RWKV6_RWKV6_INTERNAL_H_

// DeltaProduct on the recurrence engine.
#include "heed/ops/delta/delta_product/delta_product_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::delta_product {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true};
}

HEED_DEFINE_RECURRENT(recurrent, delta_product)

}  // namespace heed::delta_product

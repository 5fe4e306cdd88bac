// DeltaProduct on the recurrence engine.
#include "heed/ops/delta/delta_product/delta_product_internal.h"

namespace heed::delta_product {

recurrent::Definition DefinitionOf(const Options&) {
  return {.decay = recurrent::DecayShape::kToken,
          .root_scale = true,
          .delta = recurrence::Delta::kAfterDecay,
          .beta = true,
          .several_writes = true};
}

HEED_DEFINE_RECURRENT(recurrent, delta_product)

}  // namespace heed::delta_product

// What delta_product says of itself.
#ifndef HEED_OPS_DELTA_DELTA_PRODUCT_DELTA_PRODUCT_INTERNAL_H_
#define HEED_OPS_DELTA_DELTA_PRODUCT_DELTA_PRODUCT_INTERNAL_H_

#include "heed/ops/delta/delta_product/delta_product.h"
#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::delta_product {

inline constexpr recurrent::Definition kDefinition = {.decay = recurrent::DecayShape::kToken,
                                               .root_scale = true,
                                               .delta = recurrence::Delta::kAfterDecay,
                                               .beta = true,
                                               .several_writes = true};
inline recurrent::Definition DefinitionOf(const Options&) { return kDefinition; }

}  // namespace heed::delta_product

#endif  // HEED_OPS_DELTA_DELTA_PRODUCT_DELTA_PRODUCT_INTERNAL_H_

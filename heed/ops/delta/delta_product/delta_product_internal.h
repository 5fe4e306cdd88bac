// The engine definition of delta_product, and the equations of its reference.
#ifndef HEED_OPS_DELTA_DELTA_PRODUCT_DELTA_PRODUCT_INTERNAL_H_
#define HEED_OPS_DELTA_DELTA_PRODUCT_DELTA_PRODUCT_INTERNAL_H_

#include "heed/ops/delta/delta_product/delta_product.h"
#include "heed/mechanism/reference/delta_reference_internal.h"
#include "heed/mechanism/recurrent_internal.h"

namespace heed::delta_product {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::DeltaMath Math(const Inputs& in, const Options& options);

}  // namespace heed::delta_product

#endif  // HEED_OPS_DELTA_DELTA_PRODUCT_DELTA_PRODUCT_INTERNAL_H_

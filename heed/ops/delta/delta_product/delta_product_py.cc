// Bindings of heed.delta_product, heed.delta_product_backward and heed.delta_product_step.
#include "docstrings/delta_product.h"
#include "heed/ops/delta/delta_product/delta_product_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::delta_product {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "delta_product", .inputs = "q k v log_decay beta", .docs = doc::kDocs},
                           DefinitionOf({}), {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::delta_product

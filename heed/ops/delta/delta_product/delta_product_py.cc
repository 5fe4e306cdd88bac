// heed.delta_product, heed.delta_product_backward and heed.delta_product_step.
#include "heed/ops/delta/delta_product/delta_product.h"

#include "docstrings/delta_product.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::delta_product {

using recurrent::Nullable;

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "delta_product",
                      .inputs = {"q", "k", "v", Nullable("log_decay"), "beta"},
                      .several_writes = true,
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::delta_product

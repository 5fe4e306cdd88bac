// Bindings of heed.efficient_attention and heed.efficient_attention_backward.
#include "docstrings/efficient_attention.h"
#include "heed/ops/linear/efficient_attention/efficient_attention_internal.h"
#include "python/mechanism/describe.h"

namespace heed::efficient_attention {

void Bind(nanobind::module_& m) {
  binding::Bind<Structs, Options>(m, {.name = "efficient_attention", .docs = doc::kDocs}, DefinitionOf({}),
                                  HEED_FUNCTIONS_WITHOUT_STEP);
}

}  // namespace heed::efficient_attention

// DeltaProduct in the harness.
#include "heed/ops/delta/delta_product/delta_product_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::delta_product {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options, recurrent::DeltaMath>(
      "delta_product", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  OpEntry entry = recurrent::DeltaEntry(mechanism);
  entry.variants.emplace_back("ungated");
  entry.flops = "6 n D Dv per token and value head, backward 18 n D Dv; n = 2";
  entry.bytes = "B Tq ((1 + n) Hkv D + (1 + n) Hq Dv + Hq) size";
  return entry;
}

}  // namespace heed::delta_product

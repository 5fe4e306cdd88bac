// DeltaProduct in the harness.
#include "heed/ops/delta/delta_product/delta_product_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::delta_product {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "delta_product", kDefinition, &Forward, &Backward, &Reference, &BackwardReference, &Step, {}, ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() {
  OpEntry entry = recurrent::DeltaEntry<&Mechanism>();
  entry.variants.emplace_back("ungated");
  entry.flops = "6 n D Dv per token and value head, backward 18 n D Dv; n = 2";
  entry.bytes = "B Tq ((1 + n) Hkv D + (1 + n) Hq Dv + Hq) size";
  return entry;
}

}  // namespace heed::delta_product

// RWKV-5 in the harness.
#include "heed/ops/gated/rwkv5/rwkv5_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::rwkv5 {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options>(
      "rwkv5", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  return recurrent::GatedEntry(mechanism, "B Tq (2 Hkv D + 2 Hq Dv) size");
}

}  // namespace heed::rwkv5

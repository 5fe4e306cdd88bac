// RWKV-6 in the harness.
#include "heed/ops/gated/rwkv6/rwkv6_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::rwkv6 {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options>(
      "rwkv6", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  return recurrent::GatedEntry(mechanism, "B Tq (2 Hkv D + Hq D + 2 Hq Dv) size");
}

}  // namespace heed::rwkv6

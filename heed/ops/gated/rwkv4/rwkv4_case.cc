// RWKV-4 in the harness.
#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/ops/gated/rwkv4/rwkv4_internal.h"

namespace heed::rwkv4 {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Structs, Options>(
      "rwkv4", DefinitionOf({}), {},
      mechanism::CaseFunctions<Structs, Options>{HEED_FUNCTIONS, &Tolerance, &BackwardTolerance});
  return recurrent::EntryOf(mechanism, "gated");
}

}  // namespace heed::rwkv4

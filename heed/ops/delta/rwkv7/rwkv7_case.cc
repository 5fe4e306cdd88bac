// RWKV-7 in the harness.
#include "heed/ops/delta/rwkv7/rwkv7_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::rwkv7 {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options, recurrent::DeltaMath>(
      "rwkv7", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  return recurrent::DeltaEntry(mechanism);
}

}  // namespace heed::rwkv7

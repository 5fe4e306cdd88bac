// RWKV-4 on the recurrence engine: a weighted mean per channel.
#include "heed/ops/gated/rwkv4/rwkv4_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::rwkv4 {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .normalize = true};
}

HEED_DEFINE_RECURRENT(recurrent, rwkv4)

}  // namespace heed::rwkv4

// RWKV-7 on the recurrence engine.
#include "heed/ops/delta/rwkv7/rwkv7_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::rwkv7 {

recurrent::Definition DefinitionOf(const Options&) { return {.table = mechanism::TableOf(kTensors, kStates)}; }

HEED_DEFINE_RECURRENT(recurrent, rwkv7)

}  // namespace heed::rwkv7

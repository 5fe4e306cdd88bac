// RWKV-5 on the recurrence engine: a constant decay per key channel, and a bonus.
#include "heed/ops/gated/rwkv5/rwkv5_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::rwkv5 {

recurrent::Definition DefinitionOf(const Options&) { return {.table = mechanism::TableOf(kTensors, kStates)}; }

HEED_DEFINE_RECURRENT(recurrent, rwkv5)

}  // namespace heed::rwkv5

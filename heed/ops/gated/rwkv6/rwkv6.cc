// RWKV-6 on the recurrence engine: a decay per key channel, and a bonus.
#include "heed/ops/gated/rwkv6/rwkv6_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::rwkv6 {

recurrent::Definition DefinitionOf(const Options&) { return {.table = mechanism::TableOf(kTensors, kStates)}; }

HEED_DEFINE_RECURRENT(recurrent, rwkv6)

}  // namespace heed::rwkv6

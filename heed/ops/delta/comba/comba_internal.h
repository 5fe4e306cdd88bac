// What comba says of itself.
#ifndef HEED_OPS_DELTA_COMBA_COMBA_INTERNAL_H_
#define HEED_OPS_DELTA_COMBA_COMBA_INTERNAL_H_

#include "heed/ops/delta/comba/comba.h"
#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::comba {

inline constexpr recurrent::Definition kDefinition = {.decay = recurrent::DecayShape::kToken,
                                               .root_scale = true,
                                               .delta = recurrence::Delta::kAfterDecay,
                                               .beta = true,
                                               .read_key = true};
inline recurrent::Definition DefinitionOf(const Options&) { return kDefinition; }

}  // namespace heed::comba

#endif  // HEED_OPS_DELTA_COMBA_COMBA_INTERNAL_H_

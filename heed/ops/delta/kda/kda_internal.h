// What kda says of itself.
#ifndef HEED_OPS_DELTA_KDA_KDA_INTERNAL_H_
#define HEED_OPS_DELTA_KDA_KDA_INTERNAL_H_

#include "heed/ops/delta/kda/kda.h"
#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::kda {

inline constexpr recurrent::Definition kDefinition = {.decay = recurrent::DecayShape::kKey,
                                               .root_scale = true,
                                               .delta = recurrence::Delta::kAfterDecay,
                                               .beta = true};
inline recurrent::Definition DefinitionOf(const Options&) { return kDefinition; }

}  // namespace heed::kda

#endif  // HEED_OPS_DELTA_KDA_KDA_INTERNAL_H_

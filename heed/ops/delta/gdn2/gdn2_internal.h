// What gdn2 says of itself.
#ifndef HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_
#define HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_

#include "heed/ops/delta/gdn2/gdn2.h"
#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::gdn2 {

inline constexpr recurrent::Definition kDefinition = {.decay = recurrent::DecayShape::kKey,
                                               .root_scale = true,
                                               .delta = recurrence::Delta::kAfterDecay,
                                               .erase_and_write = true};
inline recurrent::Definition DefinitionOf(const Options&) { return kDefinition; }

}  // namespace heed::gdn2

#endif  // HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_

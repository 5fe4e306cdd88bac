// What gdn2 says of itself.
#ifndef HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_
#define HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_

#include "heed/ops/delta/gdn2/gdn2.h"
#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::gdn2 {

recurrent::Definition DefinitionOf(const Options& options);

}  // namespace heed::gdn2

#endif  // HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_

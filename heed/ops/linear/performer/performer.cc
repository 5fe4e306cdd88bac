// Performer on the recurrence engine: random features, a normaliser, and in the causal form a decay from the running
// maximum.
#include "heed/ops/linear/performer/performer_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::performer {

recurrent::Definition DefinitionOf(const Options& options) {
  const bool softmax = options.kernel == Kernel::kSoftmax;
  return {.table = mechanism::TableOf(kTensors, kStates),
          .root_scale = true,
          .feature = softmax ? recurrence::Feature::kRandomExp : recurrence::Feature::kRandomRelu,
          .feature_eps = options.eps,
          .causal = options.causal,
          .normalize = true};
}

HEED_DEFINE_RECURRENT(recurrent, performer)

}  // namespace heed::performer

// Efficient attention on the recurrence engine: sums over all tokens, with a softmax over channels for queries and a
// softmax over tokens for keys.
#include "heed/ops/linear/efficient_attention/efficient_attention_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::efficient_attention {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates),
          .root_scale = true,
          .feature = recurrence::Feature::kSoftmax,
          .key_feature = recurrence::Feature::kSoftmaxOfTokens,
          .causal = false,
          .has_direction = false};
}

HEED_DEFINE_PASSES(recurrent, efficient_attention)

}  // namespace heed::efficient_attention

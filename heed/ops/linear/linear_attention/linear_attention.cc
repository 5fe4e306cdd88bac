// Linear attention on the recurrence engine: feature maps and a normaliser, without decay.
#include "heed/ops/linear/linear_attention/linear_attention_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::linear_attention {
namespace {

using recurrence::Feature;

Feature FeatureOf(FeatureMap map) {
  switch (map) {
    case FeatureMap::kElu1: return Feature::kElu1;
    case FeatureMap::kRelu: return Feature::kRelu;
    case FeatureMap::kReluSquared: return Feature::kReluSquared;
    case FeatureMap::kExp: return Feature::kExp;
    case FeatureMap::kIdentity: return Feature::kIdentity;
    case FeatureMap::kSoftmax: return Feature::kSoftmax;
  }
  return Feature::kIdentity;
}

}  // namespace

recurrent::Definition DefinitionOf(const Options& options) {
  return {.table = mechanism::TableOf(kTensors, kStates),
          .feature = FeatureOf(options.feature_map),
          .causal = options.causal,
          .normalize = options.normalize,
          .eps = options.eps};
}

HEED_DEFINE_RECURRENT(recurrent, linear_attention)

}  // namespace heed::linear_attention

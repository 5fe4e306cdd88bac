// The long convolution on the scan engine.
#include "heed/ops/ssm/long_convolution/long_convolution_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::long_convolution {

scanning::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .rule = scan::Rule::kTaps, .flops = 2};
}

HEED_DEFINE_PASSES(scanning, long_convolution)

}  // namespace heed::long_convolution

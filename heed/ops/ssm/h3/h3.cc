// H3 on the scan engine.
#include "heed/ops/ssm/h3/h3_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::h3 {

scanning::Definition DefinitionOf(const Options& options) {
  return {.table = mechanism::TableOf(kTensors, kStates),
          .rule = scan::Rule::kHeads,
          .flops = 8,
          .method = options.method == Method::kRecurrent     ? scan::Method::kRecurrent
                    : options.method == Method::kConvolution ? scan::Method::kConvolution
                                                             : scan::Method::kAuto};
}

HEED_DEFINE_RECURRENT(scanning, h3)

}  // namespace heed::h3

// RWKV-6 as it is defined, in double.
#include "heed/ops/gated/rwkv6/rwkv6.h"
#include "heed/ops/mechanism/recurrent_reference_internal.h"

namespace heed::rwkv6 {

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Reference(in, options, recurrent::BonusMath(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options,
                       const Gradients& out) {
  recurrent::BackwardReference(in, options, recurrent::BonusMath(in, options), out);
}

}  // namespace heed::rwkv6

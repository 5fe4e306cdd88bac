// RWKV-5 as it is defined, in double.
#include "heed/ops/gated/rwkv5/rwkv5.h"
#include "heed/ops/mechanism/recurrent_reference_internal.h"

namespace heed::rwkv5 {

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Reference(in, options, recurrent::BonusMath(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options,
                       const Gradients& out) {
  recurrent::BackwardReference(in, options, recurrent::BonusMath(in, options), out);
}

}  // namespace heed::rwkv5

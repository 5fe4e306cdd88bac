// Shared by the files of attention: checking the arguments, once for all passes.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_INTERNAL_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_INTERNAL_H_

#include "heed/engines/softmax/problem.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::attention {

// What the caller lets be absent or different.
enum class Use {
  kForward,    // everything present, dtypes as documented
  kReference,  // outputs may also be f64
  kExplain,    // no outputs; data pointers may be null
};

// Checks every argument and returns the problem they pose. Throws
// InvalidArgument; writes nothing.
softmax::Problem CheckedProblem(const char* op, const Inputs& in,
                                const Options& options, const Outputs& out,
                                Use use);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_INTERNAL_H_

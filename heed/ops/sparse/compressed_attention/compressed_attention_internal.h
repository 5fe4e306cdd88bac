// Common parts of the files of compressed attention: a checked call as two parts, each one call of attention.
#ifndef HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_INTERNAL_H_
#define HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/sparse/compressed_attention/compressed_attention.h"

namespace heed::compressed_attention {

enum Part { kWindow, kCompressed };

struct Call {
  int64_t B = 0, Tq = 0, Tk = 0, N = 0, Hq = 0, Hkv = 0, D = 0, Dv = 0;
  int64_t start = 0, ratio = 1;
  bool has_window = false;        // otherwise the window part is not computed
  std::vector<int64_t> starts;    // position of row 0 of each sequence, which options point to
  attention::Options options[2];  // of the parts

  // The number of compressed keys that row i may see.
  int64_t NumComplete(int64_t i) const { return (start + i + 1) / ratio; }
};

// Checks all inputs, and for Forward and its reference the outputs. The options of the compressed part have the chosen
// keys, listed by the threads of `ctx` if it is not null. Throws InvalidArgument.
Call CheckedCall(const char* op, Context* ctx, const Inputs& in, const Options& options, const Outputs& out,
                 attention::Use use);

// Checks the arguments of Backward. kExplain and kReference read neither o nor lse, and the gradients of kReference may
// be f64.
Call CheckedBackward(const char* op, Context* ctx, const BackwardInputs& in, const Options& options,
                     const Gradients& out, attention::Use use);

// q with the keys and values of a part.
attention::Inputs PartInputs(const Inputs& in, int64_t part);

}  // namespace heed::compressed_attention

#endif  // HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_INTERNAL_H_

// Common parts of the files of Parallax attention: a checked call, its passes, and the rows of its reference.
#ifndef HEED_OPS_EXACT_PARALLAX_ATTENTION_PARALLAX_ATTENTION_INTERNAL_H_
#define HEED_OPS_EXACT_PARALLAX_ATTENTION_PARALLAX_ATTENTION_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "heed/core/context.h"
#include "heed/mechanism/plan_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/parallax_attention/parallax_attention.h"

namespace heed::parallax_attention {

struct Call {
  std::vector<mechanism::TokenRange> sequences;  // as tokens of k and v
  int64_t B = 0, Tq = 0, Tk = 0, H = 0, Hkv = 0, D = 0, Dv = 0;
  int64_t window = 0;
  double scale = 1;

  int64_t first() const { return Tk - Tq; }  // the token of k that row 0 is at
  int64_t group() const { return H / Hkv; }  // query heads of a key head
  int64_t first_key(int64_t at) const {      // the first that a row at this token of its sequence sees
    return window > 0 && at >= window ? at - window + 1 : 0;
  }
};

// Check all arguments; with `wide`, outputs may be f64. Throw InvalidArgument.
Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide);
Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide);

// Set the results of rows and keys that belong to no sequence.
void ClearExcluded(const Call& call, const Outputs& out);
void ClearExcluded(const Call& call, const Gradients& out);

// Compute a checked call: parallax_attention_forward.cc and parallax_attention_backward.cc.
void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out);
void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out);

// The memory that the passes reserve for tensors of this dtype.
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype);
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype);

// Pairs of a row and a key that it sees, over all sequences and query heads; with `whole`, those of whole blocks of 64
// keys and rows.
double Pairs(const Call& call, bool whole);

// A row of a head as it is defined, and the keys that it sees, in doubles.
struct ReferenceRow {
  int64_t batch = 0, head = 0, row = 0, first_key = 0;  // row and first_key: tokens of q and of k
  std::vector<double> logits, second, weights;          // of each key: scale q_i^T k_j, t_ij, P_ij
  double lse = 0, mean = 0;                             // mean: a_i
};
// Calls f(row) for every row of every head.
void ForReferenceRows(const Call& call, const Inputs& in, const std::function<void(const ReferenceRow&)>& f);

}  // namespace heed::parallax_attention

#endif  // HEED_OPS_EXACT_PARALLAX_ATTENTION_PARALLAX_ATTENTION_INTERNAL_H_

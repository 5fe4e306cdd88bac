// Common parts of the files of DeltaFormer: a checked call, its passes, and the rows of its reference.
#ifndef HEED_OPS_EXACT_DELTAFORMER_DELTAFORMER_INTERNAL_H_
#define HEED_OPS_EXACT_DELTAFORMER_DELTAFORMER_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "heed/core/context.h"
#include "heed/mechanism/plan_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/deltaformer/deltaformer.h"

namespace heed::deltaformer {

struct Call {
  std::vector<mechanism::TokenRange> sequences;  // as tokens of k and u
  int64_t B = 0, T = 0, H = 0, Hkv = 0, D = 0, Dv = 0;
  int64_t first = 0;  // tokens of k and u before the first one of v, beta and w
  double scale = 1;
  ConstTensorView w;  // that of the inputs, or the keys of its tokens

  int64_t group() const { return H / Hkv; }  // query heads of a key head
};

// Check all arguments; with `wide`, outputs may be f64. Throw InvalidArgument.
Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide);
Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide);
Call CheckValues(const char* op, const ValueInputs& in, std::optional<double> scale, const TensorView& u, bool wide);

// Set the results of tokens that belong to no sequence.
void ClearExcluded(const Call& call, const Outputs& out);
void ClearExcluded(const Call& call, const Gradients& out);

// Computes u of the tokens from call.first on: deltaformer_values.cc.
void ComputeValues(Context& ctx, const Call& call, const ValueInputs& in, const TensorView& u);

// Results of the engine, in the dtype of computation.
struct Tables {
  TensorView r, lse_w, du;  // [B, T, Hkv, Dv], [B, Hkv, T]; du: of the second softmax; absent: only dq is requested
  TensorView dq, dk;        // of the second softmax; dk: absent if not requested; dq: absent if written in place
};

// Completes the gradients from the tables: deltaformer_backward.cc.
void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Tables& tables,
                     const Gradients& out);

// The memory that these reserve for tensors of this dtype; `of_keys`: gradients beside dq are requested.
mechanism::Reservation ValuesMemory(const Context& ctx, const Call& call, DType dtype);
mechanism::Reservation GradientsMemory(const Context& ctx, const Call& call, DType dtype, bool of_keys);

// A softmax over some keys, in doubles.
struct ReferenceSoftmax {
  std::vector<double> logits, weights;
  double lse = 0;
};

// A key head of a sequence as it is defined, in doubles, and its softmaxes.
struct ReferenceHead {
  using Vector = std::vector<double>;
  mechanism::TokenRange sequence;
  int64_t key_head = 0;
  double scale = 1;
  std::vector<Vector> k, w, u, r;
  Vector beta;
  std::vector<ReferenceSoftmax> W;  // of each token over those before it

  ReferenceSoftmax Softmax(const Vector& query, size_t keys) const;  // over the first keys
};

// Calls f(head) for every key head of every sequence. Rows of u of tokens below `given` are read from u, later ones
// computed.
void ForReferenceHeads(const Call& call, const ValueInputs& in, const ConstTensorView& u, int64_t given,
                       const std::function<void(const ReferenceHead&)>& f);

// The row of a token and head, in doubles.
std::vector<double> ReferenceRow(const ConstTensorView& t, int64_t b, int64_t token, int64_t h);

inline ValueInputs ValuesOf(const Inputs& in) { return {in.k, in.v, in.beta, in.w}; }

}  // namespace heed::deltaformer

#endif  // HEED_OPS_EXACT_DELTAFORMER_DELTAFORMER_INTERNAL_H_

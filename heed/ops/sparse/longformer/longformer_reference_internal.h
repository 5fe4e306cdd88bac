// Longformer as two calls of attention, for its reference and the harness: the arguments of each, and the places of the
// rows of the second one.
#ifndef HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_REFERENCE_INTERNAL_H_
#define HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_REFERENCE_INTERNAL_H_

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/sparse/longformer/longformer.h"

namespace heed::longformer {

struct Half {
  attention::BackwardInputs in;  // o and lse are absent
  attention::Options options;
};

// Row (batch, token) of the call is row (own_batch, own_token) of the second half.
struct TokenPlace {
  int64_t batch, token, own_batch, own_token;
};

struct Halves {
  Half all;     // where global tokens have separate projections, their rows and their gradients are zero here
  Half tokens;  // the rows of global tokens; tensors are absent without separate projections
  std::vector<TokenPlace> places;
  std::deque<std::vector<double>> memory;  // owns the tensors of both halves
};

// The arguments have been validated; d_o and d_lse may be absent.
Halves HalvesOf(const BackwardInputs& in, const Options& options);

// The element at the last indices; a tensor without a batch axis has fewer.
double ElementAt(const ConstTensorView& t, std::initializer_list<int64_t> index);
void SetElementAt(const TensorView& t, std::initializer_list<int64_t> index, double value);

// Copies the rows of global tokens from `own`, of the second half, to their places in `all`: tensors over heads and
// channels, and lse.
void PutRows(const Halves& halves, const ConstTensorView& own, const TensorView& all);
void PutLse(const Halves& halves, const ConstTensorView& own, const TensorView& all);

}  // namespace heed::longformer

#endif  // HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_REFERENCE_INTERNAL_H_

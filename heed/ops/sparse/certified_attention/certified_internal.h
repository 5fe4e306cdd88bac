// Common parts of the entry points of certified attention: checks and outputs.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_INTERNAL_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_INTERNAL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/engines/softmax/problem.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"
#include "heed/ops/sparse/certified_attention/certified_selection_internal.h"
#include "heed/state/kv_view.h"

namespace heed::certified_attention {

inline int64_t LongestOf(const KVView& cache) {
  return cache.lengths.empty() ? 0 : *std::max_element(cache.lengths.begin(), cache.lengths.end());
}

// Throws InvalidArgument for an epsilon out of range, and for options without a known bound.
void CheckOptions(const char* op, const Options& options);

struct Sizes {
  int64_t key_heads, value_dim, keys;
};

// Checks options and all outputs, o with the axes of q. Throws InvalidArgument.
void CheckCall(const char* op, const Inputs& in, const Options& options, const Outputs& out, const Sizes& sizes);

// The requested lse, or memory for one that was not requested: a NaN in it makes the bound NaN.
class Lse {
 public:
  Lse(const Outputs& out, const ConstTensorView& q, bool packed) : view_(out.lse) {
    if (view_.present()) return;
    const int r = q.rank();
    std::vector<int64_t> sizes = {q.size(r - 2), q.size(r - 3)};
    if (!packed) sizes.insert(sizes.begin(), q.size(0));
    own_.resize(static_cast<size_t>(q.num_elements() / q.size(r - 1)));
    view_ = TensorView(own_.data(), DType::kF32, sizes);
  }
  const TensorView& view() const { return view_; }

 private:
  std::vector<float> own_;
  TensorView view_;
};

// Writes bounds and kept blocks; rows that belong to no sequence get 0 and no block.
void Write(const softmax::Problem& problem, const Selection& selection, const TensorView& lse, const Outputs& out);

// Level kSkip: drops values during attention.
void Skip(Context& ctx, const softmax::Problem& problem, double epsilon, const Outputs& out);

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_INTERNAL_H_

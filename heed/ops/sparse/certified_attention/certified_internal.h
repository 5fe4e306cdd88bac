// What the entry points of certified attention share: checks, and what they write.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_INTERNAL_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_INTERNAL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/engines/softmax/problem.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/mechanism/check_internal.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"
#include "heed/ops/sparse/certified_attention/certified_selection_internal.h"
#include "heed/state/kv_view.h"

namespace heed::certified_attention {

// The options of attention that are left, without a pattern.
inline attention::Options ExactOptions(const Options& options) {
  attention::Options exact;
  exact.scale = options.scale;
  exact.causal = options.causal;
  exact.align = options.align;
  exact.query_starts = options.query_starts;
  exact.key_lengths = options.key_lengths;
  exact.query_lengths = options.query_lengths;
  return exact;
}

inline double ScaleOf(const Options& options, int64_t dim) {
  return options.scale.value_or(1 / std::sqrt(static_cast<double>(dim)));
}

inline int64_t LongestOf(const KVView& cache) {
  return cache.lengths.empty() ? 0 : *std::max_element(cache.lengths.begin(), cache.lengths.end());
}

struct Sizes {
  int64_t batch, rows, key_heads, value_dim, keys;
};

// Checks epsilon, level, scale and everything that is written. Throws InvalidArgument.
void CheckCall(const char* op, const Inputs& in, const Options& options, const Outputs& out,
               const Sizes& sizes);

// Memory for an lse that nobody asked for, or the one that somebody did: a NaN in it is one of the bound.
class Lse {
 public:
  Lse(const Outputs& out, int64_t batch, int64_t heads, int64_t rows) {
    if (out.lse.present()) {
      view_ = out.lse;
      return;
    }
    own_.resize(static_cast<size_t>(batch * heads * rows));
    view_ = TensorView(own_.data(), DType::kF32, {batch, heads, rows});
  }
  const TensorView& view() const { return view_; }

 private:
  std::vector<float> own_;
  TensorView view_;
};

void WriteBounds(const Selection& selection, const TensorView& lse, const Outputs& out);
void WriteKept(const Selection& selection, int64_t key_heads, const TensorView& kept);

// Attention that leaves out values as it meets them: level skip.
void Skip(Context& ctx, const softmax::Problem& problem, double epsilon, const Outputs& out);

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_INTERNAL_H_

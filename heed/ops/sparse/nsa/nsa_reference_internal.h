// nsa as three calls of attention under masks, for its reference and the harness.
#ifndef HEED_OPS_SPARSE_NSA_NSA_REFERENCE_INTERNAL_H_
#define HEED_OPS_SPARSE_NSA_NSA_REFERENCE_INTERNAL_H_

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/sparse/nsa/nsa.h"

namespace heed::nsa {

// The quantities that show how close the selection of a row and key head was.
struct Margin {
  double distance = 1;   // relative distance of the smallest selected importance from the largest that is not selected
  double least = 1;      // smallest selected importance
  double magnitude = 0;  // the largest sum_d |scale q_d k_d| of its heads and windows
};

struct Parts {
  attention::BackwardInputs in[3];  // of the compressed, selected and windowed branches; o and lse are absent
  attention::Options options[3];
  ConstTensorView blocks;       // i32, as in Outputs
  std::vector<Margin> margins;  // [B, Tq, Hkv]
  bool means = false;
  int64_t length = 0, stride = 0;
  std::deque<std::vector<double>> memory;  // owns the tensors of the branches
};

// The arguments have been validated; d_o may be absent.
Parts PartsOf(const BackwardInputs& in, const Options& options);

// Row-major memory of zeros.
TensorView Zeros(Parts& parts, DType dtype, const std::vector<int64_t>& sizes);

double ElementAt(const ConstTensorView& t, std::initializer_list<int64_t> index);
void SetElementAt(const TensorView& t, std::initializer_list<int64_t> index, double value);

// Calls f(index) for every element of [sizes[0], sizes[1], sizes[2], sizes[3]].
template <class F>
void ForElements(const ConstTensorView& t, const F& f) {
  for (int64_t a = 0; a < t.size(0); ++a) {
    for (int64_t b = 0; b < t.size(1); ++b) {
      for (int64_t c = 0; c < t.size(2); ++c) {
        for (int64_t d = 0; d < t.size(3); ++d) f(a, b, c, d);
      }
    }
  }
}

// to += the contribution of the gradients of means to each token: 1 / length of every window that contains it.
void AddFromMeans(const Parts& parts, const ConstTensorView& d_means, const TensorView& to);

}  // namespace heed::nsa

#endif  // HEED_OPS_SPARSE_NSA_NSA_REFERENCE_INTERNAL_H_

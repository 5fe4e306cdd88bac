// Linear in double, one product at a time.
#include "heed/layers/linear.h"

namespace heed::layers {

void Linear::Reference(const ConstTensorView& x, const ConstTensorView& weight, const ConstTensorView& bias,
                       const TensorView& y) {
  for (int64_t row = 0; row < y.size(0); ++row) {
    for (int64_t i = 0; i < y.size(1); ++i) {
      double sum = bias ? LoadAsDouble(bias.dtype(), bias.data(), i * bias.stride(0)) : 0;
      for (int64_t e = 0; e < x.size(1); ++e) {
        sum += LoadAsDouble(x.dtype(), x.data(), row * x.stride(0) + e * x.stride(1)) *
               LoadAsDouble(weight.dtype(), weight.data(), i * weight.stride(0) + e * weight.stride(1));
      }
      StoreDouble(y.dtype(), y.data(), row * y.stride(0) + i * y.stride(1), sum);
    }
  }
}

}  // namespace heed::layers

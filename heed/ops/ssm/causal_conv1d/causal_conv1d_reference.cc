// The causal convolution as it is defined, one token of one channel: everything that it is.
//
//   p_t = bias + sum_{j < W} weight_j x_{t-(W-1)+j},  o_t = p_t, or p_t / (1 + exp(-p_t))
#include <cstddef>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"

namespace heed::causal_conv1d {
namespace {

using mechanism::Array;

struct Token {
  static constexpr mechanism::ReadableForm kForm = {.heads = 'D', .shared_heads = 0, .o = "BDT"};
  bool silu;

  // x, bias and o have one element; weight has W, and inputs are the last W - 1, oldest first.
  template <class Number>
  void operator()(const Array<Number>& x, const Array<Number>& weight, const Array<Number>& bias, Array<Number>& inputs,
                  Array<Number>& o) const {
    Number p = bias[0];
    for (size_t j = 0; j < inputs.size(); ++j) p += weight[j] * inputs[j];
    p += weight[inputs.size()] * x[0];
    o[0] = silu ? p * mechanism::Sigmoid(p) : p;
    mechanism::ShiftIn(x, inputs);
  }
};

Token TokenOf(const Inputs&, const Options& options) { return {options.activation == Activation::kSilu}; }

}  // namespace

HEED_DEFINE_REFERENCES

}  // namespace heed::causal_conv1d

// The short convolution of recurrent layers, and its state.
#ifndef HEED_LAYERS_CONVOLVE_INTERNAL_H_
#define HEED_LAYERS_CONVOLVE_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/layers/layer.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"

namespace heed::layers {

// A view [B, C, T] of the channels of rows [B, T, ...] that are `stride` elements apart.
inline ConstTensorView Channels(const float* data, const Tokens& tokens, int64_t channels, int64_t stride) {
  return ConstTensorView(data, DType::kF32, {tokens.B, channels, tokens.T}, {tokens.T * stride, 1, stride});
}
inline TensorView Channels(float* data, const Tokens& tokens, int64_t channels, int64_t stride) {
  return TensorView(data, DType::kF32, {tokens.B, channels, tokens.T}, {tokens.T * stride, 1, stride});
}

// y = silu(conv(x)), for rows that are x_stride and y_stride elements apart. `state` [B, C, taps - 1] is read and
// written; null: none.
inline void Convolve(Context& ctx, const Tokens& tokens, const std::vector<float>& weight,
                     const std::vector<float>& bias, int64_t channels, int64_t taps, const float* x, int64_t x_stride,
                     StateTensor* state, float* y, int64_t y_stride) {
  causal_conv1d::Options options;
  options.activation = causal_conv1d::Activation::kSilu;
  const ConstTensorView w(weight.data(), DType::kF32, {channels, taps});
  const ConstTensorView b = bias.empty() ? ConstTensorView() : ConstTensorView(bias.data(), DType::kF32, {channels});
  if (state != nullptr && tokens.T == 1 && !tokens.call.lengths) {
    const ConstTensorView now(x, DType::kF32, {tokens.B, channels}, {x_stride, 1});
    return causal_conv1d::Step(ctx, {now, w, b}, options, {state->view()},
                               TensorView(y, DType::kF32, {tokens.B, channels}, {y_stride, 1}));
  }
  options.lengths = tokens.call.lengths;
  options.cu_seqlens = tokens.call.cu_seqlens;
  causal_conv1d::Inputs in = {{Channels(x, tokens, channels, x_stride), w, b}, {}};
  causal_conv1d::Outputs out = {Channels(y, tokens, channels, y_stride), {}};
  StateTensor after;
  if (state != nullptr) {
    after = *state;
    in.initial.inputs = state->view();
    out.final.inputs = after.view();
  }
  causal_conv1d::Forward(ctx, in, options, out);
  if (state != nullptr) state->values.swap(after.values);
}

// -exp of each number: decay rates from their logarithms.
std::vector<float> Rates(const std::vector<float>& logarithms);

}  // namespace heed::layers

#endif  // HEED_LAYERS_CONVOLVE_INTERNAL_H_

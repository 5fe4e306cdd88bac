// Token shift.
#include "heed/layers/token_shift_internal.h"

#include <algorithm>

namespace heed::layers {

const float* Before(Frame& frame, const Tokens& tokens, const float* x, int64_t width, StateTensor* state) {
  float* before = frame.Floats(tokens.rows() * width);
  for (int64_t b = 0; b < tokens.B; ++b) {
    const float* from = x + b * tokens.T * width;
    float* to = before + b * tokens.T * width;
    float* last = state == nullptr ? nullptr : state->values.data() + b * width;
    if (last == nullptr) {
      std::fill_n(to, width, 0.f);
    } else {
      std::copy_n(last, width, to);
    }
    std::copy_n(from, (tokens.T - 1) * width, to + width);
    const int64_t count = tokens.counts[static_cast<size_t>(b)];
    if (last != nullptr && count > 0) std::copy_n(from + (count - 1) * width, width, last);
  }
  for (const int64_t begin : tokens.packed) {
    if (begin < tokens.T) std::fill_n(before + begin * width, width, 0.f);
  }
  return before;
}

void Mix(Context& ctx, In mix, const float* a, const float* b, int64_t rows, int64_t width, float* y) {
  MixRows call;
  call.x = {a, width};
  call.before = {b, width};
  call.mix = mix;
  call.y = {y, width};
  call.rows = static_cast<size_t>(rows);
  call.size = static_cast<size_t>(width);
  Run(ctx, call);
}

void Activate(Context& ctx, Activation activation, const float* x, const float* factor, int64_t rows, int64_t size,
              float* y) {
  ActivateRows call;
  call.activation = activation;
  call.x = {x, size};
  call.factor = {factor, size};
  call.y = {y, size};
  call.rows = static_cast<size_t>(rows);
  call.size = static_cast<size_t>(size);
  Run(ctx, call);
}

}  // namespace heed::layers

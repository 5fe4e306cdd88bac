// Token shift: what the layers of RWKV do to rows before their products.
#ifndef HEED_LAYERS_TOKEN_SHIFT_INTERNAL_H_
#define HEED_LAYERS_TOKEN_SHIFT_INTERNAL_H_

#include <cstdint>

#include "heed/layers/activation.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/layer.h"
#include "heed/layers/rows_internal.h"

namespace heed::layers {

// The row before each of x [B, T, width]: of the first the state's, which becomes the last row of each sequence; zeros
// without a state.
const float* Before(Frame& frame, const Tokens& tokens, const float* x, int64_t width, StateTensor* state);

// y = mix .* a + (1 - mix) .* b
void Mix(Context& ctx, In mix, const float* a, const float* b, int64_t rows, int64_t width, float* y);

// y = activation(x) .* factor, of contiguous rows; factor may be null: 1.
void Activate(Context& ctx, Activation activation, const float* x, const float* factor, int64_t rows, int64_t size,
              float* y);

}  // namespace heed::layers

#endif  // HEED_LAYERS_TOKEN_SHIFT_INTERNAL_H_

// Token shift: the mix of each row with the previous one, before the products of RWKV's layers.
#ifndef HEED_LAYERS_TOKEN_SHIFT_INTERNAL_H_
#define HEED_LAYERS_TOKEN_SHIFT_INTERNAL_H_

#include <cstdint>

#include "heed/layers/activation.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/layer.h"
#include "heed/layers/rows_internal.h"

namespace heed::layers {

// The previous row of each row of x [B, T, width]. Before the first row of a sequence it is the state's, to which the
// sequence's last row is then assigned; zeros without a state.
const float* Before(Frame& frame, const Tokens& tokens, const float* x, int64_t width, StateTensor* state);

// y = mix .* a + (1 - mix) .* b
void Mix(Context& ctx, In mix, const float* a, const float* b, int64_t rows, int64_t width, float* y);

// y = activation(x) .* factor, for contiguous rows; factor may be null: 1.
void Activate(Context& ctx, Activation activation, const float* x, const float* factor, int64_t rows, int64_t size,
              float* y);

}  // namespace heed::layers

#endif  // HEED_LAYERS_TOKEN_SHIFT_INTERNAL_H_

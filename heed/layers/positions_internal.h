// The positions of a call's tokens in their sequences.
#ifndef HEED_LAYERS_POSITIONS_INTERNAL_H_
#define HEED_LAYERS_POSITIONS_INTERNAL_H_

#include <algorithm>
#include <cstdint>

#include "heed/layers/arena_internal.h"
#include "heed/layers/layer.h"

namespace heed::layers {

// Positions [B, T] i64, valid as long as the frame. They begin at 0, or at the length of a state, and again at 0 in
// each packed sequence. Padding has the position of the last token, so that no row exceeds its sequence's length.
inline ConstTensorView Positions(Frame& frame, const Tokens& tokens, const State* state) {
  int64_t* positions = frame.Integers(tokens.rows());
  for (int64_t b = 0; b < tokens.B; ++b) {
    const int64_t begin = state == nullptr ? 0 : state->lengths()[static_cast<size_t>(b)];
    const int64_t last = std::max<int64_t>(tokens.counts[static_cast<size_t>(b)] - 1, 0);
    for (int64_t t = 0; t < tokens.T; ++t) positions[b * tokens.T + t] = begin + std::min(t, last);
  }
  for (size_t i = 0; i + 1 < tokens.packed.size(); ++i) {
    for (int64_t t = tokens.packed[i]; t < tokens.packed[i + 1]; ++t) positions[t] = t - tokens.packed[i];
  }
  return ConstTensorView(positions, DType::kI64, {tokens.B, tokens.T});
}

}  // namespace heed::layers

#endif  // HEED_LAYERS_POSITIONS_INTERNAL_H_

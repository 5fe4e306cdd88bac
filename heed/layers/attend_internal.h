// Common functions of attention layers: attention of rows, with a cache or without one.
#ifndef HEED_LAYERS_ATTEND_INTERNAL_H_
#define HEED_LAYERS_ATTEND_INTERNAL_H_

#include <algorithm>
#include <cstdint>

#include "heed/layers/layer.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::layers {

// A view [B, T, H, D] of heads inside rows that are `stride` elements apart.
inline ConstTensorView Heads(const float* data, const Tokens& tokens, int64_t heads, int64_t dim, int64_t stride) {
  return ConstTensorView(data, DType::kF32, {tokens.B, tokens.T, heads, dim}, {tokens.T * stride, stride, dim, 1});
}
inline TensorView Heads(float* data, const Tokens& tokens, int64_t heads, int64_t dim, int64_t stride) {
  return TensorView(data, DType::kF32, {tokens.B, tokens.T, heads, dim}, {tokens.T * stride, stride, dim, 1});
}

// Sets the options that belong to a call.
inline void ApplyCall(const Tokens& tokens, attention::Options& options) {
  options.mask = tokens.call.mask;
  options.cu_seqlens_q = tokens.call.cu_seqlens;
  options.query_lengths = tokens.call.lengths;
}

// Attention over a cache. Rows beyond the longest sequence of the call are not computed.
inline void AttendRows(Context& ctx, const KVView& cache, int64_t longest, const ConstTensorView& q,
                       const attention::Options& options, const TensorView& o) {
  if (longest == 0) return;
  attention::Attend(ctx, cache, q.Slice(1, 0, longest), options, {.o = o.Slice(1, 0, longest), .lse = {}});
}

inline int64_t Longest(const Tokens& tokens) {
  return tokens.counts.empty() ? 0 : *std::ranges::max_element(tokens.counts);
}

// Self attention of a call's tokens. With a state, its cache takes k and v, and queries also see the earlier tokens.
inline void AttendSelf(Context& ctx, const Tokens& tokens, State* state, const ConstTensorView& q,
                       const ConstTensorView& k, const ConstTensorView& v, attention::Options options,
                       const TensorView& o) {
  if (state != nullptr) {
    state->keys->Append(k, v, tokens.counts);
    return AttendRows(ctx, state->keys->view(), Longest(tokens), q, options, o);
  }
  ApplyCall(tokens, options);
  options.key_lengths = tokens.call.lengths;
  options.align = attention::Align::kTopLeft;
  attention::Forward(ctx, {q, k, v}, options, {.o = o, .lse = {}});
}

}  // namespace heed::layers

#endif  // HEED_LAYERS_ATTEND_INTERNAL_H_

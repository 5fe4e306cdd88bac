// Layer: the interface of all layers. A layer maps rows of tokens to rows of tokens, and may have one State.
#ifndef HEED_LAYERS_LAYER_H_
#define HEED_LAYERS_LAYER_H_

#include <cstdint>
#include <span>
#include <string>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/layers/state.h"

namespace heed::layers {

// Optional information about the tokens of a call beside their rows. Integers are i32 or i64.
struct Call {
  ConstTensorView lengths;     // [B], 0 to T: tokens of each sequence; rows beyond are padding and are not read
  ConstTensorView cu_seqlens;  // [N + 1]: N sequences one after another in one row of a batch, B = 1; not with a state

  // The following members are for attention alone.
  ConstTensorView memory;          // [B, S, memory width] f32: the sequence that cross attention reads
  ConstTensorView memory_lengths;  // [B], 0 to S
  ConstTensorView mask;            // bool, broadcastable to [B, heads, T, T or S], true = keep; not with a state
  ConstTensorView global_tokens;   // [n] or, by sequence, [B, n]: Longformer's; -1 is absent
};

struct StateOptions {
  int64_t batch = 1;
  int64_t capacity = -1;  // tokens of a cache, at least 1; -1: it grows; see KVCache::Options
  int64_t page = 64;
};

// The tokens of a call, after their checks.
struct Tokens {
  int64_t B = 0, T = 0;
  std::span<const int64_t> counts;  // [B]: tokens of each sequence; all T where call.lengths is absent
  std::span<const int64_t> packed;  // call.cu_seqlens, or empty
  Call call;
  int64_t rows() const { return B * T; }
};

class HEED_API Layer {
 public:
  virtual ~Layer() = default;

  const std::string& name() const { return name_; }  // "layers::Mamba"
  int64_t width() const { return width_; }

  // An empty state. Throws InvalidArgument for a batch below 1, for options that a cache refuses, and by layers that
  // have no state.
  virtual State MakeState(const StateOptions& options = {}) const = 0;

  // y = the layer's outputs for x. Both are f32 [B, T, width], row-major, and share no memory. With a state, the tokens
  // follow those that it has processed, and it is advanced; without one, each sequence begins. Rows of y beyond lengths
  // are indeterminate.
  //
  // Edges. B and T may be 0. Precision. f32; each operation documents the type and order of its sums. The bits of a
  // sequence depend neither on threads nor on the other sequences. A sequence that is split into calls and steps agrees
  // with the whole to rounding.
  //
  // Throws InvalidArgument that names the argument, before anything is written.
  void Forward(Context& ctx, const ConstTensorView& x, const Call& call, State* state, const TensorView& y) const;

  // Processes one token of each sequence: x and y are [B, width]. Bound by the memory of weights and state.
  void Step(Context& ctx, const ConstTensorView& x, State& state, const TensorView& y) const;

  // Forward() after its checks, for layers that contain others. The caller advances the state's lengths.
  virtual void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const = 0;

  virtual bool takes_global_tokens() const { return false; }

  // Checks `call` for conditions of this layer beyond those of all layers. Throws InvalidArgument.
  virtual void Check(const Tokens& tokens, const State* state) const;

 protected:
  Layer(std::string name, int64_t width);

 private:
  std::string name_;
  int64_t width_;
};

// Throws InvalidArgument "layers::Mamba: config.heads is 0, expected at least 1".
HEED_API void CheckConfig(const std::string& layer, const char* field, int64_t value, int64_t least = 1);

// Throws InvalidArgument "config.heads is 5, expected a divisor of width, 12".
HEED_API void CheckDivisor(const std::string& layer, const char* field, int64_t value, const char* of, int64_t total);

}  // namespace heed::layers

#endif  // HEED_LAYERS_LAYER_H_

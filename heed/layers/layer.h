// Layer: what all layers are, seen from outside: rows of tokens in, rows of tokens out, and one State.
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

// What a call says of its tokens beside their rows. Everything may be left out. Integers are i32 or i64.
struct Call {
  ConstTensorView lengths;     // [B], 0 to T: tokens of each sequence; rows beyond are padding, read by nobody
  ConstTensorView cu_seqlens;  // [N + 1]: N sequences one after another in one row of a batch, B = 1; without a state

  // Of attention alone.
  ConstTensorView memory;          // [B, S, memory width] f32: what cross attention looks at
  ConstTensorView memory_lengths;  // [B], 0 to S
  ConstTensorView mask;            // bool, broadcastable to [B, heads, T, T or S], true = keep; without a state
  ConstTensorView global_tokens;   // [n] or, by sequence, [B, n]: Longformer's; -1 is absent
};

struct StateOptions {
  int64_t batch = 1;
  int64_t capacity = -1;  // tokens of a cache, at least 1; -1: it grows. As KVCache::Options
  int64_t page = 64;
};

// The tokens of a call, checked.
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

  // y = the layer's outputs for x. Both are f32 [B, T, width], row-major, and share no memory. With a state the tokens
  // follow those that it has seen, and it goes on from them; without one each sequence begins. Rows of y beyond lengths
  // hold anything.
  //
  // Edges. B and T may be 0. Precision. f32; what sums are in and how they are taken is said of each operation. Bits of
  // a sequence depend neither on threads nor on the sequences beside it. A sequence split into calls and steps agrees
  // to rounding.
  //
  // Throws InvalidArgument that names the argument, before anything is written.
  void Forward(Context& ctx, const ConstTensorView& x, const Call& call, State* state, const TensorView& y) const;

  // One token of each sequence: x and y are [B, width]. Bound by the memory of weights and state.
  void Step(Context& ctx, const ConstTensorView& x, State& state, const TensorView& y) const;

  // Forward() after its checks, for layers that contain others. The state's lengths are advanced by whoever calls it.
  virtual void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const = 0;

  virtual bool takes_global_tokens() const { return false; }

  // What of `call` a layer refuses beyond what all do. Throws InvalidArgument.
  virtual void Check(const Tokens& tokens, const State* state) const;

 protected:
  Layer(std::string name, int64_t width);

 private:
  std::string name_;
  int64_t width_;
};

// Throws InvalidArgument "layers::Mamba: config.heads is 0, expected at least 1".
HEED_API void CheckConfig(const std::string& layer, const char* field, int64_t value, int64_t least = 1);

// Throws it "config.heads is 5, expected a divisor of width, 12".
HEED_API void CheckDivisor(const std::string& layer, const char* field, int64_t value, const char* of, int64_t total);

}  // namespace heed::layers

#endif  // HEED_LAYERS_LAYER_H_

// Layer: the common checks of all layers.
#include "heed/layers/layer.h"

#include <algorithm>
#include <utility>

#include "heed/core/error.h"
#include "heed/layers/arena_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed::layers {
namespace {

using mechanism::Fail;

void CheckRows(const char* op, const char* name, const ConstTensorView& t, const mechanism::Axes& shape) {
  mechanism::CheckTensor(op, name, t, shape, DType::kF32, true);
  int64_t stride = 1;
  for (int axis = t.rank() - 1; axis >= 0; --axis) {
    if (t.size(axis) > 1 && t.stride(axis) != stride && t.num_elements() != 0) {
      Fail(op, name, "has stride " + std::to_string(t.stride(axis)) + " in axis " + std::to_string(axis),
           std::to_string(stride) + ": row-major");
    }
    stride *= t.size(axis);
  }
}

void CheckIntegers(const char* op, const char* name, const ConstTensorView& t) {
  mechanism::CheckReadable(op, name, t);
  if (t.dtype() != DType::kI32 && t.dtype() != DType::kI64)
    Fail(op, name, std::string("has dtype ") + Name(t.dtype()), "i32 or i64");
  if (t.rank() != 1) Fail(op, name, "has shape " + t.ShapeString(), "one axis");
}

int64_t Integer(const ConstTensorView& t, int64_t index) {
  return LoadAsInt64(t.dtype(), t.data(), index * t.stride(0));
}

void CheckLengths(const char* op, const char* name, const ConstTensorView& t, int64_t batch, int64_t most) {
  CheckIntegers(op, name, t);
  if (t.size(0) != batch) Fail(op, name, "has shape " + t.ShapeString(), "[" + std::to_string(batch) + "]");
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = Integer(t, b);
    if (length < 0 || length > most) {
      Fail(op, name, "has an element " + std::to_string(length), "0 to " + std::to_string(most));
    }
  }
}

void CheckPacked(const char* op, const ConstTensorView& t, int64_t batch, int64_t tokens) {
  CheckIntegers(op, "cu_seqlens", t);
  if (batch != 1) Fail(op, "cu_seqlens", "is given with a batch of " + std::to_string(batch), "a batch of 1");
  if (t.size(0) < 1 || Integer(t, 0) != 0)
    Fail(op, "cu_seqlens", "does not begin with 0", "0 and the end of each sequence");
  for (int64_t i = 1; i < t.size(0); ++i) {
    if (Integer(t, i) < Integer(t, i - 1) || Integer(t, i) > tokens) {
      Fail(op, "cu_seqlens", "has an element " + std::to_string(Integer(t, i)),
           std::to_string(Integer(t, i - 1)) + " to " + std::to_string(tokens));
    }
  }
}

}  // namespace

void CheckConfig(const std::string& layer, const char* field, int64_t value, int64_t least) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (value < least || value > kMost) {
    throw InvalidArgument(layer + ": config." + field + " is " + std::to_string(value) + ", expected " +
                          std::to_string(least) + " to " + std::to_string(kMost));
  }
}

void CheckDivisor(const std::string& layer, const char* field, int64_t value, const char* of, int64_t total) {
  if (total % value != 0) {
    throw InvalidArgument(layer + ": config." + field + " is " + std::to_string(value) + ", expected a divisor of " +
                          of + ", " + std::to_string(total));
  }
}

Layer::Layer(std::string name, int64_t width) : name_(std::move(name)), width_(width) {
  CheckConfig(name_, "width", width);
}

void Layer::Check(const Tokens& tokens, const State*) const {
  const std::string op = name_ + "::Forward";
  if (tokens.call.memory || tokens.call.memory_lengths)
    Fail(op.c_str(), "memory", "is given", "none: this is no cross attention");
  if (tokens.call.mask) Fail(op.c_str(), "mask", "is given", "none: this is no attention");
}

void Layer::Forward(Context& ctx, const ConstTensorView& x, const Call& call, State* state, const TensorView& y) const {
  const std::string name = name_ + "::Forward";
  const char* op = name.c_str();
  if (x.rank() != 3) Fail(op, "x", "has shape " + x.ShapeString(), "[B, T, " + std::to_string(width_) + "]");
  const int64_t B = x.size(0), T = x.size(1);
  CheckRows(op, "x", x, {B, T, width_});
  CheckRows(op, "y", y, {B, T, width_});
  mechanism::CheckWritable(op, "y", y, "x", x);
  if (call.lengths) CheckLengths(op, "lengths", call.lengths, B, T);
  if (call.cu_seqlens) {
    CheckPacked(op, call.cu_seqlens, B, T);
    if (call.lengths) Fail(op, "cu_seqlens", "is given beside lengths", "one of the two");
    if (state != nullptr) Fail(op, "cu_seqlens", "is given with a state", "lengths instead");
  }
  if (call.memory) {
    mechanism::CheckReadable(op, "memory", call.memory);
    if (call.memory.rank() != 3) Fail(op, "memory", "has shape " + call.memory.ShapeString(), "[B, S, memory width]");
    CheckRows(op, "memory", call.memory, {B, call.memory.size(1), call.memory.size(2)});
    if (call.memory_lengths) CheckLengths(op, "memory_lengths", call.memory_lengths, B, call.memory.size(1));
    mechanism::CheckWritable(op, "y", y, "memory", call.memory);
  } else if (call.memory_lengths) {
    Fail(op, "memory_lengths", "is given without memory", "both");
  }
  if (call.global_tokens && !takes_global_tokens())
    Fail(op, "global_tokens", "is given", "none: this is not Longformer's attention");
  if (state != nullptr) {
    if (state->layer() != name_) Fail(op, "state", "is of " + state->layer(), "a state that this layer has made");
    if (state->batch() != B) Fail(op, "state", "has a batch of " + std::to_string(state->batch()), std::to_string(B));
  }
  Frame frame;
  Tokens tokens;
  tokens.B = B;
  tokens.T = T;
  tokens.call = call;
  int64_t* counts = frame.Integers(B);
  for (int64_t b = 0; b < B; ++b) counts[b] = call.lengths ? Integer(call.lengths, b) : T;
  tokens.counts = {counts, static_cast<size_t>(B)};
  if (call.cu_seqlens) {
    const int64_t bounds = call.cu_seqlens.size(0);
    int64_t* packed = frame.Integers(bounds);
    for (int64_t i = 0; i < bounds; ++i) packed[i] = Integer(call.cu_seqlens, i);
    tokens.packed = {packed, static_cast<size_t>(bounds)};
  }
  Check(tokens, state);
  if (B * T == 0) return;
  Compute(ctx, tokens, x.as<float>(), y.as<float>(), state);
  if (state != nullptr) state->Advance(tokens.counts);
}

void Layer::Step(Context& ctx, const ConstTensorView& x, State& state, const TensorView& y) const {
  const std::string name = name_ + "::Step";
  if (x.rank() != 2) Fail(name.c_str(), "x", "has shape " + x.ShapeString(), "[B, " + std::to_string(width_) + "]");
  if (y.rank() != 2) Fail(name.c_str(), "y", "has shape " + y.ShapeString(), "[B, " + std::to_string(width_) + "]");
  Forward(
      ctx,
      ConstTensorView(x.data(), x.dtype(), {x.size(0), 1, x.size(1)}, {x.stride(0), x.stride(0), x.stride(1)},
                      x.device()),
      {}, &state,
      TensorView(y.data(), y.dtype(), {y.size(0), 1, y.size(1)}, {y.stride(0), y.stride(0), y.stride(1)}, y.device()));
}

}  // namespace heed::layers

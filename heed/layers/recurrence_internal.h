// Recurrences that layers find by name: their passes, their states, and the arguments that LinearAttention gives each.
#ifndef HEED_LAYERS_RECURRENCE_INTERNAL_H_
#define HEED_LAYERS_RECURRENCE_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "heed/core/context.h"
#include "heed/layers/layer.h"
#include "heed/mechanism/recurrent.h"

namespace heed::layers {

// Passes with the mechanism's own default options.
struct Recurrence {
  std::string_view name;
  void (*forward)(Context&, const recurrent::Inputs&, const recurrent::Options&, const recurrent::Outputs&);
  void (*step)(Context&, const recurrent::StepInputs&, const recurrent::State&, const TensorView& o);
  void (*reference)(const recurrent::Inputs&, const recurrent::Options&, const recurrent::Outputs&);
  bool normalised = false, maximum = false;                               // the state has z; the state has m
  int64_t (*features)(int64_t keys) = [](int64_t keys) { return keys; };  // rows of S
};

// Throws InternalError for an unknown name.
const Recurrence& RecurrenceNamed(std::string_view name);

// Adds tensors "S" [batch, heads, features, values] and, if the recurrence has them, "z" [batch, heads, features] and
// "m" [batch, heads].
void AddRecurrence(const Recurrence& of, int64_t heads, int64_t keys, int64_t values, State& state);

// The number of tensors that AddRecurrence adds.
inline int TensorsOf(const Recurrence& of) { return 1 + of.normalised + of.maximum; }

// Computes o [B, T, heads, values] of the tokens of a call, f32. With a state it continues from it, by a step if each
// sequence has one token. Its tensors are those of the state from index `first` on.
void RunRecurrence(Context& ctx, const Recurrence& of, const Tokens& tokens, const recurrent::Inputs& in, State* state,
                   const TensorView& o, size_t first = 0);

// A row of LinearAttention's table.
struct LinearMechanism {
  enum Decay { kNone, kHead, kKey, kStep };  // none; log(sigmoid) per head or per key channel; -exp(A_log) softplus

  std::string_view name;
  Decay decay;
  bool beta;  // for delta rules, whose queries and keys have norm 1
  const Recurrence& passes() const { return RecurrenceNamed(name); }
};

// Throws InvalidArgument that lists the names for an unknown one.
const LinearMechanism& LinearMechanismNamed(const std::string& layer, std::string_view name);

}  // namespace heed::layers

#endif  // HEED_LAYERS_RECURRENCE_INTERNAL_H_

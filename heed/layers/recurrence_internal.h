// Recurrences that layers take by name: their passes, their states, and what LinearAttention gives each.
#ifndef HEED_LAYERS_RECURRENCE_INTERNAL_H_
#define HEED_LAYERS_RECURRENCE_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "heed/core/context.h"
#include "heed/layers/layer.h"
#include "heed/ops/mechanism/recurrent.h"

namespace heed::layers {

// Passes with the mechanism's own default options.
struct Recurrence {
  std::string_view name;
  void (*forward)(Context&, const recurrent::Inputs&, const recurrent::Options&, const recurrent::Outputs&);
  void (*step)(Context&, const recurrent::StepInputs&, const recurrent::State&, const TensorView& o);
  void (*reference)(const recurrent::Inputs&, const recurrent::Options&, const recurrent::Outputs&);
  bool normalised = false, maximum = false;                               // states have z, and m
  int64_t (*features)(int64_t keys) = [](int64_t keys) { return keys; };  // rows of S
};

// Throws InternalError for a name that no recurrence has.
const Recurrence& RecurrenceNamed(std::string_view name);

// Adds tensors "S" [batch, heads, features, values] and, where there are some, "z" [batch, heads, features] and "m"
// [batch, heads].
void AddRecurrence(const Recurrence& of, int64_t heads, int64_t keys, int64_t values, State& state);

// How many tensors these are.
inline int TensorsOf(const Recurrence& of) { return 1 + of.normalised + of.maximum; }

// o [B, T, heads, values] of the tokens of a call, f32; with a state it goes on from it, by a step where there is one
// token of each sequence. Its tensors are those of the state from `first` on.
void RunRecurrence(Context& ctx, const Recurrence& of, const Tokens& tokens, const recurrent::Inputs& in, State* state,
                   const TensorView& o, size_t first = 0);

// A row of LinearAttention's table.
struct LinearMechanism {
  enum Decay { kNone, kHead, kKey, kStep };  // log(sigmoid) per head, or per key channel; -exp(A_log) softplus

  std::string_view name;
  Decay decay;
  bool beta;  // of delta rules, whose queries and keys have norm 1
  const Recurrence& passes() const { return RecurrenceNamed(name); }
};

// Throws InvalidArgument that lists the names for any other.
const LinearMechanism& LinearMechanismNamed(const std::string& layer, std::string_view name);

}  // namespace heed::layers

#endif  // HEED_LAYERS_RECURRENCE_INTERNAL_H_

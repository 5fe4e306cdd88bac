// Recurrences that layers find by name, and the arguments that layers give them.
#ifndef HEED_LAYERS_RECURRENCE_INTERNAL_H_
#define HEED_LAYERS_RECURRENCE_INTERNAL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "heed/core/context.h"
#include "heed/layers/layer.h"
#include "heed/mechanism/recurrent_internal.h"

namespace heed::layers {

// Arguments by the names that a mechanism has for them, in fixed memory, since a step allocates nothing.
class NamedViews {
 public:
  struct Named {
    std::string_view name;
    ConstTensorView view;
  };

  void Add(std::string_view name, const ConstTensorView& view);
  // Throws InternalError for an unknown name.
  const ConstTensorView& at(std::string_view name) const;
  std::span<const Named> list() const { return {list_.data(), count_}; }

 private:
  std::array<Named, mechanism::kMaxTensors> list_;
  size_t count_ = 0;
};

// Passes with the mechanism's own default options, on views in the order of its table.
struct Recurrence {
  std::string_view name;
  recurrent::Definition definition;
  void (*forward)(Context&, const mechanism::Arguments&, const recurrent::Options&, const mechanism::Results&);
  void (*step)(Context&, const mechanism::Arguments&, const mechanism::Results&);
  void (*reference)(const mechanism::Arguments&, const recurrent::Options&, const mechanism::Results&);

  // The number of its states.
  int states() const;
  // Rows of S.
  int64_t features(int64_t keys) const { return recurrent::FeaturesOf(definition, {.K = keys}); }
};

// Throws InternalError for an unknown name.
const Recurrence& RecurrenceNamed(std::string_view name);

// Adds the states of a recurrence to the state of a layer, by the names of its table.
void AddRecurrence(const Recurrence& of, int64_t heads, int64_t keys, int64_t values, State& state);

// Computes o [B, T, heads, values] of the tokens of a call, f32. With a state it continues from it, by a step if each
// sequence has one token. Its tensors are those of the state from index `first` on. Throws InternalError for an
// argument that the mechanism does not have; optional ones may be left out.
void RunRecurrence(Context& ctx, const Recurrence& of, const Tokens& tokens, const NamedViews& in, State* state,
                   const TensorView& o, size_t first = 0);

// Computes o without a state by the mechanism's reference.
void RecurrenceReference(const Recurrence& of, const NamedViews& in, const Call& call, const TensorView& o);

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

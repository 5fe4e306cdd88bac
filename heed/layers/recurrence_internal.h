// Recurrences that LinearAttention takes by name: what each needs, and its passes.
#ifndef HEED_LAYERS_RECURRENCE_INTERNAL_H_
#define HEED_LAYERS_RECURRENCE_INTERNAL_H_

#include <string>
#include <string_view>

#include "heed/core/context.h"
#include "heed/ops/mechanism/recurrent.h"

namespace heed::layers {

struct Recurrence {
  enum Decay { kNone, kHead, kKey, kStep };  // log(sigmoid) per head, or per key channel; -exp(A_log) softplus

  std::string_view name;
  Decay decay;
  bool beta;        // of delta rules, whose queries and keys have norm 1
  bool normalised;  // states have z
  void (*forward)(Context&, const recurrent::Inputs&, const recurrent::Options&, const recurrent::Outputs&);
  void (*step)(Context&, const recurrent::StepInputs&, const recurrent::State&, const TensorView& o);
  void (*reference)(const recurrent::Inputs&, const recurrent::Options&, const recurrent::Outputs&);
};

// Throws InvalidArgument that lists the names for any other.
const Recurrence& RecurrenceNamed(const std::string& layer, std::string_view name);

}  // namespace heed::layers

#endif  // HEED_LAYERS_RECURRENCE_INTERNAL_H_

// Reads the dict `rope_scaling` or `rope_parameters` of a Transformers config.
#ifndef HEED_PYTHON_ROPE_SCALING_H_
#define HEED_PYTHON_ROPE_SCALING_H_

#include <optional>

#include "heed/ops/positions/rotary_scaling.h"
#include "python/arguments.h"

namespace heed::python {

struct RopeConfig {
  RotaryScaling scaling;
  std::optional<double> rope_theta;
  std::optional<double> partial_rotary_factor;
};

// Throws InvalidArgument for an object that is not a dict, for an unknown key and for a value of the wrong type. A
// value of None counts as absent.
RopeConfig ToRopeConfig(const Argument& argument);

}  // namespace heed::python

#endif  // HEED_PYTHON_ROPE_SCALING_H_

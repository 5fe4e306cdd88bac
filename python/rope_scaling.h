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

// Throws InvalidArgument for what is no dict, for a key that heed does not know
// and for a value of the wrong type. A value of None is absent.
RopeConfig ToRopeConfig(const Argument& argument);

}  // namespace heed::python

#endif  // HEED_PYTHON_ROPE_SCALING_H_

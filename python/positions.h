// Binds the position encodings: rotary, sinusoidal, T5's bias.
#ifndef HEED_PYTHON_POSITIONS_H_
#define HEED_PYTHON_POSITIONS_H_

#include <nanobind/nanobind.h>

#include <cstdint>

#include "heed/ops/positions/rotary.h"
#include "python/arguments.h"

namespace heed::python {

// The keywords of heed.rotary.
struct RotaryChoice {
  RotaryPairs pairs = RotaryPairs::kHalfSplit;
  RotaryOptions options;
};

// Reads a dict of these keywords without `inverse`, for rows of `dim` elements.
RotaryChoice ToRotary(const Argument& argument, int64_t dim);

void BindPositions(nanobind::module_& m);

}  // namespace heed::python

#endif  // HEED_PYTHON_POSITIONS_H_

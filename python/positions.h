// Binds the position encodings: rotary, sinusoidal, T5's bias.
#ifndef HEED_PYTHON_POSITIONS_H_
#define HEED_PYTHON_POSITIONS_H_

#include <nanobind/nanobind.h>

namespace heed::python {

void BindPositions(nanobind::module_& m);

}  // namespace heed::python

#endif  // HEED_PYTHON_POSITIONS_H_

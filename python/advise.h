// Binds the adviser.
#ifndef HEED_PYTHON_ADVISE_H_
#define HEED_PYTHON_ADVISE_H_

#include <nanobind/nanobind.h>

namespace heed::python {

void BindAdvise(nanobind::module_& m);

}  // namespace heed::python

#endif  // HEED_PYTHON_ADVISE_H_

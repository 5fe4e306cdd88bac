// Binds heed.view and heed.View.
#ifndef HEED_PYTHON_VIEW_H_
#define HEED_PYTHON_VIEW_H_

#include <nanobind/nanobind.h>

namespace heed::python {

void BindView(nanobind::module_& m);

}  // namespace heed::python

#endif  // HEED_PYTHON_VIEW_H_

// Binds gated rows, which layers of heed.torch.nn call.
#ifndef HEED_PYTHON_GATED_ROWS_H_
#define HEED_PYTHON_GATED_ROWS_H_

#include <nanobind/nanobind.h>

namespace heed::python {

void BindGatedRows(nanobind::module_& m);

}  // namespace heed::python

#endif  // HEED_PYTHON_GATED_ROWS_H_

// Binds gated rows and token shift, which layers of heed.torch.nn call.
#ifndef HEED_PYTHON_LAYER_ROWS_H_
#define HEED_PYTHON_LAYER_ROWS_H_

#include <nanobind/nanobind.h>

namespace heed::python {

void BindLayerRows(nanobind::module_& m);

}  // namespace heed::python

#endif  // HEED_PYTHON_LAYER_ROWS_H_

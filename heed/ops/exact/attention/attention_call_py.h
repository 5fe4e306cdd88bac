// The arguments of a Python call of attention, for every function that has
// them.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_CALL_PY_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_CALL_PY_H_

#include <nanobind/nanobind.h>

#include "heed/ops/exact/attention/attention.h"
#include "python/tensor_caster.h"

namespace heed::attention {

// What one call was given.
struct Call {
  python::Arrays arrays;
  Inputs in;
  Options options;
  bool describe = false;  // explain: `out` is of no interest
  bool return_lse = false;
  nanobind::handle out;
  TensorView out_view;
  int num_threads = 0;
};

// Reads q, k, v (by position or keyword) and all options into `call`. Throws
// InvalidArgument for a wrong value, a Python TypeError for a wrong keyword.
void ReadCall(const char* operation, PyObject* args, PyObject* kwargs,
              Call& call);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_CALL_PY_H_
